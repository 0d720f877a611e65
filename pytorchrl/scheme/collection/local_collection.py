"""Collection by the local worker, in the learner's thread."""

from __future__ import annotations

from typing_extensions import override

from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.strategy import Deliver, RoundStrategy
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import copied


class LocalCollection(RoundStrategy):
    """Collection by the local worker, in the learner's thread and with the learner's own parameters.

    Args:
        local_worker: The local worker.
        ledger: The gradient worker's ledger.
        watch: Stopwatch that measures how long the delivery of rollouts takes.
        owed: Counter of the steps that a preempted rollout lacks and that must be collected later.
    """

    def __init__(self, local_worker: CWorker, ledger: Ledger, watch: Stopwatch, owed: OwedSteps) -> None:
        super().__init__(ledger, watch)
        self._local_worker, self._journal, self._owed = local_worker, local_worker.journal, owed

    @override
    def _collect(self) -> list[Rollout]:
        """Collect one rollout.

        If the previous rollout was preempted and must be finished, its missing steps are collected first. The result
        then begins with a rollout of these steps.
        """
        # The first rollout is copied, because the second rollout will overwrite its memory.
        rests = [copied(self._collect_one())] if self._owed.of(0) else []
        return [*rests, self._collect_one()]

    def _collect_one(self) -> Rollout:
        recorded = self._journal.upcoming_of("answer", 0)
        # If the recorded rollout was preempted, the replayed rollout must end at the same step.
        if recorded is not None and recorded[-1]:
            self._local_worker.preempt_next(recorded[-1])
        rollout = self._local_worker.collect(num_steps=self._owed.of(0))
        self._owed.receive(0, rollout.header)
        if self._journal.is_kept:
            self._journal.note("answer", 0, *rollout.numbers)
        return rollout

    @override
    def num_live(self) -> int:
        return 1

    @override
    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Forget the steps that a preempted rollout lacks, so that they are not collected later.

        `deliver` is not called, because no rollout is in flight.
        """
        self._owed.cancel()
