"""Plot learning curves and comparisons of runs with matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pytorchrl.analysis import STATISTICS, estimate, optimality_gap, performance_profile, read_curve, summarize_curves
from pytorchrl.analysis.aggregates import Array, Statistic, iqm
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.support.code import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_FEWEST_FOR_BAND = 4
"""Smallest number of runs whose confidence interval is drawn."""

__all__ = ["plot_comparison", "plot_groups", "plot_runs", "read_curve"]


def plot_runs(run_dirs: Sequence[Path], output: Path, *, x: str = "env_steps", y: str = "return_mean") -> None:
    """Draw one line per run into a PNG or SVG file; see `plot_groups`."""
    plot_groups({label: [run_dir] for label, run_dir in zip(labels(run_dirs), run_dirs, strict=True)}, output, x=x, y=y)


def plot_groups(
    groups: Mapping[str, Sequence[Path]], output: Path, *, x: str = "env_steps", y: str = "return_mean",
    statistic: Statistic = iqm, smoothing: float = 0.0, confidence: float = 0.95,
) -> None:
    """Draw one line per group of runs into a PNG or SVG file, with a band that shows the confidence interval.

    The interval of two or three runs is much wider than their curves, so these curves are drawn in place of a band.

    Args:
        groups: Label -> directories of runs on one task. A group with fewer than four runs has no band.
        output: Path of the file. Its format is SVG if its name ends in `.svg`, otherwise PNG.
        x: Name of a number in the records, for the horizontal axis.
        y: Name of another number in the records, for the vertical axis.
        statistic: The statistic over runs that the line shows.
        smoothing: Width of the window that smooths the curve of each run, as a fraction of the curve's length.
        confidence: Confidence level of the intervals, in (0, 1).

    Raises:
        ConfigError: A directory has no record with both numbers, the file cannot be written, or matplotlib is missing.
    """
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    lines: list[Line2D] = []
    texts: list[str] = []
    for label, run_dirs in groups.items():
        curves = [read_curve(run_dir, x, y) for run_dir in run_dirs]
        grid, found = summarize_curves(curves, statistic=statistic, smoothing=smoothing, confidence=confidence)
        count = f" ({len(run_dirs)} runs)" if len(run_dirs) > 1 else ""
        line, = axes.plot(grid, found.value, marker="." if len(grid) == 1 else None)
        lines.append(line)
        texts.append(label + count)
        if len(run_dirs) >= _FEWEST_FOR_BAND:
            axes.fill_between(grid, found.low, found.high, color=line.get_color(), alpha=0.2, linewidth=0)
        elif len(run_dirs) > 1:
            for curve in curves:
                axes.plot(*curve, color=line.get_color(), alpha=0.35, linewidth=0.8)
    axes.set(xlabel=_plain(x.replace("_", " ")), ylabel=_plain(y.replace("_", " ")))
    axes.grid(alpha=0.3)
    _add_legend(axes, lines, texts)
    _save(figure, output)


def plot_comparison(
    groups: Mapping[str, Array], output: Path, *, confidence: float = 0.95, gap: bool = False, unit: str = "score",
) -> None:
    """Draw IQM, median and mean of each group with intervals, and performance profiles, into a PNG or SVG file.

    Args:
        groups: Label -> scores of shape (runs, tasks).
        output: Path of the file. Its format is SVG if its name ends in `.svg`, otherwise PNG.
        confidence: Confidence level of the intervals, in (0, 1).
        gap: Whether to draw the optimality gap, which needs normalized scores.
        unit: Name of the scores for the label of the axis, such as "score".

    Raises:
        ConfigError: The file cannot be written, or matplotlib is missing.
    """
    statistics: dict[str, Statistic] = {"IQM": STATISTICS["iqm"], "median": STATISTICS["median"],
                                        "mean": STATISTICS["mean"]}
    if gap:
        statistics["optimality gap"] = optimality_gap
    figure = _figure(9, 3.4 + 0.35 * len(groups))
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[1 + 0.35 * len(groups), 3])[:, 0]
    for axes, (title, statistic) in zip(top.subplots(1, len(statistics), sharey=True, squeeze=False)[0],
                                        statistics.items(), strict=True):
        for row, scores in enumerate(groups.values()):
            found = estimate(statistic, scores, confidence=confidence)
            axes.plot([found.low, found.high], [row, row], color=f"C{row}", linewidth=8, alpha=0.4,
                      solid_capstyle="butt")
            axes.plot(found.value, row, "|", color=f"C{row}", markersize=14, markeredgewidth=2)
        axes.set(title=title, yticks=range(len(groups)), yticklabels=[_plain(label) for label in groups],
                 ylim=(len(groups) - 0.5, -0.5))
        axes.grid(alpha=0.3, axis="x")
    _draw_profiles(bottom.subplots(), groups, confidence, unit)
    _save(figure, output)


def _draw_profiles(axes: Axes, groups: Mapping[str, Array], confidence: float, unit: str) -> None:
    """Draw, for each group, the fraction of scores above each threshold."""
    everything = np.concatenate([scores.ravel() for scores in groups.values()])
    margin = 0.05 * (np.ptp(everything) or 1.0)
    thresholds = np.linspace(everything.min() - margin, everything.max() + margin, 201)
    lines: list[Line2D] = []
    for row, scores in enumerate(groups.values()):
        found = estimate(lambda drawn: performance_profile(drawn, thresholds), scores, confidence=confidence,
                         bounds=(0.0, 1.0))
        lines += axes.plot(thresholds, found.value, color=f"C{row}")
        axes.fill_between(thresholds, found.low, found.high, color=f"C{row}", alpha=0.2, linewidth=0)
    axes.set(xlabel=_plain(f"{unit} threshold"), ylabel="fraction of scores above",
             ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    _add_legend(axes, lines, list(groups))


def _add_legend(axes: Axes, lines: Sequence[Line2D], texts: Sequence[str]) -> None:
    """Add a legend, also with texts that begin with "_", which some versions of matplotlib leave out of new legends."""
    legend = axes.legend(lines, ["text"] * len(lines))
    for shown, text in zip(legend.get_texts(), texts, strict=True):
        shown.set_text(_plain(text))


def _figure(width: float, height: float) -> Figure:
    for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        import_extra(module, "plots", "a plot")
    # This avoids pyplot, which would choose a display backend and keep references to all figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, output: Path) -> None:
    try:
        with put_in_place(output) as file:
            figure.savefig(file, format="svg" if output.suffix.lower() == ".svg" else "png", dpi=120,
                           metadata={"Date": None} if output.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written: {error}") from error


def _plain(text: str) -> str:
    """Escape the dollar signs in a text, so that matplotlib does not draw parts of the text as formulas."""
    return text.replace("$", r"\$")


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return a label for each run: the last components of its path, as many as needed to tell the runs apart."""
    for count in range(1, max(len(run_dir.parts) for run_dir in run_dirs)):
        found = [str(Path(*run_dir.parts[-count:])) for run_dir in run_dirs]
        if len(set(found)) == len(set(run_dirs)):
            return found
    return [str(run_dir) for run_dir in run_dirs]
