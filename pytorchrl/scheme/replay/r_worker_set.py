"""A set of replay shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytorchrl.agent.options import Factory, option
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import Runtime, ThreadRuntime
from pytorchrl.scheme.base.options import PrefetchOptions, QueueOptions
from pytorchrl.scheme.base.worker import check_count
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.routing import ROUTINGS
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
    class Options(QueueOptions, PrefetchOptions):
        """Options of each gradient worker's replay shards, and of the rollouts and batches in flight to and from them."""

        num_replay_workers: int = option(
            1, low=1, help="Replay shards of each gradient worker, each with its share of the storage's size; 1 is a thread of the "
            "gradient worker's process.")
        replay_worker_resources: Mapping[str, float] = option(
            default_factory=lambda: dict(FREE), help="Ray resources of each remote replay shard.")
        learning_starts: int | None = option(
            None, low=0, help="Env steps that must be in replay before learning begins; None: the algorithm's start_steps, or "
            "train_batch_size for replay of whole rollouts.")
        add_in_flight: int = option(2, low=1, help="Rollouts in flight to each shard before collection waits.")
        routing: str = option(
            "round_robin", choices=ROUTINGS, help="Shard that a rollout is added to: each in turn, a random one, the one with "
            "the fewest env steps, or a fixed one for each collection worker (always so for sequences that span rollouts).")
        min_replay_ratio: float | None = option(
            None, low=0.0, exclusive=True, help="Env steps consumed per env step collected, below which collection waits for "
            "learning; None: never.")
        max_replay_ratio: float | None = option(
            None, low=0.0, exclusive=True, help="Env steps consumed per env step collected, above which learning waits for "
            "collection; None: never.")

        def __post_init__(self) -> None:
            """Refuse a lower bound above the upper one."""
            super().__post_init__()
            low, high = self.min_replay_ratio, self.max_replay_ratio
            if low is not None and high is not None and low > high:
                raise ConfigError(f"min_replay_ratio {low} exceeds max_replay_ratio {high}; collection and learning would wait "
                                  "for each other; lower min_replay_ratio")

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
