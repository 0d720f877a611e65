"""The three kinds of collection, which determine how a gradient worker receives data.

Each kind is a class that inherits the options of the collection workers, the collector thread and the batches. Each
kind has only the options that affect it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from pytorchrl.agent.names import refuse_unknown
from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.base.levels import Kind, Reader, raise_all
from pytorchrl.scheme.base.worker import ASYNC, SYNC, Communication
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.gradients.g_worker_options import GWorkerOptions
from pytorchrl.scheme.gradients.microbatch import GradAccumulator
from pytorchrl.scheme.gradients.queue_options import SampleQueueOptions
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet


@dataclass(frozen=True, kw_only=True)
class CollectionPattern(Options):
    """The option that, together with `num_replay_workers`, selects the kind of collection."""

    col_communication: Communication = option(
        SYNC, help="Coordination of collection and learning: with \"synchronous\", they alternate; with "
        "\"asynchronous\", they run at the same time.")


@dataclass(frozen=True, kw_only=True)
class SynchronousCollection(
        CWorkerSet.Options, CollectorThread.Options, Barrier.Options, GradAccumulator.CollectOptions, GWorkerOptions,
        Kind):
    """Collection that alternates with learning; all collection workers act with the weights of the latest update."""

    title: ClassVar[str] = "synchronous collection"
    chosen_by: ClassVar[str] = "col_communication='synchronous'"

    @property
    def collects_microbatches(self) -> bool:
        """Whether a train batch is collected in microbatches."""
        return None not in (self.train_batch_size, self.microbatch_size)

    def __post_init__(self) -> None:
        """Refuse options that contradict each other or have no effect."""
        super().__post_init__()
        if self.infers_centrally:
            raise ConfigError("inference='central' is for asynchronous collection; give "
                              "col_communication='asynchronous', or backend='async' of the environments, with which "
                              "one worker acts for environments in several processes")
        _check_sizes(self.train_batch_size, self.microbatch_size)
        if not self.collects_microbatches:
            given = [f"{name}={getattr(self, name)!r}" for name in ("prefetch", "norm_over") if name in self.changed()]
            if given:
                raise ConfigError(f"{', '.join(given)} is for synchronous collection in microbatches; give "
                                  "train_batch_size and microbatch_size, or leave it out")
        elif self.prefetch == 1 and self.col_fraction_workers < 1.0:
            raise ConfigError("prefetch=1 contradicts col_fraction_workers < 1: slow workers are not preempted while "
                              "a gradient is computed; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class AsynchronousCollection(
        CWorkerSet.Options, CollectorThread.Options, OnArrival.Options, SampleQueueOptions, GradAccumulator.Options,
        GWorkerOptions, Kind):
    """Collection that runs during learning; it pauses only if `queue_policy` or `on_policy_lag` requires a wait."""

    title: ClassVar[str] = "asynchronous collection without replay workers"
    chosen_by: ClassVar[str] = "col_communication='asynchronous' without num_replay_workers"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        super().__post_init__()
        _check_inference(self)
        _check_sizes(self.train_batch_size, self.microbatch_size)
        if self.on_policy_lag == "wait" and self.infers_centrally:
            raise ConfigError("on_policy_lag='wait' contradicts inference='central', whose weights change within a "
                              "rollout; give on_policy_lag='drop'")
        if self.on_policy_lag == "wait" and (self.broadcast_interval, self.max_weight_sync_delay) != (1, None):
            raise ConfigError("on_policy_lag='wait' requires that every rollout is collected with the newest weights; "
                              "leave out broadcast_interval and max_weight_sync_delay")

    @property
    def longest_interval(self) -> int:
        """Number of updates between new weights for a worker: min(`broadcast_interval`, `max_policy_lag` + 1).

        With a larger number, the weights of all workers could become older than `max_policy_lag` before new weights are
        due. All rollouts would be dropped, no update could be made, and the learner would wait forever.
        """
        limit = self.max_policy_lag
        return self.broadcast_interval if limit is None else min(self.broadcast_interval, limit + 1)


@dataclass(frozen=True, kw_only=True)
class ReplayCollection(
        CWorkerSet.ReplayOptions, CollectorThread.Options, OnArrival.Options, RWorkerSet.Options, GWorkerOptions,
        Kind):
    """Collection into replay shards, from which the learner samples its batches."""

    title: ClassVar[str] = "asynchronous collection with replay workers"
    chosen_by: ClassVar[str] = "num_replay_workers with col_communication='asynchronous'"
    instead: ClassVar[Mapping[str, str]] = {"learning_starts": "; give start_steps of the algorithm instead"}

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        super().__post_init__()
        _check_inference(self)


Collection: TypeAlias = SynchronousCollection | AsynchronousCollection | ReplayCollection
COLLECTION_KINDS = (SynchronousCollection, AsynchronousCollection, ReplayCollection)


def collection_kind(reader: Reader) -> type[Collection]:
    """Return the kind of collection that the keywords in `reader` select; add any problem to `reader.problems`."""
    pattern = reader.read(CollectionPattern)
    is_asynchronous = pattern is not None and pattern.col_communication is ASYNC
    if reader.given.get("num_replay_workers") is None:
        reader.given.pop("num_replay_workers", None)
        return AsynchronousCollection if is_asynchronous else SynchronousCollection
    if pattern is not None and not is_asynchronous:
        reader.problems.append("num_replay_workers needs col_communication='asynchronous', because shards are filled "
                               "during learning")
    return ReplayCollection


def collection_of(given: Mapping[str, object]) -> Collection:
    """Build the options of collection from keywords.

    Raises:
        ConfigError: An option is unknown, has an invalid value, or would have no effect. The message lists all
            problems.
    """
    known = {name for kind in (CollectionPattern, *COLLECTION_KINDS) for name in kind.declarations()}
    refuse_unknown(given, {name: ("scheme", name) for name in known}, "GWorkerSet has no option")
    reader = Reader(given)
    collection = reader.with_execution(reader.choose(collection_kind(reader), COLLECTION_KINDS), "col")
    raise_all(reader.problems)
    found: Collection = collection
    return found


def default_collection(communication: Communication, fraction_workers: float, *, has_shards: bool) -> Collection:
    """Return the default options of collection, for a gradient worker that a user builds without `collection`.

    Args:
        communication: Whether collection is synchronous or asynchronous.
        fraction_workers: Share of the collection workers that must finish a round before the other workers are
            preempted.
        has_shards: Whether rollouts are stored in replay shards.
    """
    if has_shards:
        return ReplayCollection()
    if communication is ASYNC:
        return AsynchronousCollection()
    return SynchronousCollection(col_fraction_workers=fraction_workers)


def _check_inference(collection: AsynchronousCollection | ReplayCollection) -> None:
    if collection.infers_centrally and "col_in_flight" in collection.changed():
        raise ConfigError(f"col_in_flight={collection.col_in_flight} is for inference='worker': with central "
                          "inference, each worker has one request, a step, at a time; leave it out")


def _check_sizes(train_batch_size: int | None, microbatch_size: int | None) -> None:
    if train_batch_size is not None and microbatch_size is not None and microbatch_size > train_batch_size:
        raise ConfigError(f"microbatch_size must not exceed train_batch_size, got {microbatch_size} > "
                          f"{train_batch_size}")
