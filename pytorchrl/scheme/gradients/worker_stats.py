"""Statistics that a gradient worker sends with its gradients."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from pytorchrl.agent.data import Episode
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.process_group import Vectors
from pytorchrl.scheme.replay.shard_states import ShardState
from pytorchrl.scheme.timing import Seconds, Stopwatch, Times, add_seconds
from pytorchrl.scheme.transport.encoder import DATA, GRADS, KINDS, NOT_SENT, WEIGHTS, Encoder, Traffic
from pytorchrl.scheme.transport.messages import Moments, Report, RolloutHeader
from pytorchrl.support.untyped import Payload

if TYPE_CHECKING:
    from pytorchrl.scheme.collection.collector_thread import CollectorThread

P = ParamSpec("P")
R = TypeVar("R")


class HasStats(Protocol):
    """An object whose methods can be decorated with `timed`."""

    @property
    def stats(self) -> WorkerStats:
        """Statistics of the gradient worker to which the object belongs."""


W = TypeVar("W", bound=HasStats)


def timed(part: str) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Return a decorator that adds the duration of each call of a method to the gradient worker's time for `part`."""
    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            watch = self.stats.watch
            start, before, watch.within = watch.now(), watch.within, 0.0
            try:  # a `with` block takes twice as long
                return method(self, *args, **kwargs)
            finally:
                watch.end(part, start, before)

        return call

    return decorate


class CountedSource(Protocol):
    """The component that provides batches: a `BatchSource`, whose module imports this one."""

    def count(self, counters: WorkerCounters) -> None:
        """Add the component's counts to `counters`."""

    def take_times(self) -> Times:
        """Return the durations of the component's operations since the last call."""

    def take_levels(self) -> tuple[int, ...]:
        """Return the number of batches left in the queue after each removal of a batch since the last `take_levels`."""


class WorkerStats:
    """Statistics of a gradient worker and of its rollouts, for the worker's next report.

    Counters and traffic are totals; `take` and `take_moments` reset all other statistics.

    Args:
        now: The clock.

    Attributes:
        moments: Statistical moments of the rollouts, for the normalizers.
        counters: Totals of the worker's own work.
        traffic: Totals of messages, by kind.
        watch: Stopwatch for the worker's own work.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.counters = WorkerCounters()
        self.traffic: dict[str, Traffic] = dict.fromkeys(KINDS, Traffic())
        self.moments: list[dict[str, Moments]] = []
        self._envs_restarted: dict[tuple[int, int], int] = {}
        self._start(now)

    def _start(self, now: Callable[[], float]) -> None:
        self._lags: list[tuple[int, int, int]] = []
        self._step_lags, self._pass_lags = Counter[tuple[int, int]](), Counter[int]()
        self._drawn_lags: list[np.ndarray] = []
        self._episodes: list[Episode] = []
        self.watch = Stopwatch(now)
        self._num_rollouts = 0
        self._timings: Seconds = {"gradients": self.watch.seconds, "collection": {}}

    def pack(self, gradients: Vectors, encoder: Encoder) -> list[Payload]:
        """Return gradients encoded for sending, and count their bytes."""
        arrays = [None if grad is None else grad.detach().cpu().numpy() for grad in gradients]
        vectors, sent = encoder.pack(lambda pack: [
            None if array is None else pack(array, place) for place, array in enumerate(arrays)])
        self.counters.bytes_raw += sent.raw
        self.counters.bytes_sent += sent.sent
        self.traffic[GRADS] += Traffic.of(sent)
        # Copy each vector that was not encoded, because it shares memory with the algorithm.
        return [np.array(vector) if vector is array and vector is not None else vector
                for vector, array in zip(vectors, arrays, strict=True)]

    def add_rollout(self, header: RolloutHeader, version_queued: int, version_used: int) -> None:
        """Count a rollout at its first use.

        Args:
            header: The header of the rollout.
            version_queued: The learner's version when the rollout was queued.
            version_used: The learner's version now.
        """
        self._lags.append((header.worker, version_queued - header.weights_version,
                           version_used - header.weights_version))
        for version, steps in (header.steps_by_version or {header.weights_version: header.num_env_steps}).items():
            if steps:  # a data set has none
                self._step_lags[version_queued - version, version_used - version_queued] += steps
        self._add(header)

    def add_gradient(self, num_samples: int, num_updates: int) -> None:
        """Count the samples of a gradient.

        Args:
            num_samples: Number of env steps from which the gradient was computed.
            num_updates: Number of updates since the first use of their train batch.
        """
        self._pass_lags[num_updates] += num_samples

    def add_draw(self, headers: Iterable[RolloutHeader], versions: np.ndarray, version: int) -> None:
        """Count a batch that was sampled from replay.

        Args:
            headers: The headers of the rollouts that were added to replay since the last batch.
            versions: (K, 2) int64. For each item of the batch: the version of the weights with which the item was
                collected, and the learner's version when the item was sent to its shard; see `Sample.versions`.
            version: The learner's version now.
        """
        for header in headers:
            self._add(header)
        collected, sent = versions.T
        self._drawn_lags.append(np.stack([sent - collected, version - collected], axis=1))

    def _add(self, header: RolloutHeader) -> None:
        counters = self.counters
        if header.moments:
            self.moments.append(header.moments)
        add_seconds(self._timings, {"collection": header.timings})
        self._num_rollouts += 1
        counters.collected_in_use += header.num_env_steps
        counters.env_steps_by_worker[header.worker] += header.num_env_steps
        if header.envs_restarted:
            self._envs_restarted[header.worker, header.incarnation] = header.envs_restarted  # the worker's total so far
            counters.envs_restarted = sum(self._envs_restarted.values())
        counters.rollouts += 1
        if header.episodes or header.preempted:
            self._episodes.extend(header.episodes)
            counters.episodes_approximated += sum(episode.is_approximated for episode in header.episodes)
            self._count_preemption(header)
        if header.sent is not NOT_SENT:
            counters.bytes_raw += header.sent.raw
            counters.bytes_sent += header.sent.sent
            self.traffic[DATA] += Traffic.of(header.sent)
        for kind, traffic in header.traffic.items():
            self.traffic[kind] += traffic
        for policy, steps in header.agent_steps.items():
            self.counters.agent_steps[policy] += steps

    def _count_preemption(self, header: RolloutHeader) -> None:
        """Count the episodes of a rollout and the steps of these episodes, separately for preempted and full rollouts.

        If the rollout was preempted, also count the rollout itself and its env steps.
        """
        episode_steps = sum(episode.length for episode in header.episodes)
        if not header.preempted:
            self.counters.full_episodes += len(header.episodes)
            self.counters.full_episode_steps += episode_steps
            return
        self.counters.preempted_episodes += len(header.episodes)
        self.counters.preempted_episode_steps += episode_steps
        self.counters.preempted += 1
        self.counters.preempted_steps += header.num_env_steps
        self.counters.preempted_by_worker[header.worker] += 1

    def take_episodes(self) -> list[Episode]:
        """Return and remove the finished episodes that the next report would contain."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def take_moments(self) -> tuple[dict[str, Moments], ...]:
        """Return the statistical moments of all rollouts that were counted since the last call."""
        moments = tuple(self.moments)
        if moments:
            self.moments = []
        return moments

    def take(self, collector: CollectorThread, source: CountedSource, shards: Iterable[ShardState]) -> Report:
        """Return a report, and reset all statistics except totals and moments.

        Args:
            collector: The collector thread.
            source: The component that provides batches.
            shards: The states of the replay shards.
        """
        own, counters = self.watch.take(), self.counters.copy()
        times: Times = {"collect": (self._num_rollouts, sum(self._timings["collection"].values()))}
        times |= {**collector.take_times(), **source.take_times()}
        collector.count(counters)
        source.count(counters)
        times |= {name: own[part] for part, name in (("wait", "dequeue"), ("grad", "grad")) if part in own}
        add_seconds(self._timings, {"collection": {"send": collector.take_send_s()}})
        report = Report(
            lags=tuple(self._lags), step_lags=self._step_lags, pass_lags=self._pass_lags,
            drawn_lags=tuple(self._drawn_lags), episodes=tuple(self._episodes),
            times={name: time for name, time in times.items() if time[0]}, counters=counters.snapshot(),
            timings={level: dict(seconds) for level, seconds in self._timings.items()},
            traffic={**self.traffic, WEIGHTS: self.traffic[WEIGHTS] + collector.weights_traffic},
            shards=tuple([shard.statistics() for shard in shards]), queue_levels=source.take_levels())
        self._start(self.watch.now)
        return report
