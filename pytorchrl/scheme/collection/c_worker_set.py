"""A set of collection workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from typing_extensions import override

from pytorchrl.agent.options import creation_text
from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import Runtime
from pytorchrl.scheme.base.worker import Context
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.collection.c_worker import CWorker, Role
from pytorchrl.scheme.collection.central_inference import Inference
from pytorchrl.scheme.collection.env_worker import EnvWorker
from pytorchrl.scheme.collection.recipe import CWorkerRecipe
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.options.base import changed_options, from_keywords, options_of
from pytorchrl.scheme.options.collection import (
    CWorkerOptions,
    DatasetOptions,
    OnArrivalOptions,
    ReplayCWorkerOptions,
)
from pytorchrl.scheme.options.keywords import CollectionKeywords, refuse_other_levels
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytorchrl.agent.env import EnvFactory
    from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory

# Time limit, in seconds, within which workers must build new environments.
_RESEED_TIMEOUT_S = 60.0
# Time limit, in seconds, within which the workers that a resize removes must close their environments.
_LEAVE_TIMEOUT_S = 5.0
# Seconds that stop() waits for workers to finish their current calls and to close their environments.
_STOP_TIMEOUT_S = 5.0


class CWorkerSet(WorkerSet[CWorker]):
    """The collection workers of one gradient worker.

    If collection is central and synchronous, the local worker collects. If collection is central and asynchronous, a
    second worker collects in a thread of the same process, with its own copy of the actor. Otherwise, the remote
    workers collect. With central inference, they only step environments, and `inference` chooses their actions.

    Args:
        factory: Recipe of the set.
        index_parent: Index of the gradient worker.
        local_device: Device of the local worker and of the gradient worker.
        collects: Whether the set collects; False if its gradient worker only stores the current parameters. With a data
            set, nothing is collected in any case.
        context: Runtime of the remote workers, journal of the gradient worker, which the local worker shares, initial
            weights and incarnation of all workers; None: the defaults.

    Attributes:
        index_parent: As given.
        is_parallel: Whether the workers are remote, so that their number may change.
        inference: The object that chooses actions and builds rollouts centrally; None without central inference.
    """

    kind = "collection workers"
    home = "scheme"

    Options: TypeAlias = CWorkerOptions
    ReplayOptions: TypeAlias = ReplayCWorkerOptions

    def __init__(self, factory: CWorkerSetFactory, index_parent: int = 0, local_device: str | None = None, *,
                 collects: bool = True, context: Context | None = None) -> None:
        context, options = context or Context(), factory.options
        collects = collects and options_of(DatasetOptions, options).dataset is None
        runtime, parallel, asynchronous = context.runtime, options.is_parallel, isinstance(options, OnArrivalOptions)
        self.runtime, self.index_parent = runtime if parallel else runtime.in_process(), index_parent
        self.is_parallel = parallel
        params = {"recipe": factory, "index_parent": index_parent}
        is_central = options.infers_centrally and parallel and asynchronous
        has_twin = asynchronous and not parallel
        gpus = runtime.own_gpus()  # GPUs of this process; each remote worker determines its own GPUs
        number = index_parent - 1 if index_parent else None
        local_device = check_device(local_device, gpus, "grad_device" if index_parent else "device", number)
        col_device = options.col_device
        if has_twin or (is_central and col_device is not None):  # the actor is in the gradient worker's process
            col_device = check_device(col_device, gpus, "col_device", number)
        num_remote = 0 if not collects else factory.num_workers_of(index_parent) if parallel else int(has_twin)
        role = Role.LEARNER if collects and not parallel and not asynchronous else Role.SERVER
        if is_central:
            self.remote_class = EnvWorker
        num_threads = factory.num_threads if options.col_num_threads is None else options.col_num_threads
        self.local_works = collects
        super().__init__(
            CWorker, params, {} if has_twin else options.col_worker_resources, num_remote,
            name=f"GWorker {index_parent}/CWorker ", first_index=0 if has_twin else 1,
            local_params={"role": role, "device": local_device,
                          "context": replace(context, runtime=self.runtime, num_threads=None)},
            remote_params={} if is_central else {"device": col_device},
            context=Context(runtime=self.runtime, incarnation=context.incarnation,
                            num_threads=None if has_twin else num_threads, numerics=factory.numerics,
                            initial_weights=None if is_central else context.initial_weights))
        self._final: tuple[int | None, int] | None = None  # the result of `stop`
        self.inference: Inference | None = None
        if is_central and num_remote:
            actor = CWorker(
                1, factory, index_parent, role=Role.SERVER, device=col_device or local_device,
                context=replace(context, runtime=runtime.in_process(), num_threads=None, journal=None))
            actor.use_own_stream()
            self.inference = Inference(
                actor, lambda place: actor.new_builder((index_parent, 1 + place, self.incarnation(place))),
                options.inference_batch)

    @override
    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> tuple[int | None, int]:
        """Close and kill all collection workers; wait at most `timeout_s` seconds for their responses.

        Repeated calls only return the result.

        Returns:
            The number of env steps that all workers have taken (None if a worker did not respond), and the number of
            these steps that were not returned in a rollout.
        """
        if self._final is None:
            calls = [handle.submit(CWorker.close) for handle in self.remote_workers()]
            found = [outcome.value for outcome in self.runtime.get_all(calls, timeout_s)]
            counts = [self.local_worker().close(), *(count for count in found if count is not None)]
            super().stop()
            made = sum(steps for steps, _ in counts) if len(counts) == 1 + len(found) else None
            self._final = made, sum(undelivered for _, undelivered in counts)
        return self._final

    def recipe_for(self, num_col_workers: int | tuple[int, ...]) -> CWorkerRecipe:
        """Return a copy of the set's recipe with another value of `num_col_workers`."""
        recipe: CWorkerRecipe = self._params["recipe"]
        return replace(recipe, options=replace(recipe.options, num_col_workers=num_col_workers))

    def close_from(self, place: int) -> list[tuple[int, int] | None]:
        """Close the workers `remote_workers()[place:]`, which must have no requests in flight.

        Returns:
            The result of `CWorker.close` for each worker; None if a worker did not respond.
        """
        calls = [handle.submit(CWorker.close) for handle in self.remote_workers()[place:]]
        return [outcome.value for outcome in self.runtime.get_all(calls, _LEAVE_TIMEOUT_S)]

    def follow(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None = None) -> None:
        """Start or kill remote workers until there are as many as `num_col_workers` requires; see `resize`.

        Each remaining worker receives its new index among all collection workers, because its exploration may depend on
        the index.
        """
        recipe = self.recipe_for(num_col_workers)
        self._params["recipe"], number = recipe, recipe.num_workers_of(self.index_parent)
        for place, handle in enumerate(self.remote_workers()[:number] if self.inference is None else ()):
            handle.submit(CWorker.take_place, *recipe.place_of(self.index_parent, 1 + place))
        self.resize(number, resources)

    def discard_unfinished(self) -> int:
        """Let all workers that are not lost discard the env steps that no rollout contains; return their number."""
        if self.inference is not None:
            return 0
        calls = [handle.submit(CWorker.discard_unfinished) for handle in self.remote_workers()]
        found = [outcome.value for outcome in self.runtime.get_all(calls, _RESEED_TIMEOUT_S)]
        return self.local_worker().discard_unfinished() + sum(number for number in found if number is not None)

    def reseed_remote(self, seed: int) -> None:
        """Reseed all remote workers that are not lost, and the actor of central inference; see `CWorker.reseed`."""
        if self.inference is not None:
            self.inference.actor.reseed(seed)
        calls = [handle.submit(CWorker.reseed, seed, self.incarnation(place))
                 for place, handle in enumerate(self.remote_workers())]
        for outcome in self.runtime.get_all(calls, _RESEED_TIMEOUT_S):
            if not isinstance(outcome.error, WorkerLostError):
                outcome.unwrap()

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int | tuple[int, ...], algo_factory: AlgorithmFactory,
                       actor_factory: ActorFactory, storage_factory: StorageFactory, train_envs_factory: EnvFactory,
                       **options: Unpack[CollectionKeywords]) -> CWorkerSetFactory:
        """Return a factory that builds the collection workers of each gradient worker.

        Args:
            num_workers: Number of collection workers of each gradient worker, or a tuple with one number for each
                gradient worker.
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage.
            train_envs_factory: Factory of the environments of each worker.
            **options: Fields of `CWorkerSet.ReplayOptions`, except `num_col_workers` and `col_execution`.

        Returns:
            The factory; a call with `index_parent`, `local_device` and `runtime` builds the set of one gradient worker.

        Raises:
            ConfigError: An option is unknown or has an invalid value.
        """
        refuse_other_levels("CWorkerSet.create_factory", options)
        given = {**options, "num_col_workers": num_workers}
        return CWorkerSetFactory(
            from_keywords("CWorkerSet", cls.ReplayOptions if "initial_priority" in options else cls.Options, given),
            algo_factory, actor_factory, storage_factory, train_envs_factory)


@dataclass(frozen=True)
class CWorkerSetFactory(CWorkerRecipe):
    """A recipe that can be called; each call builds the collection workers of one gradient worker."""

    def __repr__(self) -> str:
        """Return the call that creates an equal factory, before a scheme has set the seed and the number of threads."""
        own = ReplayCWorkerOptions if isinstance(self.options, ReplayCWorkerOptions) else CWorkerOptions
        return creation_text(
            "CWorkerSet", (self.options.num_col_workers, self.algo_factory, self.actor_factory, self.storage_factory,
                           self.train_envs_factory),
            changed_options(self.options, own, but=("num_col_workers", "col_execution")))

    def __call__(self, index_parent: int = 0, local_device: str | None = None, runtime: Runtime | None = None, *,
                 collects: bool = True, context: Context | None = None) -> CWorkerSet:
        """Build a set; `CWorkerSet` describes the arguments. `runtime` is ignored if there is a `context`."""
        return CWorkerSet(self, index_parent, local_device, collects=collects,
                          context=context or Context.within(runtime))
