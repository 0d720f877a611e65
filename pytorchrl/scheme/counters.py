"""Counters of gradient workers. Each counter is declared once, with its meaning and the rule for merging it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import NoReturn, TypeVar

C = TypeVar("C", bound="WorkerCounters")
K = TypeVar("K")


class Merge(Enum):
    """The rule for merging the values of a counter."""

    TOTAL = "total"
    """A count since a worker started; merged as the sum over all workers, including replaced ones."""
    LEVEL = "level"
    """The value in a worker's latest message; merged as the sum over the current workers."""
    LARGEST = "largest"
    """The value in a worker's latest message; merged as the largest value of all workers."""


def counter(merge: Merge, help: str) -> int:
    """Declare a counter with its rule for merging and a one-sentence description."""
    return field(default=0, metadata={"merge": merge, "help": help})


def _total(help: str) -> dict[str, object]:
    return {"merge": Merge.TOTAL, "help": help}


def _zeros() -> defaultdict[K, int]:
    return defaultdict(int)  # copying a `defaultdict` is faster than copying a `Counter`


@dataclass(kw_only=True)
class WorkerCounters:
    """The counters of a gradient worker and of the collection workers and replay shards below it."""

    rollouts: int = counter(Merge.TOTAL, "Rollouts taken for training or added to replay.")
    preempted: int = counter(Merge.TOTAL, "Preempted rollouts that were taken for training or added to replay.")
    collected_in_use: int = counter(Merge.TOTAL, "Env steps of rollouts taken for training or added to replay.")
    preempted_steps: int = counter(Merge.TOTAL, "Env steps of the rollouts counted by `preempted`.")
    preempted_episodes: int = counter(Merge.TOTAL, "Episodes that ended in preempted rollouts.")
    preempted_episode_steps: int = counter(Merge.TOTAL, "Env steps of the episodes counted by `preempted_episodes`.")
    full_episodes: int = counter(Merge.TOTAL, "Episodes that ended in full rollouts.")
    full_episode_steps: int = counter(Merge.TOTAL, "Env steps of the episodes counted by `full_episodes`.")
    preempted_by_worker: defaultdict[int, int] = field(
        default_factory=_zeros, metadata=_total("Preempted rollouts, by index of the collection worker."))
    env_steps_by_worker: defaultdict[int, int] = field(
        default_factory=_zeros,
        metadata=_total("The env steps counted by `collected_in_use`, by index of the collection worker."))
    restarts_by_worker: defaultdict[int, int] = field(
        default_factory=_zeros, metadata=_total("Restarts of lost collection workers, by index of the worker."))
    agent_steps: defaultdict[str, int] = field(
        default_factory=_zeros, metadata=_total("Decisions of each policy's agents, if there are several policies."))
    episodes_approximated: int = counter(
        Merge.TOTAL, "Episodes that were cut off and whose last observation was unknown.")
    envs_restarted: int = counter(Merge.TOTAL, "Restarts of environments that raised an error.")
    bytes_raw: int = counter(Merge.TOTAL, "Bytes of rollouts and gradients before compression.")
    bytes_sent: int = counter(Merge.TOTAL, "Bytes of rollouts and gradients after any compression.")
    bytes_out: int = counter(Merge.TOTAL, "Bytes of weights sent to collection workers.")
    weight_pushes: int = counter(Merge.TOTAL, "Transfers of weights to a collection worker.")
    restarts: int = counter(Merge.TOTAL, "Restarts of lost collection workers and shards.")
    dropped_train_batches: int = counter(Merge.TOTAL, "Queued train batches that were dropped before use.")
    passes_cancelled: int = counter(Merge.TOTAL, "Cancelled passes over train batches.")
    replay_batches_dropped: int = counter(Merge.TOTAL, "Batches that were drawn from shards but not used.")
    stale_priorities: int = counter(Merge.TOTAL, "Priority updates for transitions that were no longer in replay.")
    backward_passes: int = counter(Merge.TOTAL, "Backward passes.")
    microbatch_steps: int = counter(Merge.LARGEST, "Number of samples in the last batch.")
    inference_batches: int = counter(Merge.TOTAL, "Batches of actions that were chosen by central inference.")
    inference_rows: int = counter(Merge.TOTAL, "Environments in all batches of central inference.")
    inference_lag: int = counter(Merge.TOTAL, "Lags of the weights in all batches of central inference, in updates.")
    num_collectors: int = counter(Merge.LEVEL, "Collection workers, including the local one if it collects.")
    workers: int = counter(Merge.LEVEL, "Remote collection workers and shards.")
    workers_missing: int = counter(Merge.LEVEL, "Remote collection workers and shards lost and not yet replaced.")
    queued_batches: int = counter(Merge.LEVEL, "Queued train batches, or batches from shards that await the learner.")
    queue_peak: int = counter(
        Merge.LARGEST, "Largest number of train batches that the sample queue has contained so far, or of batches from "
        "shards that waited for the learner.")
    requests_in_flight: int = counter(Merge.LEVEL, "Rollouts requested from remote collection workers.")
    draws_in_flight: int = counter(Merge.LEVEL, "Batches requested from shards.")

    @classmethod
    def merge(cls, parts: Iterable[WorkerCounters]) -> WorkerCounters:
        """Return the counters of several workers, merged field by field."""
        parts, merged = list(parts), cls()
        for name, values in zip(_SUMMED, zip(*map(_SUMMED_OF, parts), strict=True), strict=bool(parts)):
            setattr(merged, name, sum(values))
        for name in _LARGEST:
            setattr(merged, name, max((getattr(part, name) for part in parts), default=0))
        for name in _BY_KEY:
            total = getattr(merged, name)
            for part in parts:
                for key, count in getattr(part, name).items():
                    total[key] += count
        return merged

    def copy(self) -> WorkerCounters:
        """Return an independent copy of these counters."""
        return self._copied_as(WorkerCounters)

    def snapshot(self) -> CounterSnapshot:
        """Return an independent copy of these counters that cannot be changed."""
        return self._copied_as(CounterSnapshot)

    def _copied_as(self, kind: type[C]) -> C:
        copied: C = object.__new__(kind)
        values = self.__dict__.copy()
        for name in _BY_KEY:
            values[name] = values[name].copy()
        vars(copied).update(values)
        return copied


class CounterSnapshot(WorkerCounters):
    """The counters of a worker at one moment, as its reports contain them; they cannot be set."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot set {name!r} of a snapshot; count in the worker's WorkerCounters instead")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete {name!r} of a snapshot")


# Group the fields by merging rule once, at import.
_BY_KEY = [declared.name for declared in fields(WorkerCounters) if declared.default_factory is _zeros]
_LARGEST = [declared.name for declared in fields(WorkerCounters) if declared.metadata["merge"] is Merge.LARGEST]
_SUMMED = [declared.name for declared in fields(WorkerCounters) if declared.name not in (*_BY_KEY, *_LARGEST)]
_SUMMED_OF = attrgetter(*_SUMMED)
