"""A set of replay shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.runtime import Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker import check_count
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.tracebacks import brief_errors

FREE = {"num_cpus": 0}
"""A shard works only when it is asked."""


class RWorkerSet(WorkerSet[RWorker]):
    """The shards of one GWorker: one beside it, in a thread of its process, or several that run elsewhere.

    Args:
        num_workers: Number of shards.
        index_parent: Index of the GWorker.
        algo_factory, actor_factory, storage_factory: The agent; the storage's size is that of all shards together.
        worker_resources: What each remote shard asks for.
        seed: The experiment's seed.
        num_threads: Torch threads of each remote shard.
        runtime: Where remote shards run.
        first_incarnation: Of the shards, where their GWorker is a replacement itself.
        debug: Whether shards keep notes of their items.
    """

    kind = "replay shards"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of the replay shards of each gradient worker."""

        num_replay_workers: int = option(
            1, low=1, help="Replay shards of each gradient worker, each with its share of the storage's size; 1 is a thread of the "
            "gradient worker's process.")
        replay_worker_resources: Mapping[str, float] = option(
            default_factory=lambda: dict(FREE), help="Ray resources of each remote replay shard.")

    def __init__(self, num_workers: int, index_parent: int, *, algo_factory: Factory[Any],  # noqa: PLR0913
                 actor_factory: Factory[Any], storage_factory: Factory[Any], worker_resources: Mapping[str, float], seed: int = 0,
                 num_threads: int | None = 1, runtime: Runtime | None = None, first_incarnation: int = 0,
                 debug: bool = False) -> None:
        runtime = runtime or ThreadRuntime()
        is_remote = num_workers > 1
        self.runtime = runtime if is_remote else runtime.in_process()
        params = {"index_parent": index_parent, "algo_factory": algo_factory, "actor_factory": actor_factory,
                  "storage_factory": storage_factory, "num_shards": num_workers, "is_beside_learner": not is_remote, "seed": seed,
                  "runtime": self.runtime, "debug": debug}
        super().__init__(
            RWorker, params, worker_resources if is_remote else {}, num_workers, runtime=self.runtime,
            name=f"GWorker {index_parent}/RWorker ", local_params={}, remote_params={"num_threads": num_threads} if is_remote else {},
            first_incarnation=first_incarnation)

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, algo_factory: Factory[Any], actor_factory: Factory[Any],
                       storage_factory: Factory[Any], worker_resources: Mapping[str, float], seed: int = 0,
                       num_threads: int | None = 1, debug: bool = False) -> Callable[..., RWorkerSet]:
        """A function that makes new RWorkerSets; a GWorker calls it with what only it knows."""
        return partial(
            cls, check_count("num_replay_workers", num_workers), algo_factory=algo_factory, actor_factory=actor_factory,
            storage_factory=storage_factory, worker_resources=worker_resources, seed=seed, num_threads=num_threads,
            debug=debug)
