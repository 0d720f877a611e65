"""A set of gradient workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from typing_extensions import override

from pytorchrl.agent.options import creation_text
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.runtime import DEFAULT_RESOURCES, Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker import Context
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.collection.strategies import Barrier
from pytorchrl.scheme.gradients.defaults import resolve_defaults
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.placement import Placement
from pytorchrl.scheme.gradients.recipe import GWorkerRecipe
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.options.base import (
    ASYNC,
    DEFAULT_EXECUTION,
    PARALLEL,
    SYNC,
    Communication,
    Execution,
    as_keywords,
    changed_options,
    options_of,
)
from pytorchrl.scheme.options.collection import (
    BarrierOptions,
    CollectionPattern,
    ReplayCollection,
    ReplayCWorkerOptions,
    SynchronousCollection,
)
from pytorchrl.scheme.options.gradients import GWorkerSetOptions
from pytorchrl.scheme.options.keywords import GradientKeywords, refuse_other_levels
from pytorchrl.scheme.replay.r_worker_set import RWorkerSetFactory
from pytorchrl.support.problems import raise_all
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Seconds that stop() waits for remote workers to stop their own workers.
_STOP_TIMEOUT_S = 5.0


class GWorkerSet(WorkerSet[GWorker]):
    """The gradient workers of the update worker.

    If gradient workers are remote, the local worker only applies updates and provides parameters.

    Args:
        num_workers: Number of gradient workers. By default, the local worker is the only one if the number is 1, and
            all of them are remote if it is larger.
        index_parent: Index of the parent worker.
        local_device: Device of the local worker: "cpu" or "cuda:N"; None: the CPU.
        col_execution: "Central" or "Parallel" collection.
        col_communication: "synchronous" or "asynchronous" collection.
        col_workers_factory: Factory of each gradient worker's set of collection workers.
        col_fraction_workers: Share of the collection workers that must finish a round before the other workers are
            preempted.
        grad_worker_resources: Ray resources of each remote worker.
        compress_grads_to_send: Codec of gradients.
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
                 grad_worker_resources: Mapping[str, float],
                 compress_grads_to_send: bool | str = Options.compress_grads_to_send, *,
                 runtime: Runtime | None = None) -> None:
        runtime = runtime or ThreadRuntime()
        factory = self.create_factory(
            num_workers, col_workers_factory, col_fraction_workers, col_execution, col_communication,
            compress_grads_to_send, grad_worker_resources)
        self._build(factory.placed(local_device, runtime), index_parent, local_device, runtime)

    @classmethod
    def from_recipe(cls, recipe: GWorkerRecipe, index_parent: int, local_device: str | None,
                    runtime: Runtime) -> GWorkerSet:
        """Build a set from a recipe in which all devices and resources are filled in; see `GWorkerSetFactory`."""
        workers = cls.__new__(cls)
        workers._build(recipe, index_parent, local_device, runtime)
        return workers

    def _build(self, recipe: GWorkerRecipe, index_parent: int, local_device: str | None, runtime: Runtime) -> None:
        self.index_parent = index_parent
        self._final: list[LedgerSnapshot | None] | None = None  # the result of `stop`
        super().__init__(
            GWorker, {"col_workers_factory": recipe}, recipe.options.grad_worker_resources,
            recipe.options.num_workers if recipe.options.is_parallel else 0, name="GWorker ",
            local_params={"device": local_device, "context": Context(runtime=runtime)},
            remote_params={"device": recipe.options.grad_device},
            context=Context(runtime=runtime, num_threads=recipe.num_threads, numerics=recipe.numerics))

    def interrupt(self) -> None:
        """End collection in all workers; see `GWorker.interrupt`."""
        for handle in self.remote_workers():
            handle.signal(GWorker.interrupt)
        self.local_worker().interrupt()

    @override
    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> list[LedgerSnapshot | None]:
        """Stop all workers and the workers below them; wait at most `timeout_s` seconds for the remote workers.

        Repeated calls only return the result.

        Returns:
            The final ledger of the local worker, and that of each remote worker; None if the worker did not respond.
        """
        if self._final is None:
            self.interrupt()
            calls = [handle.submit(GWorker.stop) for handle in self.remote_workers()]
            outcomes = self._runtime.get_all(calls, timeout_s)
            self._final = [self.local_worker().stop(), *(outcome.value for outcome in outcomes)]
            super().stop()
        return self._final

    @property
    def worker_params(self) -> Mapping[str, object]:
        """The arguments of each `GWorker` that a user who builds one by hand would give, by name."""
        recipe = self._recipe
        collection = recipe.collection
        return {
            "col_workers_factory": recipe.col_workers_factory, "col_execution": collection.col_execution,
            "col_communication": SYNC if isinstance(collection, SynchronousCollection) else ASYNC,
            "col_fraction_workers": options_of(BarrierOptions, collection).col_fraction_workers,
            "compress_grads_to_send": recipe.options.compress_grads_to_send}

    @property
    def _recipe(self) -> GWorkerRecipe:
        recipe: GWorkerRecipe = self._params["col_workers_factory"]
        return recipe

    def plan_resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None) -> None:
        """Set the number and the resources of collection workers for gradient workers that start later."""
        factory = self._recipe.col_workers_factory
        options = replace(
            factory.options, num_col_workers=num_col_workers,
            col_worker_resources=factory.options.col_worker_resources if resources is None else resources)
        self._params["col_workers_factory"] = replace(
            self._recipe, col_workers_factory=replace(factory, options=options))

    def plan_seed(self, seed: int) -> None:
        """Derive the seed of gradient workers that start later from `seed`, the seed of a resumed run.

        A resumed run numbers incarnations from 0 again. With another seed, its replacements nevertheless do not repeat
        the random numbers of earlier workers.
        """
        recipe, own = self._recipe, derive_seed(seed, Stream.REPLACEMENT)
        shards = recipe.replay_workers_factory
        self._params["col_workers_factory"] = replace(
            recipe, col_workers_factory=replace(recipe.col_workers_factory, seed=own),
            replay_workers_factory=None if shards is None else replace(shards, seed=own))

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, col_workers_factory: CWorkerSetFactory,
                       col_fraction_workers: float = Barrier.Options.col_fraction_workers,
                       col_execution: Execution | str = DEFAULT_EXECUTION,
                       col_communication: Communication | str = CollectionPattern.col_communication,
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
        refuse_other_levels("GWorkerSet.create_factory", options)
        of_workers = {"num_grad_workers": num_workers, "compress_grads_to_send": compress_grads_to_send,
                      "grad_worker_resources": grad_worker_resources, "grad_device": options.pop("grad_device", None)}
        of_collection = {**options, "col_execution": col_execution, "col_communication": col_communication,
                         "col_fraction_workers": col_fraction_workers}
        return GWorkerSetFactory.from_arguments(col_workers_factory, of_workers, of_collection, replay_workers_factory)


class GWorkerSetFactory(GWorkerRecipe):
    """A recipe that can be called; each call builds a set of gradient workers and the worker sets below it."""

    def __repr__(self) -> str:
        """Return the call that creates an equal factory, before a scheme has set its seed, threads and supervision."""
        collection, shards = self.collection, self.replay_workers_factory
        of_workers = changed_options(self.options, GWorkerSetOptions, but=("num_grad_workers", "grad_execution"))
        # The factories of the other workers print their own options.
        of_collection = changed_options(collection, type(collection), but=tuple(ReplayCWorkerOptions.declarations()))
        if shards is not None:
            of_workers["replay_workers_factory"], of_shards = shards, as_keywords(shards.options)
            of_collection = {name: value for name, value in of_collection.items() if of_shards.get(name) != value}
        if collection.is_parallel:
            of_workers["col_execution"] = PARALLEL
        if not isinstance(collection, SynchronousCollection):
            of_workers["col_communication"] = ASYNC
        return creation_text("GWorkerSet", (self.options.num_grad_workers, self.col_workers_factory),
                             {**of_workers, **of_collection})

    def __call__(self, index_parent: int = 0, local_device: str | None = None,
                 runtime: Runtime | None = None) -> GWorkerSet:
        """Build a set.

        Raises:
            ConfigError: Devices or resources contradict each other.
            InsufficientResourcesError: The cluster lacks resources that remote workers request.
        """
        runtime = runtime or ThreadRuntime()
        return GWorkerSet.from_recipe(self.placed(local_device, runtime), index_parent, local_device, runtime)

    def placed(self, local_device: str | None, runtime: Runtime) -> GWorkerSetFactory:
        """Return a copy of this factory with defaults filled in for omitted devices, resources and options."""
        collection, _ = resolve_defaults(self.collection, self.col_workers_factory)
        placement = Placement(collection, self.options, local_device, runtime.name == "ray")
        raise_all(placement.problems())
        num_grad = self.options.num_grad_workers if self.options.is_parallel else 0
        numbers, shards = collection.numbers(max(1, num_grad)), self.replay_workers_factory
        shard_requests: Mapping[str, float] = {}
        num_replay_workers = 0
        if isinstance(collection, ReplayCollection) and collection.num_replay_workers > 1:
            num_replay_workers = collection.num_replay_workers * max(1, num_grad)
            shard_requests = collection.replay_worker_resources
        of_grad, of_col, of_shards = runtime.fit_resources([
            ("gradient workers", num_grad, placement.resources("grad")),
            ("collection workers", sum(numbers) if collection.is_parallel else 0, placement.resources("col")),
            ("replay shards", num_replay_workers, shard_requests)])
        devices = placement.devices()
        collection = collection.replaced(col_worker_resources=of_col, col_device=devices["col"])
        if isinstance(collection, ReplayCollection) and shards is not None:
            if num_replay_workers:
                collection = collection.replaced(replay_worker_resources=of_shards)
            shards = replace(shards, options=collection, seed=self.seed, num_threads=self.num_threads)
        col_workers_factory = replace(
            self.col_workers_factory, options=collection, seed=self.seed, num_threads=self.num_threads,
            numerics=self.numerics, num_parents=max(1, num_grad))
        options = self.options.replaced(grad_worker_resources=of_grad, grad_device=devices["grad"])
        return replace(
            self, options=options, collection=collection, col_workers_factory=col_workers_factory,
            replay_workers_factory=shards)
