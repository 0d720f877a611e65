"""Count the steps that are missing from preempted rollouts."""

from __future__ import annotations

from pytorchrl.scheme.transport.messages import RolloutHeader


class OwedSteps:
    """Count the steps that each worker owes because its latest rollout was preempted.

    In the next round, a worker first collects the steps that it owes, in an additional rollout that cannot be
    preempted. Over many rounds, all workers therefore collect equally many steps.

    Args:
        rollout_size: Number of steps of the vector environment in a full rollout.
        is_kept: Whether workers must collect missing steps later; if not, preempted rollouts remain short.
    """

    def __init__(self, rollout_size: int, is_kept: bool) -> None:
        self._rollout_size, self._is_kept = rollout_size, is_kept
        self._owed: dict[int, int] = {}

    def of(self, index: int) -> int | None:
        """Return the number of steps that a worker must still collect; None if there are none."""
        return self._owed.get(index)

    def receive(self, index: int, header: RolloutHeader) -> bool:
        """Record a rollout; return whether it contains the steps that were missing from the worker's previous rollout.

        Such a rollout cannot be preempted, so the worker owes nothing afterwards. Only `CWorker.interrupt` can
        shorten such a rollout, and an interrupted worker takes no more steps.
        """
        is_rest = self._owed.pop(index, None) is not None
        if self._is_kept and header.preempted and not is_rest:
            self._owed[index] = self._rollout_size - header.num_steps
        return is_rest

    def cancel(self, first: int = 0) -> None:
        """Forget the owed steps of all workers with an index of at least `first`."""
        self._owed = {index: steps for index, steps in self._owed.items() if index < first}
