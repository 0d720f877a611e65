"""Callbacks that send records to experiment trackers; each tracker is imported when the run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from pytorchrl.callbacks.base import Callback, TrainingRun
from pytorchrl.callbacks.shipped import numbers_of
from pytorchrl.files.reading import mapping
from pytorchrl.files.run_directory import RUN_FILE
from pytorchrl.support.code import import_extra

# Some versions of MLflow accept at most this many parameters in one call, and characters in one value.
_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 500


def name_of(run: TrainingRun) -> str:
    """Return the name of a run: that of its directory, or its algorithm, environment and seed."""
    if run.log_dir is not None:
        return run.log_dir.resolve().name
    found = parameters_of(run)
    return f"{found['algorithm']}-{found['env']}-seed={found['seed']}"


def parameters_of(run: TrainingRun) -> dict[str, object]:
    """Return all options of a run, by name.

    Options of the agent's parts, the scheme and the learner have the names that they have there. If several parts have
    different values for an option, the later names contain the part, as in `test_envs_factory/vec_env_size`.
    """
    described = run.description
    recipe, agent = mapping(described["recipe"]), mapping(described["agent"])
    algorithm, envs = mapping(agent["algo_factory"]), mapping(mapping(agent["train_envs_factory"])["options"])
    found = {"algorithm": recipe.get("algorithm") or str(algorithm.get("__factory__")).rpartition(":")[2].lower(),
             "env": recipe.get("env") or _code_name(envs["env_fn"]), "seed": described["seed"],
             "target_steps": described["target_steps"]}
    parts = {**{name: mapping(mapping(part)["options"]) for name, part in agent.items()},
             "scheme": mapping(described["scheme"]), "learner": mapping(described["learner"])}
    for part, options in parts.items():
        for name, value in options.items():
            if name != "env_fn" and found.get(name, value) != value:
                found[f"{part}/{name}"] = value
            elif name != "env_fn":
                found[name] = value
    return found


def _code_name(value: object) -> str:
    """Return the name of an environment's function in a description."""
    return str(value.get("__code__", value) if isinstance(value, Mapping) else value).rpartition(":")[2]


class _WandbRun(Protocol):
    """The interface of a run of Weights & Biases."""

    def define_metric(self, name: str, *, step_metric: str) -> None:
        """Draw the numbers whose names match `name` over another number."""

    def log(self, numbers: Mapping[str, float]) -> None:
        """Record numbers by name."""

    def finish(self, *, exit_code: int) -> None:
        """Finish the run; a code other than 0 means that it failed."""


class WandbLog(Callback):
    """Send the run's metrics to Weights & Biases (extra `wandb`), which draws them over `env_steps`.

    wandb's own `step` counts the records. A run that resumes from a checkpoint returns to fewer env steps than it has
    sent, and wandb would drop records with a smaller `step`.

    Args:
        **settings: Arguments of `wandb.init`, such as `project`, `mode="offline"`, and `id` with `resume="must"`.
    """

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._run: _WandbRun | None = None

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if the package `wandb` is not installed."""
        import_extra("wandb", "wandb", "this callback")

    def on_start(self, run: TrainingRun) -> None:
        """Start a run in the tracker, which receives all options, and has the name of the run."""
        self._run = import_extra("wandb", "wandb", "this callback").init(
            **{"config": parameters_of(run), "name": name_of(run), **self._settings})
        self._run.define_metric("*", step_metric="env_steps")

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Send the numbers of a record to the tracker."""
        assert self._run is not None, "there is no record before the start"
        self._run.log(numbers_of(record))
        return None

    def on_error(self, run: TrainingRun, error: BaseException) -> None:
        """Finish the run in the tracker as failed."""
        self._finish(1)

    def on_end(self, run: TrainingRun, summary: Mapping[str, object]) -> None:
        """Finish the run in the tracker, unless it has failed."""
        self._finish(0)

    def _finish(self, exit_code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None


class MlflowLog(Callback):
    """Send the run's metrics to MLflow (extra `mlflow`); MLflow's `step` is the number of env steps so far.

    MLflow does not allow a parameter to change. If `run_id` continues a run, the parameters of that run stay as they
    are, and the artifact `run.json` has the options of the continued run.

    Args:
        experiment: Name of the experiment; None: MLflow's current experiment.
        **settings: Arguments of `mlflow.start_run`, such as `run_name` or `run_id`.
    """

    def __init__(self, experiment: str | None = None, **settings: object) -> None:
        self._experiment, self._settings = experiment, settings
        self._mlflow: ModuleType | None = None

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if the package `mlflow` is not installed."""
        import_extra("mlflow", "mlflow", "this callback")

    def on_start(self, run: TrainingRun) -> None:
        """Start a run in the tracker, which receives all options as parameters, and has the name of the run."""
        self._mlflow = mlflow = import_extra("mlflow", "mlflow", "this callback")
        if self._experiment is not None:
            mlflow.set_experiment(self._experiment)
        known = mlflow.start_run(**{"run_name": name_of(run), **self._settings}).data.params
        texts = {name: (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAMETER]
                 for name, value in parameters_of(run).items() if name not in known}
        for start in range(0, len(texts), _MOST_PARAMETERS):
            mlflow.log_params(dict(list(texts.items())[start:start + _MOST_PARAMETERS]))
        mlflow.log_dict(dict(run.description), RUN_FILE)

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
