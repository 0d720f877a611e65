"""A set of replay shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytorchrl.agent.options import Factory, option
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import Runtime, ThreadRuntime
from pytorchrl.scheme.base.levels import from_keywords
from pytorchrl.scheme.base.options import PrefetchOptions, QueueOptions
from pytorchrl.scheme.base.worker_set import WorkerSet, check_resources
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.routing import ROUTINGS
from pytorchrl.scheme.replay.storage_options import kept_by_shards
from pytorchrl.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytorchrl.agent.actors.base import Actor
    from pytorchrl.agent.algorithms.base import Algorithm
    from pytorchrl.agent.storages.base import Storage
    from pytorchrl.scheme.keywords import ReplayKeywords

FREE = {"num_cpus": 0}
"""Resources of a shard, which works only when it is asked."""


class RWorkerSet(WorkerSet[RWorker]):
    """The replay shards of one gradient worker: one in a thread of its process, or several remote ones.

    Args:
        factory: Recipe of the set.
        index_parent: Index of the gradient worker.
        runtime: Runtime of the remote shards; None: threads.
        first_incarnation: Incarnation of the shards, above 0 if their gradient worker is a replacement.
    """

    kind = "replay shards"
    home = "scheme"

    @dataclass(frozen=True, kw_only=True)
    class Options(QueueOptions, PrefetchOptions):
        """Options of each gradient worker's replay shards, and of messages in flight to and from the shards."""

        num_replay_workers: int = option(
            1, low=1, help="Replay shards of each gradient worker, each with its share of the storage's size; 1 is a "
                           "thread of the "
            "gradient worker's process.")
        replay_worker_resources: Mapping[str, float] = option(
            default_factory=lambda: dict(FREE), help="Ray resources of each remote replay shard.")
        size: int | None = option(
            None, low=1, help="Env steps that all shards keep together. Replay of whole rollouts needs it; other "
                              "storages have an "
            "option `size` of their own, which it replaces.")

        learning_starts: int | None = option(
            None, low=0, help="Env steps that must be in replay before learning begins; None: the algorithm's "
                              "start_steps, or "
            "train_batch_size for replay of whole rollouts.")
        add_in_flight: int = option(2, low=1, help="Rollouts in flight to each shard before collection waits.")
        routing: str = option(
            "round_robin", choices=ROUTINGS, help="Shard that a rollout is added to: each in turn, a random one, the "
                                                  "one with the fewest "
            "env steps, or a fixed one for each collection worker (always so for sequences that span rollouts).")
        min_replay_ratio: float | None = option(
            None, low=0.0, exclusive=True, help="Env steps consumed per env step collected, below which collection "
                                                "waits for learning; "
            "None: never.")
        max_replay_ratio: float | None = option(
            None, low=0.0, exclusive=True, help="Env steps consumed per env step collected, above which learning waits "
                                                "for collection; "
            "None: never.")

        def __post_init__(self) -> None:
            """Refuse wrong resources, resources without a remote shard, and a lower bound above the upper one."""
            super().__post_init__()
            check_resources("replay_worker_resources", self.replay_worker_resources)
            if self.num_replay_workers == 1 and dict(self.replay_worker_resources) != FREE:
                raise ConfigError("replay_worker_resources is for remote shards; num_replay_workers=1 is a thread of "
                                  "the learner's "
                                  "process; give 2 or more, or leave it out")
            low, high = self.min_replay_ratio, self.max_replay_ratio
            if low is not None and high is not None and low > high:
                raise ConfigError(f"min_replay_ratio {low} exceeds max_replay_ratio {high}; collection and learning "
                                  f"would wait for each "
                                  "other; lower min_replay_ratio")

    def __init__(self, factory: RWorkerSetFactory, index_parent: int = 0, *, runtime: Runtime | None = None,
                 first_incarnation: int = 0) -> None:
        runtime, number = runtime or ThreadRuntime(), factory.options.num_replay_workers
        is_remote = number > 1
        self.runtime = runtime if is_remote else runtime.in_process()
        params = {"index_parent": index_parent, "algo_factory": factory.algo_factory,
                  "actor_factory": factory.actor_factory,
                  "storage_factory": kept_by_shards(factory.storage_factory, factory.options.size),
                  "num_shards": number, "seed": factory.seed, "runtime": self.runtime}
        super().__init__(
            RWorker, params, factory.options.replay_worker_resources if is_remote else {}, number, runtime=self.runtime,
            name=f"GWorker {index_parent}/RWorker ", local_params={},
            remote_params={"num_threads": factory.num_threads} if is_remote else {},
            first_incarnation=first_incarnation)

    @classmethod
    @brief_errors
    def create_factory(cls, num_workers: int, algo_factory: Factory[Algorithm], actor_factory: Factory[Actor],
                       storage_factory: Factory[Storage], **options: Unpack[ReplayKeywords]) -> RWorkerSetFactory:
        """Return a recipe for the replay shards of each gradient worker.

        Args:
            num_workers: Replay shards of each gradient worker.
            algo_factory: Factory of the algorithm.
            actor_factory: Factory of the actor.
            storage_factory: Factory of the storage, whose size is that of all shards together.
            **options: Fields of `RWorkerSet.Options`, except the number.

        Returns:
            A function of `(index_parent=0, local_device=None, runtime=None)`, which builds a new set.

        Raises:
            ConfigError: An option is unknown or has a wrong value.
        """
        given = {**options, "num_replay_workers": num_workers}
        return RWorkerSetFactory(from_keywords("RWorkerSet", cls.Options, given), algo_factory, actor_factory,
                                 storage_factory)


@dataclass(frozen=True)
class RWorkerSetFactory:
    """A recipe for the replay shards of each gradient worker.

    Attributes:
        options: Options of the shards.
        algo_factory, actor_factory, storage_factory: The agent.
        seed: Seed of the experiment.
        num_threads: PyTorch threads of each remote shard.
    """

    options: RWorkerSet.Options
    algo_factory: Factory[Algorithm]
    actor_factory: Factory[Actor]
    storage_factory: Factory[Storage]
    seed: int = 0
    num_threads: int | None = 1

    def __call__(self, index_parent: int = 0, local_device: str | None = None, runtime: Runtime | None = None, *,
                 first_incarnation: int = 0) -> RWorkerSet:
        """Build a set; shards have no use for `local_device`."""
        return RWorkerSet(self, index_parent, runtime=runtime, first_incarnation=first_incarnation)
