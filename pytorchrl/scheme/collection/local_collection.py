"""Collection by the local worker, in the learner's thread."""

from __future__ import annotations

from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.protocols import Deliver
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import copied


class LocalCollection:
    """Collection by the local worker, in the learner's thread and with the learner's own parameters.

    Args:
        local_worker: The local worker.
        ledger: The gradient worker's ledger.
        watch: Stopwatch that measures how long the delivery of rollouts takes.
        owed: Counter of the steps that a preempted rollout lacks and that must be collected later.
    """

    def __init__(self, local_worker: CWorker, ledger: Ledger, watch: Stopwatch, owed: OwedSteps) -> None:
        self._local_worker, self._journal, self._ledger = local_worker, local_worker.journal, ledger
        self._watch = watch  # measures the delivery of rollouts ("receive"), including waits for queue space
        self._owed = owed
        self.delivered_by_lost = 0

    def step(self, deliver: Deliver) -> None:
        """Collect rollouts as `collect` does, and pass them to `deliver`."""
        rollouts = self._collect()
        with self._watch.part("receive"):
            if valid := self._book(rollouts):
                deliver(valid)

    def collect(self) -> list[Rollout]:
        """Collect one rollout; return a list that contains the rollout if it has at least one valid step.

        If the previous rollout was preempted and must be finished, its missing steps are collected first. The list then
        begins with a rollout of these steps.
        """
        rollouts = self._collect()
        with self._watch.part("receive"):
            return self._book(rollouts)

    def _collect(self) -> list[Rollout]:
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

    def _book(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Count the steps of rollouts in the ledger, and return the rollouts that contain valid steps."""
        self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts))
        return [rollout for rollout in rollouts if rollout.header.num_env_steps]

    def request_ahead(self, num_steps: int) -> None:
        """Do nothing, because the local worker collects in the learner's thread."""

    def num_live(self) -> int:
        """Return 1, for the local worker."""
        return 1

    def num_in_flight(self) -> int:
        """Return 0, because no rollout is in flight between two calls of `step`."""
        return 0

    def take_send_s(self) -> float:
        """Return 0, because rollouts are not sent to another process."""
        return 0.0

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Forget the steps that a preempted rollout lacks, so that they are not collected later.

        `deliver` is not called, because no rollout is in flight.
        """
        self._owed.cancel()

    def finish(self, timeout_s: float) -> None:
        """Do nothing, because no rollout is in flight between two calls of `step`."""
