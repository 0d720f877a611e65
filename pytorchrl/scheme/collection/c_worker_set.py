"""A set of collection workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import DEFAULT_RESOURCES, Journal, Runtime, ThreadRuntime
from pytorchrl.scheme.base.levels import from_keywords
from pytorchrl.scheme.base.worker import ASYNC, CENTRAL, PARALLEL, SYNC, Communication, Execution, check_execution
from pytorchrl.scheme.base.worker_set import WorkerSet, check_resources
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.transport.encoder import DATA, Compression
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytorchrl.agent.actors.base import Actor
    from pytorchrl.agent.algorithms.base import Algorithm
    from pytorchrl.agent.env import EnvFactory
    from pytorchrl.agent.storages.base import Storage
    from pytorchrl.scheme.keywords import CollectionKeywords

# Seconds for workers to build new environments.
_RESEED_TIMEOUT_S = 60.0
INITIAL_PRIORITIES = ("max", "worker")


class CWorkerSet(WorkerSet[CWorker]):
    """The collection workers of one gradient worker.

    The local one collects only if collection is central and synchronous. Central asynchronous collection has one more
    worker: a thread of the same process with its own copy of the actor.

    Args:
        factory: Recipe of the set.
        index_parent: Index of the gradient worker.
        local_device: Device of the local worker, and of its gradient worker.
        runtime: Runtime of the remote workers; None: threads.
        col_execution: "Central" or "Parallel" collection.
        col_communication: "synchronous" or "asynchronous" collection.
        initial_weights: Weights that all workers start from.
        collects: False for a gradient worker that only serves parameters: its set has no environments.
        first_incarnation: Incarnation of the remote workers, above 0 if their gradient worker is a replacement.
        journal: Journal of the gradient worker, for the local worker.
    """

    kind = "collection workers"
    home = "scheme"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of the collection workers of each gradient worker."""

        num_col_workers: int | tuple[int, ...] = option(
            1, low=1, help="Collection workers of each gradient worker, or a tuple with a number for each. 1 collects "
                           "in the gradient "
            "worker's process, 2 or more are remote.")
        col_execution: Execution | None = option(
            None, help="Place of collection: \"Central\" is the gradient worker's process, \"Parallel\" makes all "
                       "collection workers "
            "remote, also a single one. None: by their number.")
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
            """Refuse codecs that are unknown, not installed or lossy, and wrong resources."""
            super().__post_init__()
            check_resources("col_worker_resources", self.col_worker_resources)
            Compression.of(DATA, self.compress_data_to_send)

        @property
        def num_workers(self) -> int:
            """Largest number of collection workers of a gradient worker."""
            return max(self.numbers())

        @property
        def is_parallel(self) -> bool:
            """Whether the collection workers are remote."""
            return self.num_workers > 1 if self.col_execution is None else self.col_execution is PARALLEL

        def numbers(self, num_parents: int = 1) -> tuple[int, ...]:
            """Return the number of collection workers of each gradient worker that computes gradients."""
            given = self.num_col_workers
            return given if isinstance(given, tuple) else (given,) * num_parents

    @dataclass(frozen=True, kw_only=True)
    class ReplayOptions(Options):
        """Options of collection workers that feed replay shards."""

        initial_priority: str = option(
            "max", choices=INITIAL_PRIORITIES, help="First priority of a transition in a storage with priorities: "
                                                    "\"max\", the largest "
            "so far, or \"worker\", its TD error under the weights that collected it.")

    def __init__(self, factory: CWorkerSetFactory, index_parent: int = 0,  # noqa: PLR0913 - its parent knows them
                 local_device: str | None = None, *, runtime: Runtime | None = None,
                 col_execution: Execution | str = CENTRAL, col_communication: Communication | str = SYNC,
                 initial_weights: Weights | None = None, collects: bool = True,
                 first_incarnation: int = 0, journal: Journal | None = None) -> None:
        runtime, options = runtime or ThreadRuntime(), factory.options
        parallel = check_execution("col", col_execution, options.num_workers) is PARALLEL
        asynchronous = Communication(col_communication) is ASYNC
        self.runtime = runtime if parallel else runtime.in_process()
        numbers, place = options.numbers(factory.num_parents), max(0, index_parent - 1)
        params = {
            "index_parent": index_parent, "algo_factory": factory.algo_factory, "actor_factory": factory.actor_factory,
            "storage_factory": factory.storage_factory, "train_envs_factory": factory.train_envs_factory,
            "seed": factory.seed,
            "compress_data_to_send": Compression.of(DATA, options.compress_data_to_send),
            "initial_weights": initial_weights,
            "first_place": sum(numbers[:place]), "num_places": sum(numbers), "runtime": self.runtime,
            "initial_priority": options.initial_priority if isinstance(options, CWorkerSet.ReplayOptions) else "max",
        }
        has_twin = asynchronous and not parallel
        gpus = runtime.own_gpus()  # of this process; remote workers look for their own
        local_device = check_device(local_device, gpus, "grad_device" if index_parent else "device")
        col_device = check_device(options.col_device, gpus, "col_device") if has_twin else options.col_device
        num_remote = 0 if not collects else numbers[min(place, len(numbers) - 1)] if parallel else int(has_twin)
        num_threads = factory.num_threads if options.col_num_threads is None else options.col_num_threads
        super().__init__(
            CWorker, params, {} if has_twin else options.col_worker_resources, num_remote, runtime=self.runtime,
            name=f"GWorker {index_parent}/CWorker ", first_index=0 if has_twin else 1,
            first_incarnation=first_incarnation,
            local_params={"device": local_device, "owned_data": False, "incarnation": first_incarnation,
                          "journal": journal,
                          "collects": collects and not parallel and not asynchronous},
            remote_params={"device": col_device, **({} if has_twin else {"num_threads": num_threads})})

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
    def create_factory(cls, num_workers: int | tuple[int, ...], algo_factory: Factory[Algorithm],
                       actor_factory: Factory[Actor],
                       storage_factory: Factory[Storage], train_envs_factory: EnvFactory,
                       **options: Unpack[CollectionKeywords]) -> CWorkerSetFactory:
        """Return a recipe for the collection workers of each gradient worker.

        Args:
            num_workers: Collection workers of each gradient worker, or a tuple with a number for each.
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of each worker's environments.
            **options: Fields of `CWorkerSet.ReplayOptions`, except the number and the execution.

        Returns:
            A function of `(index_parent=0, local_device=None, runtime=None)`, which builds a new set.

        Raises:
            ConfigError: An option is unknown or has a wrong value.
        """
        given = {**options, "num_col_workers": num_workers}
        return CWorkerSetFactory(
            from_keywords("CWorkerSet", cls.ReplayOptions if "initial_priority" in options else cls.Options, given),
            algo_factory, actor_factory, storage_factory, train_envs_factory)


@dataclass(frozen=True)
class CWorkerSetFactory:
    """A recipe for the collection workers of each gradient worker.

    Attributes:
        options: Options of the workers.
        algo_factory, actor_factory, storage_factory, train_envs_factory: The agent.
        seed: Seed of the experiment.
        num_threads: PyTorch threads of each remote worker, unless `col_num_threads` says otherwise.
        num_parents: Number of gradient workers that have such a set.
    """

    options: CWorkerSet.Options
    algo_factory: Factory[Algorithm]
    actor_factory: Factory[Actor]
    storage_factory: Factory[Storage]
    train_envs_factory: EnvFactory
    seed: int = 0
    num_threads: int | None = 1
    num_parents: int = 1

    def __call__(self, index_parent: int = 0, local_device: str | None = None,  # noqa: PLR0913 - its parent knows them
                 runtime: Runtime | None = None, *,
                 col_execution: Execution | str = CENTRAL, col_communication: Communication | str = SYNC,
                 initial_weights: Weights | None = None, collects: bool = True, first_incarnation: int = 0,
                 journal: Journal | None = None) -> CWorkerSet:
        """Build a set; a gradient worker gives the arguments that only it knows, see `CWorkerSet`."""
        return CWorkerSet(
            self, index_parent, local_device, runtime=runtime, col_execution=col_execution,
            col_communication=col_communication,
            initial_weights=initial_weights, collects=collects, first_incarnation=first_incarnation, journal=journal)
