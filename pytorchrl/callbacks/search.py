"""Report the results of a run to Optuna or Ray Tune, which search for hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pytorchrl.callbacks.base import Callback, TrainingRun
from pytorchrl.callbacks.shipped import numbers_of
from pytorchrl.support.code import import_extra


class Trial(Protocol):
    """The methods of an `optuna.Trial` that `OptunaPruning` calls."""

    def report(self, value: float, step: int) -> None:
        """Record an intermediate value."""

    def should_prune(self) -> bool:
        """Return whether the trial should end early."""


class OptunaPruning(Callback):
    """Report the mean return of the training episodes to an Optuna trial, and stop the run if the trial is pruned.

    Call `raise_if_pruned` after training. The `step` of each report is the number of env steps. This callback needs the
    extra `optuna`.

    Args:
        trial: The `optuna.Trial`.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._reported = -1
        self.pruned = False
        """Whether the trial was pruned."""

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Report the mean return to the trial, and request a stop if the trial is pruned."""
        if run.return_mean is not None and run.env_steps > self._reported:
            self._reported = run.env_steps
            self._trial.report(run.return_mean, run.env_steps)
            if self._trial.should_prune():
                self.pruned = True
                run.request_stop("Optuna pruned the trial")
        return None

    def raise_if_pruned(self) -> None:
        """Raise `optuna.TrialPruned` if the trial was pruned, so that Optuna does not count the run as completed."""
        if self.pruned:
            raise import_extra("optuna", "optuna", "this callback").TrialPruned


class TuneReport(Callback):
    """Report the numbers of each record to Ray Tune (extra `tune`).

    Create the callback inside the function that Tune runs.
    """

    def __init__(self) -> None:
        self._report: Callable[[dict[str, float]], None] = lambda metrics: None

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if Ray Tune is not installed."""
        self._report = import_extra("ray.tune", "tune", "this callback").report

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Report the numbers of a record to Ray Tune; do nothing before the end of the first training episode."""
        if run.return_mean is not None:
            self._report(numbers_of(record))
        return None
