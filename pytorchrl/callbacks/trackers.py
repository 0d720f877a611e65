"""Callbacks that send records to experiment trackers; each tracker is imported when the run starts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from pytorchrl.callbacks.base import Callback, TrainingRun
from pytorchrl.callbacks.shipped import numbers_of
from pytorchrl.errors import ConfigError, install_hint
from pytorchrl.files.run_directory import RUN_FILE
from pytorchrl.monitor.reading import read_object


def imported(package: str, extra: str) -> ModuleType:
    """Import an optional package; if it is missing, raise `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"this callback needs the extra `{extra}`: {install_hint(extra)}") from error


def settings_of(run: TrainingRun) -> dict[str, object]:
    """Return the contents of the run's `run.json`; empty if no files are written."""
    return {} if run.log_dir is None else read_object(run.log_dir / RUN_FILE)


class _WandbRun(Protocol):
    """The interface of a run of Weights & Biases."""

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Record numbers by name."""

    def finish(self) -> None:
        """Finish the run."""


class WandbLog(Callback):
    """Send the run's metrics to Weights & Biases (extra `wandb`); wandb's `step` is the number of env steps so far.

    Args:
        **settings: Arguments of `wandb.init`, such as `project` and `mode="offline"`.
    """

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._run: _WandbRun | None = None

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if the package `wandb` is not installed."""
        imported("wandb", "wandb")

    def on_start(self, run: TrainingRun) -> None:
        """Start a run in the tracker, which also receives the contents of `run.json`."""
        self._run = imported("wandb", "wandb").init(config=settings_of(run), **self._settings)

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Send the numbers of a record to the tracker."""
        assert self._run is not None, "there is no record before the start"
        self._run.log(numbers_of(record), step=run.env_steps)
        return None

    def on_end(self, run: TrainingRun, summary: Mapping[str, object]) -> None:
        """Finish the run in the tracker."""
        if self._run is not None:
            self._run.finish()


class MlflowLog(Callback):
    """Send the run's metrics to MLflow (extra `mlflow`); MLflow's `step` is the number of env steps so far.

    Args:
        experiment: Name of the experiment; None: MLflow's current experiment.
        **settings: Arguments of `mlflow.start_run`, such as `run_name`.
    """

    def __init__(self, experiment: str | None = None, **settings: object) -> None:
        self._experiment, self._settings = experiment, settings
        self._mlflow: ModuleType | None = None

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if the package `mlflow` is not installed."""
        imported("mlflow", "mlflow")

    def on_start(self, run: TrainingRun) -> None:
        """Start a run in the tracker, which also receives the contents of `run.json`."""
        self._mlflow = mlflow = imported("mlflow", "mlflow")
        if self._experiment is not None:
            mlflow.set_experiment(self._experiment)
        mlflow.start_run(**self._settings)
        if settings := settings_of(run):
            mlflow.log_dict(settings, RUN_FILE)

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Send the numbers of a record to the tracker."""
        assert self._mlflow is not None, "there is no record before the start"
        self._mlflow.log_metrics(numbers_of(record), step=run.env_steps)
        return None

    def on_error(self, run: TrainingRun, error: BaseException) -> None:
        """Mark the run in the tracker as failed."""
        if self._mlflow is not None:
            self._mlflow.end_run(status="FAILED")

    def on_end(self, run: TrainingRun, summary: Mapping[str, object]) -> None:
        """Finish the run in the tracker."""
        if self._mlflow is not None and self._mlflow.active_run() is not None:
            self._mlflow.end_run()
