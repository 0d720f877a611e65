"""A set of gradient workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import ConfigError, FactoryError
from pytorchrl.runtime import DEFAULT_RESOURCES, Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.collection.strategies import Barrier
from pytorchrl.scheme.gradients.defaults import resolve_defaults
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.placement import Placement
from pytorchrl.scheme.options.base import (
    Communication,
    Execution,
    as_keywords,
    check_execution,
    raise_all,
)
from pytorchrl.scheme.options.collection import Collection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.gradients import GWorkerSetOptions
from pytorchrl.scheme.options.keywords import GradientKeywords, refuse_other_levels
from pytorchrl.scheme.options.settings import collection_of
from pytorchrl.scheme.replay.r_worker_set import RWorkerSetFactory
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import GRADS, Compression
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack



class GWorkerSet(WorkerSet[GWorker]):
    """The gradient workers of the update worker.

    If gradient workers are remote, the local worker only applies updates and provides parameters.

    Args:
        num_workers: Number of gradient workers.
        index_parent: Index of the parent worker.
        local_device: Device of the local worker: "cpu" or "cuda:N"; None: the CPU.
        col_execution: "Central" or "Parallel" collection.
        col_communication: "synchronous" or "asynchronous" collection.
        col_workers_factory: Factory of each gradient worker's set of collection workers.
        col_fraction_workers: Share of the collection workers that must finish a round before the other workers are
            preempted.
        grad_worker_resources: Ray resources of each remote worker.
        compress_grads_to_send: Codec of gradients.
        factory: Factory of the set, with all options; None: a factory that is created from the other arguments.
        runtime: Runtime of the remote workers; None: threads.

    Attributes:
        worker_class, remote_config, worker_params, num_workers: See `WorkerSet`.
    """

    kind = "gradient workers"
    home = "scheme"

    Options: TypeAlias = GWorkerSetOptions

    def __init__(self, num_workers: int, index_parent: int, local_device: str | None,  # noqa: PLR0913
                 col_execution: Execution | str, col_communication: Communication | str,
                 col_workers_factory: CWorkerSetFactory, col_fraction_workers: float,
                 grad_worker_resources: Mapping[str, float], compress_grads_to_send: bool | str = False, *,
                 factory: GWorkerSetFactory | None = None, runtime: Runtime | None = None) -> None:
        runtime = runtime or ThreadRuntime()
        if factory is None:
            factory = self.create_factory(
                num_workers, col_workers_factory, col_fraction_workers, col_execution, col_communication,
                compress_grads_to_send, grad_worker_resources).placed(local_device, runtime)
        self.index_parent, options, collection = index_parent, factory.options, factory.collection
        num_remote = num_workers if options.is_parallel else 0
        compression = Compression.of(GRADS, options.compress_grads_to_send)
        params = {
            "col_workers_factory": factory.col_workers_factory, "col_communication": Communication(col_communication),
            "compress_grads_to_send": False if compression is None else compression,
            "col_execution": Execution(col_execution), "col_fraction_workers": col_fraction_workers, "runtime": runtime,
            "collection": collection, "supervision": factory.supervision,
            "compress_weights_to_send": factory.compress_weights_to_send if collection.is_parallel else False,
            "replay_workers_factory": factory.replay_workers_factory}
        super().__init__(
            GWorker, params, options.grad_worker_resources, num_remote, runtime=runtime, name="GWorker ",
            local_params={"device": local_device, "collects": not num_remote},
            remote_params={"device": options.grad_device, "num_threads": factory.num_threads})

    def plan_resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None) -> None:
        """Set the number and the resources of collection workers for gradient workers that start later."""
        factory: CWorkerSetFactory = self.worker_params["col_workers_factory"]
        self.worker_params["col_workers_factory"] = replace(factory, options=replace(
            factory.options, num_col_workers=num_col_workers,
            col_worker_resources=factory.options.col_worker_resources if resources is None else resources))

    def plan_seed(self, seed: int) -> None:
        """Derive the seed of gradient workers that start later from `seed`, the seed of a resumed run.

        A resumed run numbers incarnations from 0 again. With another seed, its replacements nevertheless do not repeat
        the random numbers of earlier workers.
        """
        for name in ("col_workers_factory", "replay_workers_factory"):
            if self.worker_params[name] is not None:
                self.worker_params[name] = replace(
                    self.worker_params[name], seed=derive_seed(seed, Stream.REPLACEMENT))

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, col_workers_factory: CWorkerSetFactory,
                       col_fraction_workers: float = Barrier.Options.col_fraction_workers,
                       col_execution: Execution | str = "Central",
                       col_communication: Communication | str = "synchronous",
                       compress_grads_to_send: bool | str = Options.compress_grads_to_send,
                       grad_worker_resources: Mapping[str, float] = DEFAULT_RESOURCES, *,
                       replay_workers_factory: RWorkerSetFactory | None = None,
                       **options: Unpack[GradientKeywords]) -> GWorkerSetFactory:
        """Return a factory of sets of gradient workers.

        Args:
            num_workers: Number of gradient workers.
            col_workers_factory: Factory of each gradient worker's set of collection workers; the result of
                `CWorkerSet.create_factory`.
            col_fraction_workers: Share of the collection workers that must finish a round before the other workers are
                preempted.
            col_execution: "Central": the gradient worker's process collects, with a single collection worker.
                "Parallel": all collection workers are remote, even if there is only one.
            col_communication: "synchronous" or "asynchronous" collection.
            compress_grads_to_send: Codec of gradients.
            grad_worker_resources: Ray resources of each remote worker; the default is reduced to what is available.
            replay_workers_factory: Factory of each gradient worker's replay shards; None: no replay shards.
            **options: Other options of the class that the arguments select (`SynchronousCollection`,
                `AsynchronousCollection` or `ReplayCollection`), and `grad_device`.

        Returns:
            A factory. A call with `(index_parent=0, local_device=None, runtime=None)` builds a new set.

        Raises:
            ConfigError: An option is unknown, has an invalid value, or would have no effect; or options contradict each
                other.
            FactoryError: `col_workers_factory` or `replay_workers_factory` is not the result of `create_factory`.
        """
        for name, given_factory, kind in (("col_workers_factory", col_workers_factory, CWorkerSetFactory),
                                          ("replay_workers_factory", replay_workers_factory, RWorkerSetFactory)):
            if not isinstance(given_factory, kind) and (given_factory is not None or kind is CWorkerSetFactory):
                raise FactoryError(f"{name} must be the result of "
                                   f"{kind.__name__.removesuffix('Factory')}.create_factory(...), got "
                                   f"{given_factory!r}")
        refuse_other_levels("GWorkerSet.create_factory", options)
        grad_device = options.pop("grad_device", None)
        check_execution("col", col_execution, col_workers_factory.options.num_workers)
        given = {**as_keywords(col_workers_factory.options), **options, "col_execution": col_execution,
                 "col_communication": col_communication, "col_fraction_workers": col_fraction_workers}
        if replay_workers_factory is not None:
            given = {**as_keywords(replay_workers_factory.options), **given}
        collection = collection_of(given)
        own = cls.Options(num_grad_workers=num_workers, compress_grads_to_send=compress_grads_to_send,
                          grad_worker_resources=grad_worker_resources, grad_device=grad_device)
        factory = GWorkerSetFactory(own, collection, col_workers_factory, replay_workers_factory)
        factory.check()
        return factory


@dataclass(frozen=True)
class GWorkerSetFactory:
    """A factory of a set of gradient workers and of the worker sets below it.

    Attributes:
        options: Options of the set.
        collection: Options that control how each gradient worker collects its data.
        col_workers_factory: Factory of the collection workers.
        replay_workers_factory: Factory of the replay shards; None: no replay shards.
        supervision: Options for lost workers.
        seed: Seed of the experiment.
        num_threads: Number of PyTorch threads of each remote worker.
        compress_weights_to_send: Codec of weights that gradient workers send to remote collection workers.
    """

    options: GWorkerSet.Options
    collection: Collection
    col_workers_factory: CWorkerSetFactory
    replay_workers_factory: RWorkerSetFactory | None = None
    supervision: Supervisor.Options = field(default_factory=Supervisor.Options)
    seed: int = 0
    num_threads: int = 1
    compress_weights_to_send: bool | str = False

    def __call__(self, index_parent: int = 0, local_device: str | None = None,
                 runtime: Runtime | None = None) -> GWorkerSet:
        """Build a set.

        Raises:
            ConfigError: Devices or resources contradict each other.
            InsufficientResourcesError: The cluster lacks resources that remote workers request.
        """
        runtime = runtime or ThreadRuntime()
        placed, collection = self.placed(local_device, runtime), self.collection
        communication, fraction = "asynchronous", 1.0
        if isinstance(collection, SynchronousCollection):
            communication, fraction = "synchronous", collection.col_fraction_workers
        return GWorkerSet(
            self.options.num_grad_workers, index_parent, local_device,
            "Parallel" if collection.is_parallel else "Central",
            communication, placed.col_workers_factory, fraction, placed.options.grad_worker_resources,
            placed.options.compress_grads_to_send, factory=placed, runtime=runtime)

    def check(self) -> None:
        """Raise `ConfigError` if the options of the worker sets contradict each other."""
        numbers, shards = self.collection.num_col_workers, self.replay_workers_factory
        if isinstance(numbers, tuple) and len(numbers) != self.options.num_grad_workers:
            raise ConfigError(f"num_col_workers has {len(numbers)} numbers for {self.options.num_grad_workers} "
                              f"gradient workers, got {numbers}; give one for each")
        col = self.col_workers_factory
        if shards is not None and (shards.algo_factory, shards.actor_factory, shards.storage_factory) != (
                col.algo_factory, col.actor_factory, col.storage_factory):
            raise ConfigError("replay_workers_factory and col_workers_factory have different agents; give both the "
                              "same factories of algorithm, actor and storage")

    def placed(self, local_device: str | None, runtime: Runtime) -> GWorkerSetFactory:
        """Return a copy of this factory with defaults filled in for omitted devices, resources and options."""
        collection, _ = resolve_defaults(self.collection, self.col_workers_factory)
        placement = Placement(collection, self.options, local_device, runtime.name == "ray")
        raise_all(placement.problems())
        num_grad = self.options.num_grad_workers if self.options.is_parallel else 0
        numbers, shards = collection.numbers(max(1, num_grad)), self.replay_workers_factory
        shard_requests: Mapping[str, float] = {}
        num_shards = 0
        if isinstance(collection, ReplayCollection) and collection.num_replay_workers > 1:
            num_shards = collection.num_replay_workers * max(1, num_grad)
            shard_requests = collection.replay_worker_resources
        of_grad, of_col, of_shards = runtime.fit_resources([
            ("gradient workers", num_grad, placement.resources("grad")),
            ("collection workers", sum(numbers) if collection.is_parallel else 0, placement.resources("col")),
            ("replay shards", num_shards, shard_requests)])
        devices = placement.devices()
        collection = replace(collection, col_worker_resources=of_col, col_device=devices["col"])
        if isinstance(collection, ReplayCollection) and shards is not None:
            if num_shards:
                collection = _with_shard_resources(collection, of_shards)
            shards = replace(shards, options=collection, seed=self.seed, num_threads=self.num_threads)
        col_workers_factory = replace(
            self.col_workers_factory, options=collection, seed=self.seed, num_threads=self.num_threads,
            num_parents=max(1, num_grad))
        options = replace(self.options, grad_worker_resources=of_grad, grad_device=devices["grad"])
        return replace(
            self, options=options, collection=collection, col_workers_factory=col_workers_factory,
            replay_workers_factory=shards)


def _with_shard_resources(collection: ReplayCollection, resources: Mapping[str, float]) -> ReplayCollection:
    return replace(collection, replay_worker_resources=resources)
