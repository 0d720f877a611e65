"""What a GWorker makes of a rollout: data to learn from, and numbers to tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import Episode
from pytorchrl.agent.moments import Moments
from pytorchrl.scheme.timing import Seconds, Stopwatch, Times, add_seconds
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.transport.encoder import DATA, GRADS, KINDS, WEIGHTS, Encoder, Traffic
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import receive

if TYPE_CHECKING:
    from pytorchrl.scheme.replay.shards import Shards

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=Any)


def with_part(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Let an error take along what its GWorker's journal has noted, for no gradient will."""
    @functools.wraps(method)
    def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if self.index_worker > 0:  # the local one is asked by its owner
                error.part = self.take_part()  # type: ignore[attr-defined]
            raise

    return call


def timed(part: str) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Let a method of a GWorker count as this part of its work."""
    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.report.watch.part(part):
                return method(self, *args, **kwargs)

        return call

    return decorate


Vectors = list[Tensor | None]
"""One flat gradient per group; of several policies one a policy, None for one that has no gradient."""


def not_finite(vectors: Vectors) -> Vectors:
    """NaN in place of every number."""
    return [None if vector is None else torch.full_like(vector, torch.nan) for vector in vectors]


class Report:
    """What a GWorker tells with its next gradient; counters go on, the rest starts anew.

    Args:
        now: The clock.
        previous: The one before.

    Attributes:
        watch: Times the GWorker's own work.
    """

    def __init__(self, now: Callable[[], float], previous: Report | None = None) -> None:
        self.lags: list[tuple[int, int, int]] = []
        self.drawn_lags: list[np.ndarray] = []
        self.episodes: list[Episode] = []
        self.moments: list[dict[str, Moments]] = []
        self.watch = Stopwatch(now)
        self._num_rollouts = 0
        self._timings: Seconds = {"gradients": self.watch.seconds, "collection": {}}
        self.counters: dict[str, int] = (
            dict(previous.counters) if previous else {"bytes_raw": 0, "bytes_sent": 0, "rollouts": 0, "preempted": 0,
                                                            "backward_passes": 0, "collected_in_use": 0})
        self.envs_restarted: dict[tuple[int, int], int] = dict(previous.envs_restarted) if previous else {}
        self.traffic: dict[str, Traffic] = dict(previous.traffic) if previous else dict.fromkeys(KINDS, Traffic())

    def pack(self, gradients: Vectors, encoder: Encoder) -> list[Any]:
        """Gradients as they cross between processes; their bytes are counted."""
        arrays = [None if grad is None else grad.detach().cpu().numpy() for grad in gradients]
        vectors, sent = encoder.pack(lambda pack: [
            None if array is None else pack(array, place) for place, array in enumerate(arrays)])
        self.counters["bytes_raw"] += sent.raw
        self.counters["bytes_sent"] += sent.sent
        self.traffic[GRADS] += Traffic.of(sent)
        # What was not packed is the algorithm's own memory.
        return [np.array(vector) if vector is array and vector is not None else vector
                for vector, array in zip(vectors, arrays, strict=True)]

    def receive(self, rollout: Rollout) -> Rollout:
        """Return the rollout with tensors that the learner may write, and count the time that decoding takes."""
        rollout, traffic = receive(rollout, self.watch.now)
        self.traffic[DATA] += traffic
        return rollout

    def add_rollout(self, rollout: Rollout, version_queued: int, version_used: int) -> None:
        """A rollout came into use; the learner's version when it was queued, and now."""
        self.lags.append((rollout.worker, version_queued - rollout.weights_version,
                          version_used - rollout.weights_version))
        self._add(rollout)

    def add_draw(self, shards: Shards, version: int) -> None:
        """A batch was drawn from replay; the learner's version now. Rollouts have come into replay meanwhile."""
        for rollout in shards.take_headers():
            self._add(rollout)
        collected, sent = shards.versions.T
        self.drawn_lags.append(np.stack([sent - collected, version - collected], axis=1))

    def _add(self, rollout: Rollout) -> None:
        self.episodes.extend(rollout.episodes)
        if rollout.moments:
            self.moments.append(rollout.moments)
        add_seconds(self._timings, {"collection": rollout.timings})
        self._num_rollouts += 1
        self.counters["collected_in_use"] += rollout.num_env_steps
        self.envs_restarted[rollout.worker, rollout.incarnation] = rollout.envs_restarted  # a total
        self.counters["envs_restarted"] = sum(self.envs_restarted.values())
        for name, value in (("bytes_raw", rollout.sent.raw), ("bytes_sent", rollout.sent.sent), ("rollouts", 1)):
            self.counters[name] += value
        self._count_preemption(rollout)
        self.traffic[DATA] += Traffic.of(rollout.sent)
        for kind, traffic in rollout.traffic.items():
            self.traffic[kind] += traffic
        for policy, steps in rollout.agent_steps.items():
            name = f"agent_steps/{policy}"
            self.counters[name] = self.counters.get(name, 0) + steps

    def _count_preemption(self, rollout: Rollout) -> None:
        """Episodes that ended in rollouts that were cut short, and in full ones; of the first also who made them, and steps."""
        kind = "preempted" if rollout.preempted else "full"
        counts = {f"{kind}_episodes": len(rollout.episodes),
                  f"{kind}_episode_steps": sum(episode.length for episode in rollout.episodes)}
        if rollout.preempted:
            counts |= {"preempted": 1, "preempted_steps": rollout.num_env_steps, f"preempted/{rollout.worker}": 1}
        for name, count in counts.items():
            self.counters[name] = self.counters.get(name, 0) + count

    def fields(self, collector: Any, shards: Shards | None) -> dict[str, Any]:
        """Return the fields of `Gradients` that this report fills.

        Args:
            collector: The gradient worker's `CollectorThread`.
            shards: Its replay shards; None without a replay level.
        """
        times = self._take_times(collector, shards)
        self._count(collector, shards)
        return {
            "lags": tuple(self.lags), "drawn_lags": tuple(self.drawn_lags), "episodes": tuple(self.episodes),
            "moments": tuple(self.moments), "times": times, "counters": self.counters,
            "timings": {level: dict(parts) for level, parts in self._timings.items()},
            "shards": () if shards is None else tuple(state.statistics() for state in shards.states),
            "queue_levels": collector.feed.take_levels() if shards is None else shards.take_levels(),
            "traffic": {**self.traffic, WEIGHTS: self.traffic[WEIGHTS] + collector.weights_traffic}}

    def _take_times(self, collector: Any, shards: Shards | None) -> Times:
        """Return the times measured since the last message in this worker, its collector thread, its shards and the rollouts."""
        own = self.watch.take()
        times = {"collect": (self._num_rollouts, sum(self._timings["collection"].values())), **collector.watch.take(),
                 **({} if shards is None else shards.watch.take()),
                 **{name: own[part] for part, name in (("wait", "dequeue"), ("grad", "grad")) if part in own}}
        return {name: time for name, time in times.items() if time[0]}

    def _count(self, collector: Any, shards: Shards | None) -> None:
        """Copy the totals of the collector thread and of the shards into the counters."""
        self.counters["weight_pushes"] = collector.weight_pushes
        self.counters["restarts"] = collector.restarts + (shards.restarts if shards is not None else 0)
        self.counters["collectors"] = max(1, collector.num_workers)
        self.counters["workers"] = collector.num_workers + (len(shards.states) if shards is not None else 0)
        self.counters["workers_missing"] = collector.num_missing + (shards.num_missing if shards is not None else 0)
        add_seconds(self._timings, {"collection": {"send": collector.take_send_s()}})
        self.counters["requests_in_flight"] = collector.requests_in_flight
        self.counters["queued_items"] = collector.queue.qsize() if shards is None else shards.num_waiting
        self.counters["draws_in_flight"] = 0 if shards is None else shards.num_pending
        self.counters["dropped_items"] = collector.feed.dropped_items
        self.counters["passes_cancelled"] = collector.feed.passes_cancelled
        self.counters["bytes_out"] = collector.bytes_out
        self.traffic[WEIGHTS] += collector.local_worker.take_weights_traffic()
        storage = collector.local_worker.storage
        self.counters["stale_priorities"] = storage.counters.get("stale_priorities", 0) if storage.gives.is_kept else 0
        if shards is not None:
            self.counters["replay_items_dropped"] = shards.items_dropped
            self.counters["stale_priorities"] = sum(state.contents["stale_priorities"] for state in shards.states)


def own(rollout: Rollout) -> Rollout:
    """The rollout with data that nobody else writes; the local worker's are its storage's own rows."""
    data = rollout.data
    if not codecs.is_made_of(data, Tensor):
        return rollout
    return replace(rollout, data=data.map(Tensor.clone))
