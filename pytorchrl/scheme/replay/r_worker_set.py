"""The replay shards of a gradient worker, each of which stores a part of the worker's replay data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pytorchrl.agent.options import creation_text
from pytorchrl.runtime import Runtime
from pytorchrl.scheme.base.worker import Context
from pytorchrl.scheme.base.worker_set import WorkerSet
from pytorchrl.scheme.options.base import changed_options, from_keywords
from pytorchrl.scheme.options.keywords import ReplayKeywords, refuse_other_levels
from pytorchrl.scheme.options.replay import RWorkerSetOptions
from pytorchrl.scheme.options.run import ProcessOptions
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.storage_options import kept_by_shards
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory


class RWorkerSet(WorkerSet[RWorker]):
    """The replay shards of one gradient worker.

    A single shard is a thread of the gradient worker's process; several shards are remote workers.

    Args:
        factory: Options of the set, and factories of the agent's parts.
        index_parent: Index of the gradient worker.
        context: Runtime of the remote shards, and incarnation of each new shard; None: the defaults.
    """

    kind = "replay shards"
    home = "scheme"

    Options: TypeAlias = RWorkerSetOptions

    def __init__(self, factory: RWorkerSetFactory, index_parent: int = 0, *, context: Context | None = None) -> None:
        context = context or Context()
        runtime, number = context.runtime, factory.options.num_replay_workers
        is_remote = number > 1
        self.runtime = runtime if is_remote else runtime.in_process()
        params = {"index_parent": index_parent, "algo_factory": factory.algo_factory,
                  "actor_factory": factory.actor_factory,
                  "storage_factory": kept_by_shards(factory.storage_factory, factory.options.size),
                  "num_replay_workers": number, "seed": factory.seed}
        super().__init__(
            RWorker, params, factory.options.replay_worker_resources if is_remote else {}, number,
            name=f"GWorker {index_parent}/RWorker ", local_params={"context": Context(runtime=self.runtime)},
            remote_params={}, context=Context(runtime=self.runtime, incarnation=context.incarnation,
                                              num_threads=factory.num_threads if is_remote else None))

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, algo_factory: AlgorithmFactory, actor_factory: ActorFactory,
                       storage_factory: StorageFactory, **options: Unpack[ReplayKeywords]) -> RWorkerSetFactory:
        """Return a factory that builds the replay shards of each gradient worker.

        Args:
            num_workers: Number of replay shards of each gradient worker.
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage, whose size is the total size of all shards.
            **options: Fields of `RWorkerSet.Options`, except `num_replay_workers`.

        Returns:
            A factory that builds a new set when called with `(index_parent=0, local_device=None, runtime=None)`.

        Raises:
            ConfigError: An option is unknown or has an invalid value.
        """
        refuse_other_levels("RWorkerSet.create_factory", options)
        given = {**options, "num_replay_workers": num_workers}
        return RWorkerSetFactory(from_keywords("RWorkerSet", cls.Options, given), algo_factory, actor_factory,
                                 storage_factory)


@dataclass(frozen=True)
class RWorkerSetFactory:
    """A factory that builds the replay shards of each gradient worker.

    Attributes:
        options: Options of the shards.
        algo_factory, actor_factory, storage_factory: Factories of the agent's parts.
        seed: Seed of the experiment.
        num_threads: Number of PyTorch threads of each remote shard.
    """

    options: RWorkerSet.Options
    algo_factory: AlgorithmFactory
    actor_factory: ActorFactory
    storage_factory: StorageFactory
    seed: int = 0
    num_threads: int | None = ProcessOptions.num_threads

    def __repr__(self) -> str:
        """Return the call that creates an equal factory, before a scheme has set the seed and the number of threads."""
        return creation_text(
            "RWorkerSet", (self.options.num_replay_workers, self.algo_factory, self.actor_factory,
                           self.storage_factory),
            changed_options(self.options, RWorkerSetOptions, but=("num_replay_workers",)))

    def __call__(self, index_parent: int = 0, local_device: str | None = None, runtime: Runtime | None = None, *,
                 context: Context | None = None) -> RWorkerSet:
        """Build a set of shards; `local_device` is ignored, and so is `runtime` if there is a `context`."""
        return RWorkerSet(self, index_parent, context=context or Context.within(runtime))
