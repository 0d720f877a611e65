"""Synchronous updates: one gradient from every remote gradient worker, averaged into one update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from typing_extensions import override

from pytorchrl.runtime import Future, Handle
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.ledger import DropReason
from pytorchrl.scheme.transport.messages import Gradients, Moments, Weights
from pytorchrl.scheme.updates.averaging import mean_gradients, mean_info
from pytorchrl.scheme.updates.remote import Collaborators, RemoteUpdates
from pytorchrl.scheme.updates.strategy import PendingMoments, discard_empty, record_update

R = TypeVar("R")


class SynchronousUpdates(RemoteUpdates):
    """Strategy that averages one gradient from each remote gradient worker, and applies the mean as one update.

    Every update needs the gradients of all workers. If a worker is lost, its train batch is lost, too. The other
    workers then drop their train batches, so that all workers start again together with the replacement.

    Args:
        tree: The worker tree's components that the strategy uses.
    """

    def __init__(self, tree: Collaborators) -> None:
        super().__init__(tree)
        self._used_up, self._skip, self._was_lost = True, False, False
        self._pending = PendingMoments()

    def _on_lost(self, index: int) -> None:
        super()._on_lost(index)
        self._was_lost = True

    def _ask(self, submit: Callable[[Handle[GWorker], Weights | None], Future[R]]) -> list[R] | None:
        """Send a request to every worker, and return the answers in the order of the workers.

        If a worker is lost before all answers have arrived, the result is None.

        Args:
            submit: Function that submits the request to a worker. Its second argument is a reference to the newest
                weights, or None if the worker already has them.
        """
        self._was_lost = False
        for index, handle in enumerate(self._workers):
            if index not in self.supervisor.gone:
                self.in_flight.add(index, submit(handle, self._weights_for(index)))
        answers = self._gather_all()
        for answer in answers:
            if not isinstance(answer, Gradients):
                self._statistics.add_journal_part(answer[1])
        if not self._was_lost:
            return answers
        for answer in answers:
            if isinstance(answer, Gradients):
                self._statistics.receive(answer)
                self._statistics.drop(answer, DropReason.WORKER_LOST)
                self._pending.add([answer])
        self._used_up = self._skip = True
        return None

    def _ask_for_gradients(self) -> list[Gradients] | None:
        advantage_moments: list[Moments] | None = None
        if self._used_up and self._local.algo.advantage_normalization == "batch":
            prepared = self._ask(lambda handle, weights: handle.submit(
                GWorker.prepare, weights, skip_remaining=self._skip))
            if prepared is None:
                return None
            advantage_moments = [moments for moments, _ in prepared]
            self._skip = False
        return self._ask(lambda handle, weights: handle.submit(
            GWorker.collect_and_grad, weights, skip_remaining=self._skip, advantage_moments=advantage_moments))

    def drain(self, timeout_s: float) -> None:
        """Drain the workers (see `RemoteUpdates.drain`), so that the next step starts with new train batches."""
        super().drain(timeout_s)
        self._used_up, self._skip = True, False
        self._pending.discard()

    @property
    @override
    def is_between_train_batches(self) -> bool:
        return self._used_up

    def step(self) -> None:
        """Send weights, wait for all gradients, and apply their mean; repeat this if no gradient had samples."""
        while not self._step():
            pass

    def _step(self) -> bool:
        """Apply the mean of new gradients if it is finite; return False if no gradient had samples."""
        gradients = None
        while gradients is None:
            gradients = self._ask_for_gradients()
        for gradient in gradients:
            self._statistics.receive(gradient)
        self._pending.add(gradients)
        if all(gradient.is_empty for gradient in gradients):
            discard_empty(self._statistics, gradients)
            self._used_up, self._skip = gradients[0].last, False
            return False
        info, version = mean_info(gradients), self._local.actor_version
        # All workers skip the remaining passes, or none does: the decision is made once, from the mean statistics.
        self._skip = bool(info.get("skip_remaining")) and self._local.algo.skip_remaining(info)
        self._used_up = self._skip or gradients[0].last
        moments = self._pending.take() if self._used_up else ()
        with self._statistics.timed("decode"):
            mean = mean_gradients([gradient for gradient in gradients if not gradient.is_empty])
        with self._statistics.timed("apply"):
            applied = self._local.apply_gradients(mean, moments=moments)
        if applied is None:
            self.forget_weights()  # the version is the same, but normalizers and scheduled parameters have changed
        record_update(self._statistics, discard_empty(self._statistics, gradients), version, info, applied)
        return True
