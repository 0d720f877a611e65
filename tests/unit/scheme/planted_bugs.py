"""Bugs to plant into the package, of which the ledger is not told; a `Witness` must find each of them."""

from __future__ import annotations

from dataclasses import replace

from pytorchrl.errors import WorkerDiedError
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.strategies import OnArrival, _RemoteCollection
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.process_group import ProcessGroup
from pytorchrl.scheme.gradients.sample_queue import SampleQueue
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.transport.requests import Requests
from pytorchrl.scheme.updates import asynchronous
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates
from pytorchrl.scheme.updates.lags import Lags
from pytorchrl.scheme.updates.remote import RemoteUpdates
from pytorchrl.scheme.updates.strategy import PendingMoments
from pytorchrl.scheme.updates.tree_ledger import TreeLedger
from pytorchrl.scheme.updates.u_worker import UWorker


def steps_lost_before_they_are_booked(monkeypatch):
    """Plant a bug: a rollout that is interrupted loses its steps before the worker counts them."""
    right = CWorker._fill_storage

    def fill_storage(self, watch, num_steps):
        found = right(self, watch, num_steps)
        if self._interrupted and self.storage.num_steps:
            self.storage.get_all_buffer_data()
        return found
    monkeypatch.setattr(CWorker, "_fill_storage", fill_storage)


def steps_of_a_hung_worker_booked_twice(monkeypatch):
    right = CollectorThread.close

    def close(self, timeout_s):
        gone, self.supervisor.gone = self.supervisor.gone, set()
        right(self, timeout_s)
        self.supervisor.gone = gone
    monkeypatch.setattr(CollectorThread, "close", close)


def a_late_answer_that_is_used(monkeypatch):
    """Plant a bug: the answer of a worker that was given up because it hung is used if it arrives nevertheless."""
    right = Requests._lose

    def lose(self, index, error):
        late = {} if isinstance(error, WorkerDiedError) else {
            future: owner for future, owner in self._open.items() if owner == index}
        right(self, index, error)
        self._open |= late
        if late:
            self._supervisor.called(index)
    monkeypatch.setattr(Requests, "_lose", lose)


def a_policy_lag_off_by_one(monkeypatch):
    right = WorkerStats.add_rollout

    def add_rollout(self, header, version_queued, version_used):
        right(self, header, version_queued, version_used + (version_queued < version_used))
    monkeypatch.setattr(WorkerStats, "add_rollout", add_rollout)


def a_gradient_lag_off_by_one(monkeypatch):
    right = Lags.apply
    monkeypatch.setattr(Lags, "apply", lambda self, gradients, version: right(
        self, gradients, version - (version > gradients.weights_version)))


def a_limit_of_lags_off_by_one(monkeypatch):
    right = SampleQueue._admit
    monkeypatch.setattr(SampleQueue, "_admit", lambda self, batch, oldest: right(self, batch, oldest - 1))


def a_replacement_without_weights(monkeypatch):
    def request_replacement(self, index):
        for _ in range(self._col_in_flight):
            self._request(index)
    monkeypatch.setattr(OnArrival, "_request_replacement", request_replacement)


def a_replacement_with_old_weights(monkeypatch):
    right = _RemoteCollection._request_from_new

    def request_from_new(self, index, num_requests):
        for _ in range(num_requests):
            if self._weights._sync.reference is not None:
                self._weights._attached[index] = self._weights._sync.reference
                self._weights._versions[index] = self._weights._sync.reference.version
                self._request(index)
            else:
                right(self, index, 1)
    monkeypatch.setattr(_RemoteCollection, "_request_from_new", request_from_new)


def a_gradient_worker_replaced_without_weights(monkeypatch):
    right = RemoteUpdates._on_lost

    def on_lost(self, index):
        version = self._versions[index]
        right(self, index)
        self._versions[index] = version
    monkeypatch.setattr(RemoteUpdates, "_on_lost", on_lost)


def a_rank_that_joins_without_the_state(monkeypatch):
    right = GWorker.join_group

    def join_group(self, meeting, place, state=None):
        right(self, meeting, place, None if self._incarnation else state)
    monkeypatch.setattr(GWorker, "join_group", join_group)


def weights_that_change_on_their_way(monkeypatch):
    right = CWorker.get_weights

    def get_weights(self):
        weights = right(self)
        return replace(weights, state={**weights.state, "count": self.algo.count.numpy()})
    monkeypatch.setattr(CWorker, "get_weights", get_weights)


def weights_older_than_their_version(monkeypatch):
    right = WeightBroadcast._attach

    def attach(self, due, only=None):
        right(self, due, only)
        for place, weights in enumerate(self._attached):
            older = getattr(self, "older", None)
            if weights is not None and older is not None and older.version == weights.version - 1:
                self._attached[place] = replace(older, version=weights.version)
        self.older = self._sync.reference
    monkeypatch.setattr(WeightBroadcast, "_attach", attach)


def a_gradient_applied_twice(monkeypatch):
    """Plant a bug: if further gradients are ready, an update is followed by another one from its first gradient."""
    right = AsynchronousUpdates._update

    def update(self):
        gradients, _ = next(iter(self._waiting.values()))
        right(self)
        if self._ready:
            self._local.apply_gradients(gradients.vectors)
    monkeypatch.setattr(AsynchronousUpdates, "_update", update)


def a_mean_without_weights(monkeypatch):
    right = asynchronous.mean_gradients
    monkeypatch.setattr(asynchronous, "mean_gradients", lambda gradients, factors=None: right(
        [replace(gradient, num_samples=1, samples={"": 1}) for gradient in gradients], factors))


def a_late_gradient_scaled_too_much(monkeypatch):
    right = AsynchronousUpdates.Options.factor

    def factor(self, lag):
        found = right(self, lag)
        return (1 + self.max_grad_lag) / (2 + lag) if 0.0 < found < 1.0 else found
    monkeypatch.setattr(AsynchronousUpdates.Options, "factor", factor)


def moments_of_a_lost_worker(monkeypatch):
    right = AsynchronousUpdates._on_replaced

    def on_replaced(self, index):
        kept = self._moments[index]
        right(self, index)
        self._moments[index] = kept
    monkeypatch.setattr(AsynchronousUpdates, "_on_replaced", on_replaced)


def moments_merged_twice(monkeypatch):
    def take(self):
        pending, self._pending = tuple(self._pending), self._pending[2:]
        return pending
    monkeypatch.setattr(PendingMoments, "take", take)


def moments_before_the_end_of_their_data(monkeypatch):
    right = AsynchronousUpdates._handle
    monkeypatch.setattr(AsynchronousUpdates, "_handle", lambda self, index, gradients: right(
        self, index, replace(gradients, last=True) if len(self._ready) else gradients))


def moments_that_ranks_do_not_share(monkeypatch):
    def shared(self, shares):
        own, self._unshared = self._unshared if shares else [], []
        self.share(False)
        return tuple(own)
    monkeypatch.setattr(ProcessGroup, "shared", shared)


def a_schedule_that_follows_received_steps(monkeypatch):
    right = TreeLedger.env_steps.fget
    monkeypatch.setattr(TreeLedger, "env_steps", property(lambda self: right(self) + self._own["in_flight"]))


def a_schedule_one_update_late(monkeypatch):
    right = UWorker._before_update

    def before_update(self):
        follow, earlier = self.local_worker.follow_schedules, getattr(self, "earlier", 0)
        self.local_worker.follow_schedules = lambda env_steps, target: follow(lambda: earlier, target)
        right(self)
        self.local_worker.follow_schedules, self.earlier = follow, self.statistics.tree_ledger.env_steps
    monkeypatch.setattr(UWorker, "_before_update", before_update)


def old_values_after_a_skipped_update(monkeypatch):
    monkeypatch.setattr(RemoteUpdates, "forget_weights", lambda self: None)


def gradients_in_another_order(monkeypatch):
    right = AsynchronousUpdates._take_ready

    def take_ready(self):
        right(self)
        self._ready.reverse()
    monkeypatch.setattr(AsynchronousUpdates, "_take_ready", take_ready)


def train_batches_in_another_order(monkeypatch):
    def fetch(self):
        if self.queue.empty():
            return None
        self.queue.queue.reverse()
        return self.queue.get_nowait()
    monkeypatch.setattr(SampleQueue, "_fetch", fetch)


BUGS = {
    steps_lost_before_they_are_booked: (0, "the ledger counts .* collected steps, not"),
    steps_of_a_hung_worker_booked_twice: (9, "the final ledger does not balance"),
    a_late_answer_that_is_used: (11, "the final ledger does not balance|the replacement .* acted with version"),
    a_policy_lag_off_by_one: (3, "reports the lags"),
    a_gradient_lag_off_by_one: (12, "the metrics have the mean grad_lag"),
    a_limit_of_lags_off_by_one: (18, "a rollout of lag .* was used, but the limit is"),
    a_replacement_without_weights: (177, "the replacement .* acted with version 0 instead of"),
    a_replacement_with_old_weights: (223, "was requested at version .* and made with version"),
    a_gradient_worker_replaced_without_weights: (0, "the replacement .* with version 0 instead of"),
    a_rank_that_joins_without_the_state: (1, "the replacement .* with version 0 instead of"),
    weights_that_change_on_their_way: (3, "acted with weights that the learner never had"),
    weights_older_than_their_version: (0, "was made with versions .* and reports"),
    a_gradient_applied_twice: (233, "was made twice|contain one that was applied before"),
    a_mean_without_weights: (7, "a gradient of .* samples and lag .* has the share"),
    a_late_gradient_scaled_too_much: (66, "a gradient of .* samples and lag .* has the share"),
    moments_of_a_lost_worker: (7, "an update merges the moments of the steps"),
    moments_merged_twice: (2, "the moments of steps are merged twice"),
    moments_before_the_end_of_their_data: (233, "merges the moments|reports the wrong end of a train batch"),
    moments_that_ranks_do_not_share: (3, "an update merges the moments of the steps"),
    a_schedule_that_follows_received_steps: (233, "the schedule's value is that of step"),
    a_schedule_one_update_late: (0, "the schedule's value is that of step"),
    old_values_after_a_skipped_update: (2, "the schedule's value|was asked for a gradient of the weights"),
    gradients_in_another_order: (233, "although gradient .* arrived before"),
    train_batches_in_another_order: (40, "were used in another order than they were made"),
}
"""Planted bug -> the first seed whose schedule shows it, and what the witness says."""
