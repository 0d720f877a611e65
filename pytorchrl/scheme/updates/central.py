"""Central updates: the local gradient worker computes each gradient and applies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.transport.messages import WholeState
from pytorchrl.scheme.updates.statistics import Statistics
from pytorchrl.scheme.updates.strategy import (
    PendingMoments,
    UpdateStrategy,
    WorkerState,
    discard_empty,
    record_update,
)


class CentralUpdates(UpdateStrategy):
    """The strategy that computes each gradient in the local gradient worker, and applies it there.

    Args:
        local_worker: The local gradient worker.
        statistics: The object that records the updates.
        in_thread: Whether a separate thread makes the updates. In this case, the worker attaches a report of its
            statistics to each gradient. Otherwise, `statistics` itself requests reports from the worker.
    """

    def __init__(self, local_worker: GWorker, statistics: Statistics, *, in_thread: bool = False) -> None:
        self._local, self._statistics, self._with_report = local_worker, statistics, in_thread
        if not in_thread:
            statistics.local_report, statistics.local_episodes = local_worker.report, local_worker.stats.take_episodes
        local_worker.algo.applies_at_once = True
        self._pending = PendingMoments()
        self._num_drains = 0
        self._is_between_train_batches = True

    @property
    @override
    def is_between_train_batches(self) -> bool:
        return self._is_between_train_batches

    def step(self) -> None:
        """Try to make an update: compute gradients until one is not empty, or until a drain ends the data."""
        while not self.is_used_up and not self._step() and not self._local.is_draining:
            pass

    def _step(self) -> bool:
        """Compute one gradient, and apply it if it is finite; return False if it is empty (`Gradients.is_empty`)."""
        with self._statistics.timed("wait"):
            gradients = self._local.collect_and_grad(with_report=self._with_report)
        self._statistics.receive(gradients)
        if not discard_empty(self._statistics, [gradients]):
            return False
        version, skip = self._local.actor_version, bool(gradients.info.get("skip_remaining"))
        self._is_between_train_batches = gradients.last or skip
        self._pending.add([gradients])
        moments = self._pending.take() if self._is_between_train_batches else ()
        with self._statistics.timed("apply"):
            applied = self._local.apply_gradients(gradients.vectors, moments=moments)
        record_update(self._statistics, [gradients], version, gradients.info, applied)
        if skip:
            self._local.skip_remaining()
        return True

    @override
    def finish_collection(self) -> bool:
        return self._local.finish_collection()

    @property
    @override
    def is_used_up(self) -> bool:
        return self._local.is_used_up

    @override
    def prepare_drain(self) -> None:
        self._local.announce_drain(self._num_drains + 1)

    @override
    def drain(self, timeout_s: float) -> None:
        self._num_drains += 1
        self._statistics.tree_ledger.report(0, *self._local.drain(self._num_drains, timeout_s))
        self._pending.discard()
        self._is_between_train_batches = True

    @override
    def state(self) -> tuple[WholeState, list[WorkerState | None]]:
        return self._local.whole_state(), [self._local.state()]

    @override
    def restore(self, whole: WholeState, workers: Sequence[WorkerState | None]) -> None:
        self._local.local_worker.load_whole_state(whole)
        for state in workers:
            if state is not None:
                self._local.restore(state)

    @override
    def reseed(self, seed: int) -> None:
        self._local.reseed(seed)

    @override
    def resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None) -> None:
        self._local.resize(num_col_workers, resources)
