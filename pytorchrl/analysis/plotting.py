"""Plot learning curves and comparisons of runs with matplotlib (extra `plots`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pytorchrl.analysis import STATISTICS, estimate, optimality_gap, performance_profile, read_curve
from pytorchrl.analysis.aggregates import Array, Statistic, iqm
from pytorchrl.analysis.curves import Curve, on_grid, smooth, summarize_curves, without_steps
from pytorchrl.analysis.drawing import Canvas, End, KeyEntry, letters, plain, style_of
from pytorchrl.errors import ConfigError
from pytorchrl.support.units import compact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FEWEST_FOR_BAND = 4
"""Smallest number of runs whose confidence interval is drawn."""
LOG_AXES = ("x", "y", "xy")
# A band may reach beyond the runs by this fraction of their range; the rest is cut off.
_BAND_BEYOND = 0.25
# From this number of groups on, letters at the ends of the lines tell them apart in addition to colors and dashes.
_FEWEST_FOR_LETTERS = 11
# Lines whose ends differ by at most this fraction, because rollouts end a little beyond the target, end together.
_SAME_END = 0.05
# A label is replaced by a letter if it is wider than this fraction of the picture: in the key, and at an axis.
_WIDEST_IN_KEY, _WIDEST_AT_AXIS = 0.5, 0.16
_SIZES = (2.0, 40.0)
_NAMES = {"return_mean": "mean return", "evaluation/return_mean": "mean return of evaluations", "seconds": "time (s)",
          "env_steps": "env steps"}

__all__ = ["Picture", "plot_comparison", "plot_groups", "plot_runs", "read_curve"]


@dataclasses.dataclass(frozen=True)
class Picture:
    """Title, size and axes of a picture.

    Attributes:
        title: Text above the picture; "": none.
        size: Width and height in inches, without the key of the groups, which is added below. None: the usual size.
        log: Axes with a logarithmic scale: "x", "y", "xy", or "" for none.

    Raises:
        ConfigError: A value is wrong.
    """

    title: str = ""
    size: tuple[float, float] | None = None
    log: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        low, high = _SIZES
        if self.size is not None and not (len(self.size) == 2 and all(low <= side <= high for side in self.size)):
            raise ConfigError(f"size must be a width and a height from {low:g} to {high:g} inches, such as (7, 4.5); "
                              f"got {self.size!r}")
        if self.log not in ("", *LOG_AXES):
            raise ConfigError(f"log must be one of {', '.join(LOG_AXES)}, or empty; got {self.log!r}")


def plot_runs(
    run_dirs: Sequence[Path], output: Path, *, x: str = "env_steps", y: str = "return_mean",
    picture: Picture = Picture(),
) -> None:
    """Draw one line per run into a PNG, PDF or SVG file; see `plot_groups`."""
    groups = {label: [run_dir] for label, run_dir in zip(labels(run_dirs), run_dirs, strict=True)}
    plot_groups(groups, output, x=x, y=y, picture=picture)


def plot_groups(
    groups: Mapping[str, Sequence[Path]], output: Path, *, x: str = "env_steps", y: str = "return_mean",
    statistic: Statistic = iqm, smoothing: float = 0.0, confidence: float = 0.95,
    picture: Picture = Picture(),
) -> None:
    """Draw one line per group of runs into a PNG, PDF or SVG file, with a band that shows the confidence interval.

    The interval of two or three runs is much wider than their curves, so these curves are drawn as thin lines in place
    of a band, unless there are more than ten groups. The key below the axes names the groups. If a label is long or
    there are more than ten groups, letters at the ends of the lines stand for the labels.

    Args:
        groups: Label -> directories of runs on one task. A group with fewer than four runs has no band. The line of a
            group ends where its shortest run ends.
        output: Path of the file. The ending of its name is the format: `.png`, `.pdf` or `.svg`; PNG without an ending.
        x: Name of a number in the records, for the horizontal axis. On a logarithmic axis, records at 0 are left out.
        y: Name of another number in the records, for the vertical axis, which shows the range of all runs. A band that
            reaches far beyond this range is cut off.
        statistic: The statistic over runs that the line shows.
        smoothing: Width of the window that smooths the curve of each run, as a fraction of the curve's length.
        confidence: Confidence level of the intervals, in (0, 1).
        picture: Title, size and logarithmic axes.

    Raises:
        ConfigError: A directory has no record with both numbers, the number `x` decreases during a run, a number on a
            logarithmic axis is not above 0, the ending of `output` is unknown, the file cannot be written, or
            matplotlib is missing.
    """
    canvas = Canvas(output, picture.size or (7.0, 4.5), picture.title)
    (axes,) = canvas.axes()
    counts = {len(run_dirs) for run_dirs in groups.values()}
    names = list(groups) if len(counts) == 1 else [
        f"{label} ({len(run_dirs)} runs)" if len(run_dirs) > 1 else label for label, run_dirs in groups.items()]
    is_crowded = len(groups) >= _FEWEST_FOR_LETTERS
    by_letter = is_crowded or canvas.widest(names) > _WIDEST_IN_KEY
    marks = letters(len(groups)) if by_letter else [""] * len(groups)
    points = 1000 if "x" in picture.log else 200
    ends, bands = [], []
    for place, run_dirs in enumerate(groups.values()):
        curves = [_curve(run_dir, x, y, picture.log) for run_dir in run_dirs]
        grid, found = summarize_curves(curves, statistic=statistic, smoothing=smoothing, confidence=confidence,
                                       points=points)
        color, dashes = style_of(place)
        axes.plot(grid, found.value, color=color, linestyle=dashes, linewidth=1.6, zorder=3,
                  marker="." if len(grid) == 1 else None)
        if len(curves) > 1:
            _draw_runs(axes, curves, None if is_crowded else place, smoothing, points)
        if len(curves) >= FEWEST_FOR_BAND:
            bands.append((grid, found.low, found.high, color))
        ends.append(End(float(grid[-1]), float(found.value[-1]), marks[place], color))
    _scale(axes, picture.log, x)
    _draw_bands(axes, bands, is_faint=by_letter)
    axes.set(xlabel=canvas.fitted(_named(x)), ylabel=canvas.fitted(_named(y), is_upright=True))
    if len(groups) > 1:
        canvas.add_key(_key(marks, names))
    canvas.add_note(_note(counts, statistic, confidence, has_runs=not is_crowded))
    if by_letter:
        canvas.mark_ends(axes, _aligned(ends))
    canvas.save()


def _key(marks: Sequence[str], names: Sequence[str]) -> list[KeyEntry]:
    return [KeyEntry(style_of(place), mark, name) for place, (mark, name) in enumerate(zip(marks, names, strict=True))]


def _curve(run_dir: Path, x: str, y: str, log: str) -> Curve:
    """Return the curve of a run; raise `ConfigError` if it does not fit the axes."""
    xs, ys = read_curve(run_dir, x, y)
    if "x" in log:
        kept = [(one, other) for one, other in zip(xs, ys, strict=True) if one > 0]
        if not kept:
            raise ConfigError(f"{x!r} is never above 0 in {run_dir}, so its axis cannot be logarithmic; leave out log")
        xs, ys = [one for one, _ in kept], [other for _, other in kept]
    if "y" in log and min(ys) <= 0:
        raise ConfigError(f"{y!r} must be above 0 for a logarithmic axis, and is {min(ys):g} in {run_dir}; leave out "
                          "log, or use it for x only")
    if any(one > other for one, other in itertools.pairwise(xs)):
        raise ConfigError(f"{x!r} decreases during the run {run_dir}, so it cannot be the horizontal axis; choose "
                          "env_steps, seconds or updates")
    return xs, ys


def _draw_runs(axes: Axes, curves: Sequence[Curve], place: int | None, smoothing: float, points: int) -> None:
    """Draw the curves of few runs as thin lines; the curves of many runs only widen the range of the axes.

    Args:
        axes: The axes.
        curves: The curves of a group.
        place: Position of the group. None: there are so many groups that no curves of single runs are drawn.
        smoothing: See `plot_groups`.
        points: Number of points of a line.
    """
    for curve in curves:
        grid, values = on_grid([without_steps(curve)], points)
        values = smooth(values, smoothing)[:, 0]
        if place is not None and len(curves) < FEWEST_FOR_BAND:
            color, dashes = style_of(place)
            axes.plot(grid, values, color=color, linestyle=dashes, linewidth=0.7, alpha=0.6)
        else:
            axes.update_datalim(np.stack([grid, values], axis=-1))


def _scale(axes: Axes, log: str, x: str) -> None:
    """Set the scales of the axes, and the limits of the vertical axis to the range of all curves."""
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.autoscale_view()
    scaled: tuple[tuple[Literal["x", "y"], Axis, tuple[float, float]], ...] = (
        ("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim()))
    for name, axis, limits in scaled:
        if name in log:
            _log_ticks(axis, *limits)
        elif name == "x" and max(map(abs, limits)) >= 1e4:
            axis.set_major_formatter(lambda value, _: compact(value))
        else:
            axes.ticklabel_format(axis=name, useOffset=False)
    axes.grid(alpha=0.3)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Choose ticks that are labeled even if the limits contain no power of ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
    decades = math.log10(high / low)
    axis.set_major_locator(MaxNLocator(5) if decades < 0.7 else LogLocator(
        subs=(1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: compact(value))
    axis.set_minor_formatter(NullFormatter())


def _draw_bands(axes: Axes, bands: Sequence[tuple[Array, Array, Array, str]], *, is_faint: bool) -> None:
    """Draw the intervals, which may extend the vertical axis by a fraction of the range that it has."""
    if not bands:
        return
    transform = axes.yaxis.get_transform()
    low, high = transform.transform(np.array(axes.get_ylim()))
    extra = _BAND_BEYOND * (high - low)
    limits = transform.inverted().transform(np.array([low - extra, high + extra]))
    bounds = axes.get_ylim()
    for grid, lows, highs, color in bands:
        axes.fill_between(grid, lows, highs, color=color, alpha=0.08 if is_faint else 0.2, linewidth=0)
        bounds = min(bounds[0], max(limits[0], lows.min())), max(bounds[1], min(limits[1], highs.max()))
    axes.set_ylim(bounds)


def _aligned(ends: Sequence[End]) -> list[End]:
    """Return the ends of lines, with letters in one column if lines end at nearly the same place."""
    last = max(end.x for end in ends)
    return [dataclasses.replace(end, x=last) if end.x > (1 - _SAME_END) * last else end for end in ends]


def _note(counts: set[int], statistic: Statistic, confidence: float, *, has_runs: bool) -> str:
    """Return what the lines and bands show; "" if each line is a single run."""
    if max(counts) < 2:
        return ""
    name = {"iqm": "interquartile mean"}.get(statistic.__name__, statistic.__name__)
    parts = [f"lines: {name} of {f'{max(counts)} runs' if len(counts) == 1 else 'the runs'}"]
    if max(counts) >= FEWEST_FOR_BAND:
        parts.append(f"bands: {confidence * 100:g}% confidence")
    if has_runs and any(1 < count < FEWEST_FOR_BAND for count in counts):
        parts.append("thin lines: single runs")
    return ", ".join(parts)


def plot_comparison(
    groups: Mapping[str, Array], output: Path, *, confidence: float = 0.95, gap: bool = False, unit: str = "score",
    picture: Picture = Picture(),
) -> None:
    """Draw IQM, median and mean of each group with intervals, and performance profiles, into a PNG, PDF or SVG file.

    Args:
        groups: Label -> scores of shape (runs, tasks).
        output: Path of the file; see `plot_groups`.
        confidence: Confidence level of the intervals, in (0, 1).
        gap: Whether to draw the optimality gap, which needs normalized scores.
        unit: Name of the scores for the label of the axis, such as "score" or the name of a number in the records.
        picture: Title and size.

    Raises:
        ConfigError: `picture.log` is given, the ending of `output` is unknown, the file cannot be written, or
            matplotlib is missing.
    """
    if picture.log:
        raise ConfigError(f"a comparison has no logarithmic axes; got log={picture.log!r}, leave it out")
    statistics: dict[str, Statistic] = {"IQM": STATISTICS["iqm"], "median": STATISTICS["median"],
                                        "mean": STATISTICS["mean"]}
    if gap:
        statistics["optimality gap"] = optimality_gap
    rows = 0.25 * len(groups)
    canvas = Canvas(output, picture.size or (7.0, 3.4 + rows), picture.title)
    by_letter = canvas.widest(list(groups)) > _WIDEST_AT_AXIS
    marks = letters(len(groups)) if by_letter else [""] * len(groups)
    *top, bottom = canvas.axes(len(statistics), (0.7 + rows, 2.4))
    for axes, (title, statistic) in zip(top, statistics.items(), strict=True):
        for row, scores in enumerate(groups.values()):
            found, (color, _) = estimate(statistic, scores, confidence=confidence), style_of(row)
            axes.plot([found.low, found.high], [row, row], color=color, linewidth=7, alpha=0.4, solid_capstyle="butt")
            axes.plot(found.value, row, "|", color=color, markersize=12, markeredgewidth=2)
        axes.set(yticks=range(len(groups)), yticklabels=list(map(plain, marks if by_letter else groups)),
                 ylim=(len(groups) - 0.5, -0.5))
        axes.set_title(title, fontsize=9)
        axes.locator_params(axis="x", nbins=4)
        axes.grid(alpha=0.3, axis="x")
    _draw_profiles(bottom, groups, confidence)
    bottom.set(xlabel=canvas.fitted(f"threshold of {_named(unit)}"), ylabel="runs above")
    canvas.add_key(_key(marks, list(groups)))
    canvas.add_note(f"bars and bands: {confidence * 100:g}% confidence")
    canvas.save()


def _draw_profiles(axes: Axes, groups: Mapping[str, Array], confidence: float) -> None:
    """Draw, for each group, the fraction of scores above each threshold; few runs have no band, see `plot_groups`."""
    everything = np.concatenate([scores.ravel() for scores in groups.values()])
    margin = 0.05 * (np.ptp(everything) or 1.0)
    thresholds = np.linspace(everything.min() - margin, everything.max() + margin, 201)
    for row, scores in enumerate(groups.values()):
        found = estimate(lambda drawn: performance_profile(drawn, thresholds), scores, confidence=confidence,
                         bounds=(0.0, 1.0))
        color, dashes = style_of(row)
        axes.plot(thresholds, found.value, color=color, linestyle=dashes)
        if len(scores) >= FEWEST_FOR_BAND:
            axes.fill_between(thresholds, found.low, found.high, color=color, linewidth=0,
                              alpha=0.2 if len(groups) < _FEWEST_FOR_LETTERS else 0.05)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)


def _named(number: str) -> str:
    """Return the name of a number in the records as the label of an axis."""
    return _NAMES.get(number, number.replace("_", " "))


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return a label for each run: the last components of its path, as many as needed to tell the runs apart."""
    for count in range(1, max(len(run_dir.parts) for run_dir in run_dirs)):
        found = [str(Path(*run_dir.parts[-count:])) for run_dir in run_dirs]
        if len(set(found)) == len(set(run_dirs)):
            return found
    return [str(run_dir) for run_dir in run_dirs]
