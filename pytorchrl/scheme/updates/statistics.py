"""What the update worker knows: the ledger of the whole tree, lags, episodes, timings, the algorithm's statistics."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import numpy as np

from pytorchrl.agent.data import Episode
from pytorchrl.errors import CollectionError, NonFiniteUpdateError
from pytorchrl.runtime import WorkersPart
from pytorchrl.scheme.ledger import DropReason, Ledger, LedgerSnapshot, merge
from pytorchrl.scheme.timing import OPERATIONS, Seconds, Stopwatch, add_seconds, with_idle
from pytorchrl.scheme.transport.encoder import KINDS, Traffic, metrics_of
from pytorchrl.scheme.transport.messages import Gradients
from pytorchrl.scheme.window_stat import WindowStat
from pytorchrl.terminal import get_logger
from pytorchrl.worker_names import collection_worker

# A rare bad batch is survived. So many in a row are no accident, and the parameters that made them do not change.
_MAX_SKIPPED_IN_A_ROW = 5
# So many in a row without a sample of a policy that learns: its agents do not come at all.
_MAX_EMPTY_IN_A_ROW = 10_000
# The first ones of a row are those whose batches are kept.
_MAX_FAULTS_SHOWN = 3
# Times of operations are means over so many.
_TIME_WINDOW = 100
# Rates are those of the last seconds.
_RATE_WINDOW_S = 10.0
_LAG_PARTS = ("collect", "queue", "replay")
_BEFORE = (-1, -1)
"""Place in the account of gradient workers that were lost before a checkpoint: no live worker's, so the next keeps it too."""
_SAVED_COUNTS = ("updates", "updates_skipped_nan", "samples_skipped_nan")
_SAVED_LAGS = ("lags", "lag_parts", "grad_lags")
_RATES = ("collected_steps", "consumed_steps", "unique_consumed_steps", "updates")

logger = get_logger(__name__)


class Statistics:
    """Totals over all gradient workers. Thread-safe: an updater thread writes while the user reads.

    A gradient is `receive`d, then `apply`ed, `skip`ped or `drop`ped; the steps that are new in it move accordingly.

    Args:
        now: The clock.
    """

    num_workers: int = 0
    """Remote gradient workers."""
    missing: Collection[int] = ()
    """Indices of those that are lost and not replaced (yet); whoever replaces them changes it."""
    _empty_in_a_row = 0
    _consumed_before = 0
    """In the run that this one goes on with."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._now = threading.Lock(), now
        self._own = Ledger()
        self._totals: deque[tuple[float, tuple[int, ...]]] = deque([(now(), (0,) * len(_RATES))])
        self._shards: dict[int, tuple[Mapping[str, Any], ...]] = {}
        self._snapshots: dict[tuple[int, int], LedgerSnapshot] = {}  # by GWorker and incarnation
        self._counters: dict[tuple[int, int], dict[str, int]] = {}
        self._traffic: dict[tuple[int, int], Mapping[str, Traffic]] = {}
        self.traffic: dict[str, Traffic] = dict.fromkeys(KINDS, Traffic())
        """What the update worker itself has sent and decoded; written by the thread that makes updates."""
        self._incarnations: Counter[int] = Counter()
        self._lags: Counter[int] = Counter()
        self._lag_parts: Counter[str] = Counter()  # updates, over all that is in `_lags`
        self._grad_lags: Counter[int] = Counter()
        self._queue_levels = WindowStat("queue", 50)
        self._episodes: list[Episode] = []
        self._timings: Seconds = {}
        self._began: float | None = None  # when the first update was begun
        self._until = 0.0                 # when anything was last booked
        self._watch = Stopwatch(now, self._add_time)
        self._timings["update"] = self._watch.seconds
        self._info: dict[str, float] = {}
        self._info_weights: dict[str, float] = {}
        self._new_updates = 0
        self._parts: list[WorkersPart] = []
        self.last_info: Mapping[str, float] = {}
        """The algorithm's statistics of the last update; empty if it was skipped."""
        self._faults: list[str] = []  # of the updates skipped since the last one that was made
        self._skipped_in_a_row = 0
        self.updates = 0
        self.updates_skipped_nan = 0
        self.samples_skipped_nan = 0
        self.grads_received = self.grads_applied = self.grads_held = self.grads_dropped = 0
        self.grads_empty = 0
        """Those without any sample to learn from, of a policy that learns."""
        self.grads_late = 0
        """Those whose lag was above `max_grad_lag`."""
        self._grads_by_worker: Counter[int] = Counter()
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_TIME_WINDOW))
        self.restarts = self.regroups = 0
        self.weight_pushes = self.bytes_out = 0

    def receive(self, gradients: Gradients) -> None:
        """A gradient has arrived; its new steps are in flight until it is applied or dropped."""
        self.add_journal_part(gradients.part)
        with self._lock:
            sender = (gradients.worker, gradients.incarnation)
            self._snapshots[sender], self._counters[sender] = gradients.ledger, gradients.counters
            self._traffic[sender] = gradients.traffic
            for _, lag_queued, lag_used in gradients.lags:
                self._lags[lag_used] += 1
                self._lag_parts.update(collect=lag_queued, queue=lag_used - lag_queued)
            for lags in gradients.drawn_lags:
                sent, drawn = lags.T.tolist()
                self._lags.update(drawn)
                self._lag_parts.update(collect=sum(sent), replay=sum(drawn) - sum(sent))
            for level in gradients.queue_levels:
                self._queue_levels.push(level)
            self._episodes.extend(gradients.episodes)
            add_seconds(self._timings, gradients.timings)
            for name, (count, seconds) in gradients.times.items():
                self._times[name].extend([seconds / count] * min(count, _TIME_WINDOW))
            self._shards[gradients.worker] = gradients.shards
            self.grads_received += 1
            self.grads_held += 1
            self._grads_by_worker[gradients.worker] += 1
        self._own.move(gradients.num_new_samples, "sent", "in_flight")

    def apply(self, gradients: Iterable[Gradients], version: int, info: Mapping[str, float]) -> None:
        """One update was made from these gradients, when the parameters' version was `version`."""
        count = 0
        for part in gradients:
            self._own.move(part.num_new_samples, "in_flight", "consumed_unique")
            self._own.consume(part.num_samples)
            count += 1
        with self._lock:
            for part in gradients:
                self._grad_lags[version - part.weights_version] += 1
            self.grads_held -= count
            self.grads_applied += count
            self.updates += 1
            self.last_info = info
            self._new_updates += 1
            self._skipped_in_a_row = self._empty_in_a_row = 0
            total = None if any(part.samples for part in gradients) else sum(part.num_samples for part in gradients)
            for name, value in info.items():  # of a policy that is absent there is none
                weight = sum(part.weight_of(name) for part in gradients) if total is None else total
                self._info[name] = self._info.get(name, 0.0) + weight * value
                self._info_weights[name] = self._info_weights.get(name, 0.0) + weight
        self._note_totals()

    def _note_totals(self) -> None:
        """Remember what there is now, for rates; totals that are older than the window go."""
        own, now = self._own.snapshot(), self._now()
        with self._lock:
            collected = sum(snapshot.collected for snapshot in self._snapshots.values())
            self._totals.append((now, (collected, own.consumed, own.consumed_unique, self.updates)))
            while len(self._totals) > 2 and self._totals[1][0] <= now - _RATE_WINDOW_S:
                self._totals.popleft()

    def _rates(self) -> dict[str, float]:
        """Of the last ten seconds, up to the last update."""
        (start, before), (end, after) = self._totals[0], self._totals[-1]
        seconds = max(end - start, 1e-9)
        return {f"{name}_per_s": (last - first) / seconds for name, first, last in zip(_RATES, before, after, strict=True)}

    def skip(self, gradients: Sequence[Gradients]) -> None:
        """No update was made from these gradients, because their mean is not finite.

        Raises:
            NonFiniteUpdateError: That has happened more than five times in a row. Everything has been booked.
        """
        for part in gradients:
            self.drop(part, DropReason.NAN)
        faults = [part.fault for part in gradients if part.fault] or ["the mean of finite gradients overflows"]
        with self._lock:
            if not self._skipped_in_a_row:
                self._faults = []
            self._faults += faults
            self._skipped_in_a_row += 1
            self.last_info = {}
            self.updates_skipped_nan += 1
            self.samples_skipped_nan += sum(part.num_samples for part in gradients)
            updates, in_a_row = self.updates, self._skipped_in_a_row
            shown = _join(self._faults)
        if self.updates_skipped_nan == 1:
            logger.warning("an update was left out: %s; metrics count them as updates_skipped_nan", shown)
        if in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteUpdateError(
                f"{in_a_row} updates in a row could not be made, because a loss or gradient was not finite: {shown}. "
                f"The parameters are still those of version {updates}. Look for extreme values in observations, rewards "
                "and the loss; lower lr or max_grad_norm, or set normalize_obs and normalize_reward")

    def drop(self, gradients: Gradients, reason: DropReason) -> None:
        """A received gradient will not be applied."""
        self._own.drop(gradients.num_new_samples, "in_flight", reason)
        with self._lock:
            self.grads_held -= 1
            self.grads_dropped += 1

    def empty(self, gradients: Gradients) -> None:
        """A received gradient has nothing to learn from; no update is made of it."""
        self._own.move(gradients.num_new_samples, "in_flight", "consumed_unique")
        self._own.consume(gradients.num_samples)
        with self._lock:
            self.grads_held -= 1
            self.grads_empty += 1
            self._empty_in_a_row += 1

    def check_not_empty(self) -> None:
        """Raise `CollectionError` if ten thousand gradients in a row had nothing to learn from."""
        if self._empty_in_a_row >= _MAX_EMPTY_IN_A_ROW:
            raise CollectionError(
                f"{self._empty_in_a_row} gradients in a row had no sample to learn from, so no update is made; look whether the agents "
                "of policies that learn (trainable) ever act in the environment")

    def report_ledger(self, worker: int, incarnation: int, snapshot: LedgerSnapshot) -> None:
        """A gradient worker's account, without a gradient."""
        with self._lock:
            self._snapshots[worker, incarnation] = snapshot

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the update worker's own work, see `timing.PARTS`; for the thread that makes updates."""
        if self._began is None:
            self._began = self._now()
        return self._watch.part(name)

    def _add_time(self, name: str, seconds: float) -> None:
        with self._lock:
            self._until = self._now()
            self._times[name].append(seconds)

    def add_step_s(self, seconds: float) -> None:
        """Record the seconds that one whole update took, including its waits."""
        with self._lock:
            self._times["step"].append(seconds)

    def add_send_s(self, seconds: float) -> None:
        """Requests and gradients were on their way for so long, where everybody waited for them."""
        with self._lock:
            add_seconds(self._timings, {"gradients": {"send": seconds}})

    def _time_s(self) -> Seconds:
        """Where the time of each level's workers went, from the first update's begin to the last one's end."""
        elapsed = 0.0 if self._began is None else self._until - self._began
        collectors = {worker: counters["collectors"] for (worker, _), counters in sorted(self._counters.items())}
        return with_idle(self._timings, {
            "collection": elapsed * sum(collectors.values()), "gradients": elapsed * len(collectors), "update": elapsed})

    def close(self, worker: int, snapshot: LedgerSnapshot | None) -> None:
        """A gradient worker's final account; None if it is lost: what it held is then lost with it."""
        with self._lock:
            place = (worker, self._incarnations[worker])
            if snapshot is not None:
                self._snapshots[place] = snapshot
                return
            last = self._snapshots.get(place, LedgerSnapshot())
            lost = Counter(last.dropped)
            lost[DropReason.WORKER_LOST.value] += last.in_flight + last.queued + last.resident
            self._snapshots[place] = LedgerSnapshot(
                collected=last.collected, sent=last.sent, evicted=last.evicted, dropped=dict(lost))

    def lose(self, worker: int) -> None:
        """A gradient worker is lost; whoever takes its place starts an account of its own."""
        self.close(worker, None)
        with self._lock:
            self._incarnations[worker] += 1

    def state(self) -> dict[str, Any]:
        """What is to be saved of the account, but for that of live gradient workers, who save their own."""
        with self._lock:
            lost = [snapshot for (worker, incarnation), snapshot in self._snapshots.items()
                    if incarnation != self._incarnations[worker]]
            return {"own": asdict(self._own.snapshot()), "lost": asdict(merge(lost, LedgerSnapshot())),
                    "counts": {name: getattr(self, name) for name in _SAVED_COUNTS},
                    "lags": {name: dict(getattr(self, f"_{name}")) for name in _SAVED_LAGS}}

    def restore(self, state: Mapping[str, Any], ledgers: Mapping[int, LedgerSnapshot]) -> None:
        """Go on from a saved account, and those of gradient workers by index. Other counters and times begin at 0."""
        self._own.restore(LedgerSnapshot(**state["own"]))
        with self._lock:
            self._snapshots = {_BEFORE: LedgerSnapshot(**state["lost"]), **{(worker, 0): own for worker, own in ledgers.items()}}
            for name, count in state["counts"].items():
                setattr(self, name, count)
            for name, counts in state["lags"].items():
                setattr(self, f"_{name}", Counter(counts))
        self._consumed_before = self._own.snapshot().consumed
        self._totals.clear()  # rates are those of what follows
        self._note_totals()

    def settle(self) -> LedgerSnapshot:
        """The final account: no gradient will be applied any more, so what is underway in one is given up."""
        self._own.drop(max(0, self.ledger().in_flight), "in_flight", DropReason.SHUTDOWN)
        return self.ledger()

    @property
    def new_updates(self) -> int:
        """Updates since `take_info` was last called."""
        return self._new_updates

    def take_info(self) -> tuple[int, dict[str, float]]:
        """Updates since the last call, and the algorithm's statistics over them, weighted by samples."""
        with self._lock:
            info = {name: total / (self._info_weights[name] or 1.0) for name, total in self._info.items()}
            updates, self._new_updates, self._info, self._info_weights = self._new_updates, 0, {}, {}
            return updates, info

    def add_journal_part(self, part: WorkersPart | None) -> None:
        """What a worker's journal has noted came along."""
        if part is not None:
            self._parts.append(part)

    def take_journal_parts(self) -> list[WorkersPart]:
        """(worker, incarnation, part) of the journals that came with gradients since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def take_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        with self._lock:
            episodes, self._episodes = self._episodes, []
            return episodes

    def ledger(self) -> LedgerSnapshot:
        """The account of the whole tree as of the last messages."""
        with self._lock:
            return merge(self._snapshots.values(), self._own.snapshot())

    @property
    def env_steps(self) -> int:
        """Env steps that updates have used so far, or could: those that came into replay."""
        own = self._own.snapshot()
        with self._lock:  # asked at every update: not by way of `ledger`, which adds up all there is
            return own.consumed_unique + sum(part.resident + part.evicted for part in (own, *self._snapshots.values()))

    @property
    def collected(self) -> int:
        """Env steps that have been reported so far."""
        with self._lock:
            return sum(snapshot.collected for snapshot in self._snapshots.values())

    def metrics(self) -> dict[str, Any]:
        """Counters, lags, rates and times; JSON-able."""
        ledger = self.ledger()
        with self._lock:
            counters: Counter[str] = Counter()
            for part in self._counters.values():
                counters.update(part)
            pushes = counters.pop("weight_pushes", 0) + self.weight_pushes
            time_s = self._time_s()
            grad_s = time_s["gradients"]["grad"]
            collect_s = sum(time_s["collection"].values()) - time_s["collection"]["send"] - time_s["collection"]["idle"]
            return {
                "updates": self.updates, "updates_skipped_nan": self.updates_skipped_nan,
                "samples_skipped_nan": self.samples_skipped_nan,
                "grads_received": self.grads_received, "grads_applied": self.grads_applied,
                "grads_held": self.grads_held, "grads_dropped": self.grads_dropped, "grads_empty": self.grads_empty,
                "grads_late": self.grads_late,
                "grads_by_worker": {str(worker): n for worker, n in sorted(self._grads_by_worker.items())},
                "weight_pushes": pushes,
                **self._levels(),
                "workers_restarted": counters["restarts"] + self.restarts, "envs_restarted": counters["envs_restarted"],
                "regroups": self.regroups,
                "backward_passes": counters["backward_passes"],
                **{name: steps for name, steps in sorted(counters.items()) if name.startswith("agent_steps/")},
                "microbatch_steps": max((part.get("microbatch_steps", 0) for part in self._counters.values()), default=0),
                "rollouts": counters["rollouts"], "rollouts_preempted": counters["preempted"], **self._preemption(counters),
                "bytes_in": counters["bytes_sent"], "bytes_in_raw": counters["bytes_raw"],
                "bytes_out": counters["bytes_out"] + self.bytes_out,
                "queue": self._queue_levels.stats(),
                "dropped_items": counters["dropped_items"], "passes_cancelled": counters["passes_cancelled"],
                "replay_items_dropped": counters["replay_items_dropped"], "stale_priorities": counters["stale_priorities"],
                "replay_ratio": ledger.consumed / ledger.collected if ledger.collected else None,
                "policy_lag": summary(self._lags),
                **{f"policy_lag_{part}_mean": self._lag_parts[part] / max(1, self._lags.total()) for part in _LAG_PARTS},
                "grad_lag": summary(self._grad_lags), **self._rates(),
                "collect_peak_steps_per_s": counters["collected_in_use"] / collect_s if collect_s else None,
                "grad_peak_steps_per_s": (ledger.consumed - self._consumed_before) / grad_s if grad_s else None,
                "time_s": time_s,
                **{f"{name}_time_ms": 1e3 * statistics.fmean(self._times[name]) if self._times[name] else None
                   for name in OPERATIONS},
                **metrics_of([*self._traffic.values(), self.traffic]),
                **{f"shard/{place}/{name}": value for place, shard in self._named_shards() for name, value in shard.items()},
            }

    def _levels(self) -> dict[str, int]:
        """What there is now, as last heard of each gradient worker; with one that is missing, all below it is."""
        latest = {worker: counters for (worker, _), counters in sorted(self._counters.items())}
        absent = {index + 1 for index in tuple(self.missing)}
        return {
            "workers": self.num_workers + sum(counters["workers"] for counters in latest.values()),
            "workers_missing": len(absent) + sum(
                counters["workers" if worker in absent else "workers_missing"] for worker, counters in latest.items()),
            **{name: sum(counters[counter] for worker, counters in latest.items() if worker not in absent)
               for name, counter in (("queue_size", "queued_items"), ("requests_in_flight", "requests_in_flight"),
                                     ("draws_in_flight", "draws_in_flight"))},
        }

    def _preemption(self, counters: Counter[str]) -> dict[str, Any]:
        """Whose rollouts were cut short, and how those differ from full ones."""
        by_worker: Counter[tuple[int, int]] = Counter()  # (gradient worker, its collection worker)
        for (parent, _), part in self._counters.items():
            for name, count in part.items():
                if name.startswith("preempted/"):
                    by_worker[parent, int(name.removeprefix("preempted/"))] += count
        steps, episodes = counters["collected_in_use"], {kind: counters[f"{kind}_episodes"] for kind in ("preempted", "full")}
        return {
            "preempted_by_worker": {
                collection_worker(parent, worker): count for (parent, worker), count in sorted(by_worker.items())},
            "preempted_steps_share": counters["preempted_steps"] / steps if steps else None,
            **{f"episode_length_{kind}": counters[f"{kind}_episode_steps"] / number if number else None
               for kind, number in episodes.items()},
        }

    def _named_shards(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Shards by index; by gradient worker and index where several have some."""
        places = [(worker, index, shard) for worker, shards in sorted(self._shards.items())
                  for index, shard in enumerate(shards, start=1)]
        several = len({worker for worker, *_ in places}) > 1
        return [(f"{worker}.{index}" if several else str(index), shard) for worker, index, shard in places]


def _join(faults: Sequence[str]) -> str:
    more = len(faults) - _MAX_FAULTS_SHOWN
    return "; ".join(faults[:_MAX_FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def summary(histogram: Mapping[int, int]) -> dict[str, float]:
    """Mean, largest, median and 90 % quantile (nearest rank) of a histogram of lags; zeros if it is empty."""
    if not histogram:
        return {"mean": 0.0, "max": 0, "p50": 0, "p90": 0}
    values = np.array(sorted(histogram))
    counts = np.array([histogram[int(value)] for value in values])
    cumulated = counts.cumsum()
    p50, p90 = (int(values[np.searchsorted(cumulated, q * cumulated[-1])]) for q in (0.5, 0.9))
    return {"mean": float((values * counts).sum() / cumulated[-1]), "max": int(values[-1]), "p50": p50, "p90": p90}
