"""Statistics of the whole tree: its ledger, counters, lags, times, episodes, and the algorithm's own statistics."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from pytorchrl.agent.data import Episode
from pytorchrl.errors import CollectionError, NonFiniteUpdateError
from pytorchrl.files.atomic import saved_int
from pytorchrl.runtime import WorkersPart
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.ledger import DropReason, LedgerSnapshot
from pytorchrl.scheme.timing import WindowStat
from pytorchrl.scheme.transport.encoder import KINDS, Traffic, metrics_of
from pytorchrl.scheme.transport.messages import Gradients, Report
from pytorchrl.scheme.updates.averaging import WeightedMeans
from pytorchrl.scheme.updates.lags import Lags
from pytorchrl.scheme.updates.times import Rates, TreeTimes
from pytorchrl.scheme.updates.tree_ledger import TreeLedger
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import MetricsDict, StateDict
from pytorchrl.support.worker_names import collection_worker, gradient_worker

# An error is raised after this many gradients in a row without samples. The probable cause is that none of
# the acting agents has a trainable policy.
_MAX_EMPTY_IN_A_ROW = 10_000
# Number of gradients without reports after which a report of the local gradient worker is requested.
_REPORT_INTERVAL = 50
# Number of finished episodes that are kept until the next call of `take_episodes`, so that a loop that calls only
# `step` does not use more and more memory.
_MAX_EPISODES = 10_000
_SAVED_COUNTS = ("updates", "updates_skipped_nan", "samples_skipped_nan")
_RATES = ("collected_steps", "consumed_steps", "unique_consumed_steps", "updates")
# Number of updates in a row that may be skipped. One more skipped update raises an error: skipped updates do not change
# parameters, so the cause would probably persist.
_MAX_SKIPPED_IN_A_ROW = 5
# Number of causes that an error message lists. Each cause names the file of its batch; the first causes are listed,
# because `keep_bad_batches` saves only the first bad batches of each worker.
_MAX_FAULTS_SHOWN = 3

logger = get_logger(__name__)


class NanPolicy:
    """Counts consecutive updates that were skipped because the mean gradient was not finite.

    This class is not thread-safe.
    """

    def __init__(self) -> None:
        self._faults: list[str] = []  # causes of the latest consecutive skipped updates
        self._num_in_a_row = 0

    def made(self) -> None:
        """Record that an update was made."""
        self._num_in_a_row = 0

    def skipped(self, faults: Sequence[str], version: int, is_first: bool) -> None:
        """Record that an update was skipped.

        Args:
            faults: Descriptions of the non-finite values, with the workers that found them; empty if only the mean
                gradient is not finite.
            version: Version of the parameters, which did not change.
            is_first: Whether this is the first skipped update of the run, for which a warning is logged.

        Raises:
            NonFiniteUpdateError: More than five updates in a row were skipped.
        """
        if not self._num_in_a_row:
            self._faults = []
        self._faults += faults or ["the mean of finite gradients overflows"]
        self._num_in_a_row += 1
        more = len(self._faults) - _MAX_FAULTS_SHOWN
        shown = "; ".join(self._faults[:_MAX_FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        if is_first:
            logger.warning("an update was skipped: %s; metrics count skipped updates as updates_skipped_nan", shown)
        if self._num_in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteUpdateError(
                f"{self._num_in_a_row} updates in a row could not be made, because a loss or gradient was not finite: "
                f"{shown}. The parameters are still those of version {version}. Look for extreme values in "
                "observations, rewards and the loss; lower lr or max_grad_norm, or set normalize_obs and "
                "normalize_reward")


@dataclass
class UpdateCounters:
    """The counters of the update worker. They are totals since the start, except `grads_held`."""

    updates: int = 0
    updates_skipped_nan: int = 0
    samples_skipped_nan: int = 0
    """Samples in the gradients of skipped updates, counted once for each pass."""
    grads_received: int = 0
    grads_applied: int = 0
    grads_held: int = 0
    """Gradients that currently wait for their update."""
    grads_dropped: int = 0
    grads_empty: int = 0
    """Gradients that contain no samples of any policy that learns."""
    grads_late: int = 0
    """Gradients whose lag exceeded `max_grad_lag`."""
    weight_pushes: int = 0
    """Transfers of weights to gradient workers."""
    bytes_out: int = 0
    """Bytes of weights sent to gradient workers."""
    restarts_by_worker: Counter[int] = field(default_factory=Counter)
    """Restarts of lost gradient workers, by index of the worker."""
    regroups: int = 0
    """Groups of decentralized gradient workers that were formed after the first group."""


class Statistics:
    """Statistics of the whole tree.

    This class is thread-safe: the thread that makes updates writes while the user's thread reads.

    Each gradient is first passed to `receive`, then to one of `apply`, `skip`, `drop` and `empty`. Each of these
    methods also records in the ledger what happened to the gradient's new env steps, which no earlier gradient used.

    Args:
        now: The clock.

    Attributes:
        tree_ledger: The ledger of the whole tree.
        counters: The update worker's own counters, written by the thread that makes updates.
        traffic: Messages that the update worker sent and decoded, by kind; written by the thread that makes updates.
        last_info: The algorithm's statistics of the latest update; empty if that update was skipped.
        local_report: Function that returns a report of the local gradient worker; None if gradients contain reports.
        local_episodes: Function that returns the newly finished episodes of the local worker, without waiting for a
            report; the next report then omits these episodes.
        num_workers: Number of remote gradient workers.
        missing: Indices of remote gradient workers that are lost and not replaced; the supervisor updates this set.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        # guards `counters` and what arrived with gradients:
        # counters.grads_received == counters.grads_applied + grads_dropped + grads_empty + grads_held
        self._lock = threading.Lock()
        self.tree_ledger = TreeLedger()
        self.counters = UpdateCounters()
        self.traffic: dict[str, Traffic] = dict.fromkeys(KINDS, Traffic())
        self.last_info: Mapping[str, float] = {}
        self.local_report: Callable[[], Report] | None = None
        self.local_episodes: Callable[[], list[Episode]] = list
        self.num_workers = 0
        self.missing: Collection[int] = ()
        # The following attributes contain data that arrived with gradients.
        self._workers: dict[tuple[int, int], WorkerCounters] = {}  # key: index and incarnation of the gradient worker
        self._traffic: dict[tuple[int, int], Mapping[str, Traffic]] = {}
        self._shards: dict[int, tuple[Mapping[str, object], ...]] = {}  # key: gradient worker
        self._grads_by_worker: Counter[int] = Counter()
        self._queue_levels = WindowStat("queue", 50)
        self._episodes: deque[Episode] = deque(maxlen=_MAX_EPISODES)
        self._journal_parts: list[WorkersPart] = []
        self._lags, self._rates, self._times = Lags(), Rates(now, _RATES), TreeTimes(now, self._add_time)
        self._info, self._new_updates = WeightedMeans(), 0  # totals since the last call of `take_info`
        self._nan_policy = NanPolicy()
        self._empty_in_a_row = 0
        self._thread = 0  # identifier of the thread that last called `receive` with a gradient that has no report

    # Gradients

    def receive(self, gradients: Gradients) -> None:
        """Record a gradient that arrived.

        The gradient's new env steps, which no earlier gradient used, are in flight until the gradient is passed to
        `apply`, `skip`, `drop` or `empty`.
        """
        self.add_journal_part(gradients.part)
        sender = (gradients.worker, gradients.incarnation)
        self.tree_ledger.report(*sender, gradients.ledger)
        with self._lock:
            self._grads_by_worker[gradients.worker] += 1
            self.counters.grads_received += 1
            self.counters.grads_held += 1
        self.tree_ledger.receive(gradients.num_new_samples)
        if gradients.report is not None:
            self._receive_report(sender, gradients.report)
            return
        self._thread = threading.get_ident()
        if self.counters.grads_received % _REPORT_INTERVAL == 0:
            self.request_report()

    def _receive_report(self, sender: tuple[int, int], report: Report) -> None:
        with self._lock:
            self._workers[sender] = report.counters
            self._traffic[sender], self._shards[sender[0]] = report.traffic, report.shards
            self._lags.receive(sender[0], report)
            self._times.receive(report)
            for level in report.queue_levels:
                self._queue_levels.push(level)
            self._episodes.extend(report.episodes)

    def request_report(self) -> None:
        """Request a report of the local gradient worker, unless its gradients contain reports.

        Making a report takes as long as all other bookkeeping for a gradient. Therefore, the thread that makes updates
        requests a report only at intervals, and before it reads statistics. In any other thread, this method does
        nothing, and the thread reads the statistics of the latest report.
        """
        if self._reads_local:
            assert self.local_report is not None
            self._receive_report((0, 0), self.local_report())

    @property
    def _reads_local(self) -> bool:
        """Whether the calling thread may request statistics of the local gradient worker."""
        return self.local_report is not None and self._thread == threading.get_ident()

    def apply(self, gradients: Iterable[Gradients], version: int, info: Mapping[str, float]) -> None:
        """Record an update from these gradients.

        Args:
            gradients: The gradients that were averaged into the update.
            version: Version of the parameters before the update.
            info: The algorithm's statistics.
        """
        gradients = list(gradients)
        for gradient in gradients:
            self.tree_ledger.consume(gradient.num_new_samples, gradient.num_samples)
        with self._lock:
            for gradient in gradients:
                self._lags.apply(gradient, version)
            self.counters.grads_held -= len(gradients)
            self.counters.grads_applied += len(gradients)
            self.counters.updates += 1
            self.last_info = info
            self._new_updates += 1
            self._empty_in_a_row = 0
            self._nan_policy.made()
            if any(gradient.has_policies for gradient in gradients):
                for name, value in info.items():
                    self._info.add({name: value}, sum([gradient.weight_of(name) for gradient in gradients]))
            else:
                self._info.add(info, sum([gradient.num_samples for gradient in gradients]))
        totals = self._totals()
        with self._lock:
            self._rates.add(totals)

    def _totals(self) -> tuple[int, ...]:
        return (*self.tree_ledger.collected_and_consumed(), self.counters.updates)

    def skip(self, gradients: Sequence[Gradients]) -> None:
        """Record that no update was made from these gradients, because their mean is not finite.

        Raises:
            NonFiniteUpdateError: More than five updates in a row were skipped. The ledger is updated first.
        """
        for gradient in gradients:
            self.drop(gradient, DropReason.NAN)
        with self._lock:
            self.last_info = {}
            self.counters.updates_skipped_nan += 1
            self.counters.samples_skipped_nan += sum(gradient.num_samples for gradient in gradients)
            self._nan_policy.skipped(
                [gradient.fault for gradient in gradients if gradient.fault], self.counters.updates,
                is_first=self.counters.updates_skipped_nan == 1)

    def drop(self, gradients: Gradients, reason: DropReason) -> None:
        """Record that a gradient will not be applied."""
        self.tree_ledger.drop(gradients.num_new_samples, reason)
        with self._lock:
            self.counters.grads_held -= 1
            self.counters.grads_dropped += 1

    def empty(self, gradients: Gradients) -> None:
        """Record a gradient that is not used for an update, because it has no samples to learn from."""
        self.tree_ledger.consume(gradients.num_new_samples, gradients.num_samples)
        with self._lock:
            self.counters.grads_held -= 1
            self.counters.grads_empty += 1
            self._empty_in_a_row += 1

    def check_not_empty(self) -> None:
        """Raise `CollectionError` if ten thousand gradients in a row had no sample to learn from."""
        if self._empty_in_a_row >= _MAX_EMPTY_IN_A_ROW:
            raise CollectionError(
                f"{self._empty_in_a_row} gradients in a row had no sample to learn from, so no update is made; check "
                "that agents whose policies learn (trainable) act in the environment")

    # Times

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Return a context manager that times a part of the update worker's work; see `timing.PARTS`.

        Only the thread that makes updates may call this method.
        """
        return self._times.timed(part)

    def _add_time(self, name: str, seconds: float) -> None:
        with self._lock:
            self._times.add_part(name, seconds)

    def add_step_s(self, seconds: float) -> None:
        """Record the seconds that one whole update took, including its waits."""
        with self._lock:
            self._times.add_step(seconds)

    def add_send_s(self, seconds: float) -> None:
        """Add `seconds` to the transit time of requests and gradients, which is a total over all workers."""
        with self._lock:
            self._times.add_seconds({"gradients": {"send": seconds}})

    # Checkpoints

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint, without the ledgers that live gradient workers save themselves."""
        self.request_report()
        with self._lock:
            counts = {name: getattr(self.counters, name) for name in _SAVED_COUNTS}
            return {**self.tree_ledger.state(), "counts": counts, "lags": self._lags.state()}

    def restore(self, state: StateDict, ledgers: Mapping[int, LedgerSnapshot]) -> None:
        """Restore a saved state. Counters and times that are not saved start at 0.

        Args:
            state: The result of `state` in the earlier run.
            ledgers: The saved ledgers of gradient workers, by index.
        """
        own, lost = (LedgerSnapshot.from_saved(**state[name]) for name in ("own", "lost"))
        self.tree_ledger.restore(own, lost, ledgers)
        with self._lock:
            for name in _SAVED_COUNTS:
                setattr(self.counters, name, saved_int(state["counts"][name]))
            self._lags.restore(state["lags"])
        totals = self._totals()
        with self._lock:
            self._rates.restart(totals)

    # Reading

    @property
    def updates(self) -> int:
        """Number of updates made, which is the version of the parameters."""
        return self.counters.updates

    @property
    def new_updates(self) -> int:
        """Number of updates since the last call of `take_info`."""
        return self._new_updates

    def take_info(self) -> tuple[int, dict[str, float]]:
        """Return the number of updates since the last call, and the algorithm's mean statistics over these updates."""
        with self._lock:
            updates, self._new_updates = self._new_updates, 0
            return updates, self._info.take()

    def add_journal_part(self, part: WorkersPart | None) -> None:
        """Store the part of a worker's journal (its recorded order of events) that arrived with a message."""
        if part is not None:
            self._journal_parts.append(part)

    def take_journal_parts(self) -> list[WorkersPart]:
        """Return the parts of workers' journals (recorded orders of events) that arrived since the last call."""
        parts, self._journal_parts = self._journal_parts, []
        return parts

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call, at most the latest 10,000."""
        if self._reads_local:
            self._episodes.extend(self.local_episodes())
        with self._lock:
            episodes = list(self._episodes)
            self._episodes.clear()
            return episodes

    def metrics(self) -> MetricsDict:
        """Return counters, lags, rates and times by name, as JSON-serializable values."""
        self.request_report()
        ledger = self.tree_ledger.total()
        with self._lock:
            own, workers = self.counters, WorkerCounters.merge(self._workers.values())
            latest = {worker: counters for (worker, _), counters in sorted(self._workers.items())}
            time_s = self._times.seconds(sum(counters.num_collectors for counters in latest.values()), len(latest))
            grad_s = time_s["gradients"]["grad"]
            collect_s = sum(time_s["collection"].values()) - time_s["collection"]["send"] - time_s["collection"]["idle"]
            return {
                "updates": own.updates, "updates_skipped_nan": own.updates_skipped_nan,
                "samples_skipped_nan": own.samples_skipped_nan,
                "grads_received": own.grads_received, "grads_applied": own.grads_applied,
                "grads_held": own.grads_held, "grads_dropped": own.grads_dropped, "grads_empty": own.grads_empty,
                "grads_late": own.grads_late,
                "grads_by_worker": {str(worker): n for worker, n in sorted(self._grads_by_worker.items())},
                "weight_pushes": workers.weight_pushes + own.weight_pushes,
                **self._levels(latest),
                "workers_restarted": workers.restarts + own.restarts_by_worker.total(),
                "envs_restarted": workers.envs_restarted,
                "episodes_approximated": workers.episodes_approximated, "regroups": own.regroups,
                "backward_passes": workers.backward_passes,
                **{f"agent_steps/{policy}": steps for policy, steps in sorted(workers.agent_steps.items())},
                "microbatch_steps": workers.microbatch_steps,
                "by_worker": self._by_worker(),
                **self._inference(workers),
                "rollouts": workers.rollouts, "rollouts_preempted": workers.preempted, **self._preemption(workers),
                "bytes_in": workers.bytes_sent, "bytes_in_raw": workers.bytes_raw,
                "bytes_out": workers.bytes_out + own.bytes_out,
                "queue": self._queue_levels.stats(),
                "dropped_train_batches": workers.dropped_train_batches, "passes_cancelled": workers.passes_cancelled,
                "replay_batches_dropped": workers.replay_batches_dropped, "stale_priorities": workers.stale_priorities,
                "replay_ratio": ledger.consumed / ledger.collected if ledger.collected else None,
                **self._lags.metrics(), **self._rates.metrics(),
                "collect_peak_steps_per_s": workers.collected_in_use / collect_s if collect_s else None,
                "grad_peak_steps_per_s": self.tree_ledger.consumed_since_start / grad_s if grad_s else None,
                "time_s": time_s, **self._times.metrics(),
                **metrics_of([*self._traffic.values(), self.traffic]),
                **{f"shard/{place}/{name}": value for place, shard in self._named_shards()
                   for name, value in shard.items()},
            }

    def _levels(self, latest: Mapping[int, WorkerCounters]) -> dict[str, int]:
        """Return the current numbers of workers, missing workers, queued batches and pending requests.

        The numbers come from the latest message of each gradient worker. If a gradient worker is lost, its collection
        workers and shards count as missing, too.
        """
        absent = {index + 1 for index in tuple(self.missing)}
        present = WorkerCounters.merge(counters for worker, counters in latest.items() if worker not in absent)
        lost = WorkerCounters.merge(counters for worker, counters in latest.items() if worker in absent)
        return {
            "workers": self.num_workers + present.workers + lost.workers,
            "workers_missing": len(absent) + present.workers_missing + lost.workers,
            "queue_size": present.queued_batches, "queue_peak": present.queue_peak,
            "requests_in_flight": present.requests_in_flight,
            "draws_in_flight": present.draws_in_flight,
        }

    def _by_worker(self) -> list[dict[str, object]]:
        """Return a row of counts for each gradient worker, followed by a row for each of its collection workers.

        The result is a list, which is not written to TensorBoard; a mapping would add several curves for each worker.
        """
        env_steps: Counter[tuple[int, int]] = Counter()  # key: gradient worker and collection worker
        restarts: Counter[tuple[int, int]] = Counter()
        for (parent, _), counters in self._workers.items():
            for worker, steps in counters.env_steps_by_worker.items():
                env_steps[parent, worker] += steps
            for worker, count in counters.restarts_by_worker.items():
                restarts[parent, worker] += count
        rows: list[dict[str, object]] = []
        for parent in sorted({parent for parent, _ in self._workers}):
            rows.append({"worker": gradient_worker(parent), "gradients": self._grads_by_worker[parent],
                         "restarts": self.counters.restarts_by_worker[parent]})
            rows += [{"worker": collection_worker(*place), "env_steps": env_steps[place], "restarts": restarts[place],
                      "policy_lag": self._lags.of_worker(*place)}
                     for place in sorted({*env_steps, *restarts}) if place[0] == parent]
        return rows

    def _inference(self, workers: WorkerCounters) -> dict[str, float | None]:
        """Return statistics of central inference, which chooses the actions of several environments as a batch.

        They are the mean number of environments in a batch, and the mean lag of the actor's weights in updates.
        """
        number = workers.inference_batches
        return {"inference_batch_mean": workers.inference_rows / number if number else None,
                "inference_lag_mean": workers.inference_lag / number if number else None}

    def _preemption(self, workers: WorkerCounters) -> dict[str, object]:
        """Return statistics of preempted rollouts, and episode lengths in preempted and in full rollouts."""
        by_worker: Counter[tuple[int, int]] = Counter()  # key: gradient worker and collection worker
        for (parent, _), counters in self._workers.items():
            for worker, count in counters.preempted_by_worker.items():
                by_worker[parent, worker] += count
        steps = workers.collected_in_use
        return {
            "preempted_by_worker": {
                collection_worker(parent, worker): n for (parent, worker), n in sorted(by_worker.items())},
            "preempted_steps_share": workers.preempted_steps / steps if steps else None,
            "episode_length_preempted":
                workers.preempted_episode_steps / workers.preempted_episodes if workers.preempted_episodes else None,
            "episode_length_full":
                workers.full_episode_steps / workers.full_episodes if workers.full_episodes else None,
        }

    def _named_shards(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return (name, statistics) of each shard.

        The name is the shard's index, such as "2". If several gradient workers have shards, the name begins with the
        gradient worker's number, as in "1.2".
        """
        places = [(worker, index, shard) for worker, shards in sorted(self._shards.items())
                  for index, shard in enumerate(shards, start=1)]
        several = len({worker for worker, *_ in places}) > 1
        return [(f"{worker}.{index}" if several else str(index), shard) for worker, index, shard in places]
