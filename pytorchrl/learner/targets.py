"""Decide when a run is done, and when its records, evaluations and checkpoints are due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pytorchrl.learner.reporting import next_multiple
from pytorchrl.scheme import Scheme
from pytorchrl.support.untyped import MetricsDict

_RECORDS_PER_RUN = 200


class Target:
    """Condition for the end of a run: `env_steps` env steps have reached the learner.

    If collection and learning take turns, the run also completes all passes over the last rollout before it ends.

    Args:
        scheme: The scheme of the run.
        env_steps: The number of env steps.
    """

    def __init__(self, scheme: Scheme, env_steps: int) -> None:
        self.env_steps = env_steps
        settings = scheme.settings
        self.takes_turns: bool = settings["col_communication"] == settings["grad_communication"] == "synchronous"
        self._passes = _passes_of(scheme)
        self._last_collected: float = float("inf")

    def count(self, collected: int) -> None:
        """Record the number of env steps collected so far.

        The run must learn from all rollouts up to the one that reaches the target. If collection and learning take
        turns, the next rollout begins only after that. So the run is done once more steps are collected than there were
        when the target was reached, and this number of steps is stored.
        """
        if collected >= self.env_steps:
            self._last_collected = min(self._last_collected, collected)

    def is_reached(self, env_steps: int, ledger: MetricsDict, num_skipped: float) -> bool:
        """Return whether the run is done.

        Args:
            env_steps: Env steps that have reached the learner.
            ledger: The scheme's counts of env steps, from which `env_steps` was computed.
            num_skipped: Number of samples whose update was skipped (NaN or infinity). Such samples count as consumed.
        """
        if env_steps < self.env_steps:
            return False
        if not self.takes_turns or self.env_steps == 0:
            return True
        passed, steps = ledger["consumed"] + num_skipped, ledger["consumed_unique"] + ledger["dropped"]["nan"]
        is_used_up = ledger["collected"] == env_steps and passed >= self._passes * steps
        return is_used_up or ledger["collected"] > self._last_collected


def _passes_of(scheme: Scheme) -> int:
    """Return the minimum number of passes over a rollout: `num_epochs`; 1 if `target_kl` may stop passes early."""
    options = scheme.agent.algo_factory.options
    return 1 if getattr(options, "target_kl", None) is not None else getattr(options, "num_epochs", 1)


class Due:
    """The env steps at which the next events (record, evaluation and checkpoint) are due.

    Args:
        target_steps: Env steps of the run.
        log_every: Env steps between two records; None: 200 records per run.
        eval_every: Env steps between two evaluations; None: never.
        checkpoint_every: Env steps between two checkpoints; None: never.
        log_every_s: Longest time between two records in seconds; None: no limit.
        now: Function that returns the time in seconds.
    """

    def __init__(
        self, target_steps: int, log_every: int | None, eval_every: int | None, checkpoint_every: int | None,
        log_every_s: float | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_every_s, self._now = log_every_s or math.inf, now
        self._recorded_at = now()
        self._target_steps, self._eval_every, self._checkpoint_every = target_steps, eval_every, checkpoint_every
        self._record_every = log_every or max(1, target_steps // _RECORDS_PER_RUN)
        self.recorded_steps = 0
        """Env steps at the last record."""
        self.record = float(self._record_every)
        self.evaluation = next_multiple(eval_every, 0)
        self.checkpoint = next_multiple(checkpoint_every, 0)
        self.first = 0.0
        """The smallest number of env steps at which anything is due."""
        self._plan()

    def resume(self, env_steps: int, recorded_steps: int) -> None:
        """Plan the next events of a run that resumes at `env_steps` and whose last record is at `recorded_steps`."""
        self.evaluation = next_multiple(self._eval_every, env_steps)
        self.checkpoint = next_multiple(self._checkpoint_every, env_steps)
        self.after_record(recorded_steps)

    def is_record(self, env_steps: int) -> bool:
        """Return whether a record is due: enough env steps or seconds have passed since the last record."""
        return env_steps >= self.record or (
            env_steps > self.recorded_steps and self._now() - self._recorded_at >= self._log_every_s)

    def after_record(self, env_steps: int) -> None:
        """Plan the next record after a record at `env_steps`."""
        self._recorded_at = self._now()
        self.recorded_steps = env_steps
        self.record = env_steps + float(self._record_every)
        self._plan()

    def after_evaluation(self, env_steps: int) -> None:
        """Plan the next evaluation after an evaluation that was started or skipped at `env_steps`."""
        self.evaluation = next_multiple(self._eval_every, env_steps)
        self._plan()

    def after_checkpoint(self, env_steps: int) -> None:
        """Plan the next checkpoint after a checkpoint at `env_steps`."""
        self.checkpoint = next_multiple(self._checkpoint_every, env_steps)
        self._plan()

    def _plan(self) -> None:
        self.first = min(self.record, self.evaluation, self.checkpoint, self._target_steps)
