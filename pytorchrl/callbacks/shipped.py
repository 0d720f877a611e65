"""Callbacks that save the best model, stop early, or write a CSV file."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping

from typing_extensions import override

from pytorchrl.agent.data import Evaluation
from pytorchrl.callbacks.base import Callback, TrainingRun
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.files.run_directory import METRICS_FILE
from pytorchrl.support.numbers import plain


def check_number(name: str, value: object, low: float = -math.inf) -> float:
    """Return `value` as a Python number; raise `ConfigError` unless it is finite and not below `low`."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number < low:
        bound = "" if low == -math.inf else f" >= {low:g}"
        raise ConfigError(f"{name} must be a finite number{bound}, got {value!r}")
    return number


class SaveBestModel(Callback):
    """Save the model after each evaluation that is better than all earlier ones.

    The model has the weights that were evaluated, although training continues during an evaluation.

    Args:
        name: Name of the model in the run's directory, without `.pt`.
    """

    needs_evaluations = True

    def __init__(self, name: str = "best") -> None:
        self._name = name
        self.best = -math.inf
        """Highest mean return of an evaluation so far."""

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if the run has no `log_dir` for the model."""
        if run.log_dir is None:
            raise ConfigError("SaveBestModel writes a model, so it needs a log_dir")

    def on_evaluation(self, run: TrainingRun, evaluation: Evaluation) -> None:
        """Save the model if the mean return has improved."""
        if evaluation.return_mean > self.best:
            self.best = evaluation.return_mean
            run.save_model(self._name, evaluated=True)

    @override
    def state(self) -> dict[str, float]:
        """Return the highest mean return."""
        return {"best": self.best}

    @override
    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the highest mean return."""
        self.best = state["best"]

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Add to the record the highest mean return that any evaluation has reached so far."""
        return None if self.best == -math.inf else {"best_return": self.best}


class StopAtScore(Callback):
    """Stop when the mean return reaches a score.

    Args:
        score: The score.
        evaluated: Whether the mean return of an evaluation counts; otherwise, the mean return of the last 100 training
            episodes counts.
    """

    def __init__(self, score: float, *, evaluated: bool = False) -> None:
        self._score, self._evaluated = check_number("score", score), evaluated
        self.needs_evaluations = evaluated

    def on_evaluation(self, run: TrainingRun, evaluation: Evaluation) -> None:
        """Stop if the evaluation has reached the score."""
        if self._evaluated and evaluation.return_mean >= self._score:
            run.request_stop(f"an evaluation reached the score {self._score:g}")

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Stop if the training episodes have reached the score."""
        if not self._evaluated and run.return_mean is not None and run.return_mean >= self._score:
            run.request_stop(f"the training episodes reached the score {self._score:g}")
        return None


class StopOnPlateau(Callback):
    """Stop when the mean return of the training episodes has not improved for `patience` env steps.

    Args:
        patience: Number of env steps without an improvement.
        min_improvement: Smallest increase of the mean return that counts as an improvement.
    """

    def __init__(self, patience: int, min_improvement: float = 0.0) -> None:
        self._patience = check_number("patience", patience, 1)
        self._min_improvement = check_number("min_improvement", min_improvement, 0)
        self._best, self._best_at = -math.inf, 0.0

    @override
    def state(self) -> dict[str, float]:
        """Return the highest mean return, and the number of env steps at which it was reached."""
        return {"best": self._best, "best_at": self._best_at}

    @override
    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the highest mean return, and the number of env steps at which it was reached."""
        self._best, self._best_at = state["best"], state["best_at"]

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Request a stop if the mean return has not improved for `patience` env steps."""
        if run.return_mean is not None:
            if run.return_mean > self._best + self._min_improvement:
                self._best, self._best_at = run.return_mean, run.env_steps
            elif run.env_steps - self._best_at >= self._patience:
                run.request_stop(f"the mean return has not improved for {self._patience:,} env steps")
        return None


class CsvLog(Callback):
    """Write the numbers of each record to `metrics.csv` in the run's directory, when the run ends.

    There is a column for each number that any record contains; numbers in nested tables have names such as
    `policy_lag/mean`. The file is made from `metrics.jsonl`. If the run was resumed, the file therefore also contains
    the earlier records.
    """

    def check(self, run: TrainingRun) -> None:
        """Raise `ConfigError` if the run has no `log_dir` for the file."""
        if run.log_dir is None:
            raise ConfigError("CsvLog writes a file, so it needs a log_dir")

    def on_end(self, run: TrainingRun, summary: Mapping[str, object]) -> None:
        """Write `metrics.csv`."""
        assert run.log_dir is not None
        lines = (run.log_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        rows = [numbers_of(json.loads(line)) for line in lines]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
        with put_in_place(run.log_dir / "metrics.csv") as file:
            file.write(text.getvalue().encode("utf-8"))


def numbers_of(record: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record by name; a number in a nested table has a name such as `policy_lag/mean`."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = value
    return found
