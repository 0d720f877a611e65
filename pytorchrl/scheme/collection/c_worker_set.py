"""A set of collection workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import DEFAULT_RESOURCES, Journal, Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker import ASYNC, CENTRAL, PARALLEL, Communication, Execution, check_count
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.transport.encoder import DATA, Compression, Wanted
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.tracebacks import brief_errors

INITIAL_PRIORITIES = ("max", "worker")
# Seconds for workers to build new environments.
_RESEED_TIMEOUT_S = 60.0


class CWorkerSet(WorkerSet[CWorker]):
    """The CWorkers of one GWorker. The local one collects only where collection is central and synchronous.

    Central asynchronous collection has one more CWorker, a thread of this process with its own copy of the actor.

    Args:
        num_workers: Number of remote workers; 1 means none.
        index_parent: Index of the GWorker they collect for.
        local_device: Device of the local worker, and of its GWorker.
        algo_factory, actor_factory, storage_factory, train_envs_factory: The agent.
        worker_resources: What each remote worker asks for.
        compress_data_to_send: What becomes of rollouts on their way.
        seed: The experiment's seed.
        num_threads: Torch threads of each remote worker.
        num_parents: Gradient workers that have such a set.
        col_execution, col_communication: Where collection runs and who waits for whom.
        runtime: Where remote workers run.
        initial_weights: Weights that all workers start from.
        collects: False for the GWorker that only serves parameters: no environments anywhere below it.
        first_incarnation: Of its remote workers, where their GWorker is a replacement itself.
        journal: That of their GWorker, for the local worker.
        initial_priority: "worker" or "max"; see `CWorker`.
        col_device: Device of the workers with an actor of their own; None is the CPU.
    """

    kind = "collection workers"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of the collection workers of each gradient worker."""

        num_col_workers: int = option(
            1, low=1, help="Collection workers of each gradient worker; 1 collects in the gradient worker's process, 2 "
            "or more are remote.")
        compress_data_to_send: bool | str = option(
            False, help="Codec of rollouts: False, True (\"lz4\"), \"lz4\", \"zstd\", or \"auto\", which uses lz4 "
            "while that saves time.")
        col_worker_resources: Mapping[str, float] = option(
            default_factory=lambda: dict(DEFAULT_RESOURCES),
            help="Ray resources of each remote collection worker. The default includes a share of a GPU only for "
            "workers that "
            "compute on one, and shrinks to what is available.")
        col_device: str | None = option(
            None, help="Device of collection workers with an actor of their own: \"cpu\", \"cuda\" (the GPU that Ray "
            "assigned to the "
            "worker) or \"cuda:N\"; None: the CPU.")
        col_num_threads: int | None = option(
            None, low=1, help="PyTorch threads of each collection worker in a process of its own; None: num_threads.")

        def __post_init__(self) -> None:
            """Refuse codecs that are unknown, not installed or lossy."""
            super().__post_init__()
            Compression.of(DATA, self.compress_data_to_send)

    @dataclass(frozen=True, kw_only=True)
    class ReplayOptions(Options):
        """Options of collection workers that feed replay shards."""

        initial_priority: str = option(
            "max", choices=INITIAL_PRIORITIES, help="First priority of a transition in a storage with priorities: "
            "\"max\", the largest "
            "so far, or \"worker\", its TD error under the weights that collected it.")

    def __init__(self, num_workers: int, index_parent: int, local_device: str | None = None, *,  # noqa: PLR0913
                 algo_factory: Factory[Any],
                 actor_factory: Factory[Any], storage_factory: Factory[Any], train_envs_factory: Factory[Any],
                 worker_resources: Mapping[str, float] = DEFAULT_RESOURCES,
                 compress_data_to_send: Wanted = False, seed: int = 0, num_threads: int | None = 1,
                 num_parents: int = 1,
                 col_execution: Execution | str = CENTRAL,
                 col_communication: Communication | str = "synchronous", runtime: Runtime | None = None,
                 initial_weights: Weights | None = None, collects: bool = True, first_incarnation: int = 0,
                 journal: Journal | None = None, initial_priority: str = "max", col_device: str | None = None) -> None:
        parallel, asynchronous = Execution(col_execution) is PARALLEL, Communication(col_communication) is ASYNC
        runtime = runtime or ThreadRuntime()
        self.runtime = runtime if parallel else runtime.in_process()
        params = {
            "index_parent": index_parent, "algo_factory": algo_factory, "actor_factory": actor_factory,
            "storage_factory": storage_factory, "train_envs_factory": train_envs_factory, "seed": seed,
            "compress_data_to_send": Compression.of(DATA, compress_data_to_send), "initial_weights": initial_weights,
            "num_siblings": num_workers, "num_parents": num_parents, "runtime": self.runtime,
            "initial_priority": initial_priority,
        }
        twin = asynchronous and not parallel
        gpus = runtime.own_gpus()  # of this process; remote workers look for their own
        local_device = check_device(local_device, gpus, "grad_device" if index_parent else "device")
        if twin:
            col_device = check_device(col_device, gpus, "col_device")
        num_remote = 0 if not collects else num_workers if parallel else int(twin)
        super().__init__(
            CWorker, params, {} if twin else worker_resources, num_remote, runtime=self.runtime,
            name=f"GWorker {index_parent}/CWorker ", first_index=0 if twin else 1, first_incarnation=first_incarnation,
            local_params={"device": local_device, "owned_data": False, "incarnation": first_incarnation,
                          "journal": journal,
                          "collects": collects and not parallel and not asynchronous},
            remote_params={"device": col_device, **({} if twin else {"num_threads": num_threads})})

    def close(self, timeout_s: float) -> tuple[int | None, int]:
        """Close all collection workers, and kill them; wait at most `timeout_s` seconds for their answers.

        Returns:
            The env steps that the workers counted themselves, or None if one did not answer and its count is lost; and
            the env steps that no rollout has delivered.
        """
        outcomes = self.runtime.get_all([handle.submit(CWorker.close) for handle in self.remote_workers()], timeout_s)
        counts = [self.local_worker().close(), *(outcome.value for outcome in outcomes if outcome.value is not None)]
        for handle in self.remote_workers():
            self.runtime.kill(handle)
        made = sum(steps for steps, _ in counts) if len(counts) == 1 + len(outcomes) else None
        return made, sum(undelivered for _, undelivered in counts)

    def reseed_remote(self, seed: int) -> None:
        """Reseed all remote workers, see `CWorker.reseed`; a lost worker is replaced later, by a new one anyway."""
        calls = [handle.submit(CWorker.reseed, seed) for handle in self.remote_workers()]
        for outcome in self.runtime.get_all(calls, _RESEED_TIMEOUT_S):
            if not isinstance(outcome.error, WorkerLostError):
                outcome.unwrap()

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, algo_factory: Factory[Any], actor_factory: Factory[Any],  # noqa: PLR0913
                       storage_factory: Factory[Any], train_envs_factory: Factory[Any],
                       worker_resources: Mapping[str, float] = DEFAULT_RESOURCES,
                       compress_data_to_send: Wanted = False, seed: int = 0, num_threads: int | None = 1,
                       num_parents: int = 1, initial_priority: str = "max", col_device: str | None = None,
                       ) -> Callable[..., CWorkerSet]:
        """A function that makes new CWorkerSets; a GWorker calls it with what only it knows."""
        check_count("num_workers", num_workers)
        return partial(
            cls, num_workers, algo_factory=algo_factory, actor_factory=actor_factory, storage_factory=storage_factory,
            train_envs_factory=train_envs_factory, worker_resources=worker_resources,
            compress_data_to_send=compress_data_to_send, seed=seed, num_threads=num_threads,
            num_parents=num_parents, initial_priority=initial_priority, col_device=col_device)
