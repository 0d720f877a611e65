"""Plot learning curves from the records of runs with matplotlib (extra `plots`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pytorchrl.errors import ConfigError, install_hint
from pytorchrl.run_directory import METRICS_FILE, no_run


def read_curve(run_dir: Path, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return two columns of numbers from a run's records, skipping records that lack one of the two numbers.

    Args:
        run_dir: Directory of the run.
        x: Name of a number, with `/` between levels, such as "algorithm/loss".
        y: Name of the other number.

    Raises:
        ConfigError: There are no records, or no record has both numbers.
    """
    path = run_dir / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(no_run(run_dir, METRICS_FILE)) from None
    except OSError as error:
        raise ConfigError(f"{str(run_dir)!r} contains no run: {error}") from error
    points, names = [], set()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # the run was killed while writing this line
                break
            raise ConfigError(f"{path}:{number} is not JSON") from None
        names.update(_names(record))
        point = _number(record, x), _number(record, y)
        if None not in point:
            points.append(point)
    if not points:
        raise ConfigError(f"{path} has no record with {x!r} and {y!r}; it has {', '.join(sorted(names)) or 'nothing'}")
    return [x for x, _ in points if x is not None], [y for _, y in points if y is not None]


def plot_runs(run_dirs: Sequence[Path], output: Path, *, x: str = "env_steps", y: str = "return_mean") -> None:
    """Draw one line per run into a PNG file.

    Raises:
        ConfigError: A directory has no record with both numbers, the file cannot be written, or matplotlib is missing.
    """
    try:
        # This avoids pyplot, which would choose a display backend and keep references to all figures.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"plots need the extra `plots`: {install_hint('plots')}") from None
    curves = [(label, *read_curve(run_dir, x, y)) for label, run_dir in zip(_labels(run_dirs), run_dirs, strict=True)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, xs, ys in curves:
        axes.plot(xs, ys, label=name)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(output, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written: {error}") from error


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return a label for each run: the last components of its path, with the fewest that make all labels different."""
    for count in range(1, max(len(run_dir.parts) for run_dir in run_dirs)):
        labels = [str(Path(*run_dir.parts[-count:])) for run_dir in run_dirs]
        if len(set(labels)) == len(set(run_dirs)):
            return labels
    return [str(run_dir) for run_dir in run_dirs]


def _number(record: object, name: str) -> float | None:
    for key in name.split("/"):
        if not isinstance(record, dict) or key not in record:
            return None
        record = record[key]
    return float(record) if isinstance(record, (int, float)) and not isinstance(record, bool) else None


def _names(record: object, prefix: str = "") -> list[str]:
    if not isinstance(record, dict):
        return []
    found: list[str] = []
    for key, value in record.items():
        found += _names(value, f"{prefix}{key}/") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found
