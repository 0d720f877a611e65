"""Account of the steps by which preempted rollouts were too short."""

from __future__ import annotations

from pytorchrl.scheme.transport.messages import Rollout


class OwedSteps:
    """Steps that each worker still has to collect, because its latest rollout was preempted.

    In the next round, a worker first collects the steps that it owes, in a rollout of its own that cannot be preempted.
    After n rounds, each worker has therefore collected n full rollouts, except for the steps that it owes.

    Args:
        rollout_size: Number of steps of the vector of environments in a full rollout.
        is_kept: Whether workers owe steps; if not, preempted rollouts remain short.
    """

    def __init__(self, rollout_size: int, is_kept: bool) -> None:
        self._rollout_size, self._is_kept = rollout_size, is_kept
        self._owed: dict[int, int] = {}

    def of(self, index: int) -> int | None:
        """Return the number of steps that a worker owes; None if it owes nothing."""
        return self._owed.get(index)

    def receive(self, index: int, rollout: Rollout) -> bool:
        """Record a rollout; return whether it is the rest of the worker's previous rollout."""
        is_rest = self._owed.pop(index, None) is not None
        if self._is_kept and rollout.preempted:
            self._owed[index] = self._rollout_size - rollout.num_steps
        return is_rest

    def cancel(self, first: int = 0) -> None:
        """Cancel the owed steps of the workers from index `first` on."""
        self._owed = {index: steps for index, steps in self._owed.items() if index < first}
