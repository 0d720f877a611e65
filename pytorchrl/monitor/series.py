"""Group runs over seeds, and turn their records into the lines of a report's charts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytorchrl.analysis.curves import Curve, on_grid, summarize_curves, without_steps
from pytorchrl.analysis.grouping import group_runs
from pytorchrl.analysis.plotting import FEWEST_FOR_BAND
from pytorchrl.analysis.runs import Run, read_run
from pytorchrl.errors import ConfigError
from pytorchrl.files.reading import Record, mapping, number
from pytorchrl.monitor.charts import COLORS, thinned
from pytorchrl.monitor.findings import dropped_share
from pytorchrl.monitor.view import RunView

AXES = {"env_steps": "env steps", "seconds": "training time in seconds"}
"""The numbers that the horizontal axis can show, and their names."""
DASHES = 4
"""Number of kinds of dashes in the script of the page."""
# Numbers in all lines of a page together: about six characters each, so that a page stays far below 500 kB.
_MOST_NUMBERS = 20_000
_FEWEST_POINTS, _MOST_POINTS = 24, 400
_RETURN = "return_mean"
# (title, name of the vertical axis, keys that lead to the value in a record)
_CHARTS = (
    ("training: mean return of the last 100 episodes", "return", (_RETURN,)),
    ("evaluation: mean return", "return", ("evaluation", _RETURN)),
    ("env steps per second", "env steps/s", ("env_steps_per_s",)),
    ("age of the data at their first use", "train batches", ("batch_lag", "mean")),
    ("policy lag since the start: mean", "updates", ("policy_lag", "mean")),
    ("queued train batches: mean", "train batches", ("scheme", "queue", "mean")),
    ("share of env steps dropped so far", "share", ("dropped",)))


@dataclass(frozen=True)
class Member:
    """A run in a report: its view, its description, and a name that no other run in the report has."""

    view: RunView
    run: Run
    name: str


@dataclass(frozen=True)
class Group:
    """Runs of a report that differ only in their seeds.

    Attributes:
        label: The settings in which the group differs from others, in short.
        env: Id of the environment.
        members: The runs.
    """

    label: str
    env: str
    members: tuple[Member, ...]


def groups_of(views: Sequence[RunView], named: Mapping[str, Sequence[Path]] | None = None) -> list[Group]:
    """Return the groups of a report; runs on different environments are in different groups.

    Args:
        views: The runs.
        named: The directories of each group, by label; None: runs are grouped by the settings in which they differ.
    """
    members = {view.run_dir: Member(view, _described(view), name)
               for view, name in zip(views, _names(views), strict=True)}
    labels = group_runs([member.run for member in members.values()]) if named is None else {
        label: [members[path].run for path in paths] for label, paths in named.items()}
    several = len({member.run.task for member in members.values()}) > 1
    found: dict[tuple[str, str], list[Member]] = {}
    for label, runs in labels.items():
        for run in runs:
            found.setdefault((label, run.task), []).append(members[run.path])
    return [Group(f"{env}: {label}" if several else label, env, tuple(some)) for (label, env), some in found.items()]


def _described(view: RunView) -> Run:
    try:
        return read_run(view.run_dir)
    except ConfigError:  # `view.problems` says what is wrong
        return Run(view.run_dir, "env", None, {})


def _names(views: Sequence[RunView]) -> list[str]:
    names = [view.name for view in views]
    return names if len(set(names)) == len(names) else [str(view.run_dir) for view in views]


Curves = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
"""Name of a run -> name of an axis -> points."""
WantedChart = tuple[str, str, tuple[str, ...], list[Group], Curves]
"""Title and vertical axis of a chart, the keys of its number, its groups, and the curves of all runs."""


@dataclass(frozen=True)
class Chart:
    """A chart of a report.

    Attributes:
        title: What it shows.
        y: The name of the vertical axis.
        lines: Its lines, as the page's script expects them: the number of the group, the label, for each axis the
            columns x, y and, for a band, its ends; and whether the line is a single run that the page hides at first.
        is_main: Whether it shows the training return.
    """

    title: str
    y: str
    lines: Sequence[Mapping[str, object]]
    is_main: bool = False


def charts_of(groups: Sequence[Group]) -> tuple[list[Chart], list[Chart], list[str]]:
    """Return the charts of a report, the charts of the algorithm's statistics, and texts about constant numbers.

    A number that is the same in all records of all runs needs no chart, and gets a text such as "policy lag 0".
    """
    members = [member for group in groups for member in group.members]
    own = sorted({name for member in members for name in mapping(member.view.latest, "algorithm")})
    wanted = [*_CHARTS, *((name, name, ("algorithm", name)) for name in own)]
    drawn: list[WantedChart] = []
    statistics: list[WantedChart] = []
    constant: list[str] = []
    envs = sorted({group.env for group in groups})
    for title, y, path in wanted:
        curves = {member.name: curves_of(member.view, path) for member in members}
        values = {value for axes in curves.values() for _, value in axes["env_steps"]}
        if len(values) < 2:
            constant += [f"{title} {next(iter(values)):g}"] if values else []
            continue
        for env in envs if y == "return" else [""]:
            some = [group for group in groups if env in ("", group.env)]
            if any(curves[member.name]["env_steps"] for group in some for member in group.members):
                where = statistics if path[0] == "algorithm" else drawn
                name = f"{title} on {env}" if env and len(envs) > 1 else title
                where.append((name, y, path, some, curves))
    points = _points([*drawn, *statistics])
    found = [[Chart(title, y, _lines(groups, some, curves, points, with_band=y == "return"), path == (_RETURN,))
              for title, y, path, some, curves in kind] for kind in (drawn, statistics)]
    return found[0], found[1], constant


def _points(wanted: Sequence[WantedChart]) -> int:
    """Return the number of points of a line, so that all lines fit into the page."""
    lines = 0
    for _, y, _, groups, _ in wanted:
        sizes = [len(group.members) for group in groups]
        lines += sum(3 + size if y == "return" and size > 1 else 1 for size in sizes)
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _MOST_NUMBERS // (2 * len(AXES) * max(1, lines))))


def curves_of(view: RunView, path: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """Return (position, value) of each record that has the number, for each axis in `AXES`."""
    found: dict[str, list[tuple[float, float]]] = {axis: [] for axis in AXES}
    for record in view.records:
        value = dropped_share(record) if path == ("dropped",) else number(record, *path)
        if value is not None:
            for axis, points in found.items():
                at = number(record, axis)
                if at is not None and (not points or at >= points[-1][0]):
                    points.append((at, value))
    return found


def _lines(
    groups: Sequence[Group], some: Sequence[Group], curves: Curves, points: int, *, with_band: bool,
) -> list[dict[str, object]]:
    """Return the lines of a chart; single runs of a group follow its own line, and are drawn below it by the script."""
    found: list[dict[str, object]] = []
    for group in some:
        place = groups.index(group)
        runs = {member.name: curves[member.name] for member in group.members if curves[member.name]["env_steps"]}
        is_summed = len(runs) > 1
        own = _summary(list(runs.values()), points, with_band=with_band) if is_summed else {}
        if own:
            found.append({"group": place, "label": f"{group.label} ({len(runs)} runs)", **own})
        if own and not with_band:
            continue
        for name, axes in runs.items():
            line: dict[str, object] = {"group": place, "label": name if len(runs) > 1 or len(groups) == 1 else
                                       f"{group.label} ({name})"}
            line |= {axis: _columns(thinned(axes[axis], points)) for axis in AXES if axes[axis]}
            if own:
                line |= {"single": True, "hidden": len(runs) >= FEWEST_FOR_BAND}
            found.append(line)
    return found


def _summary(
    runs: Sequence[Mapping[str, Sequence[tuple[float, float]]]], points: int, *, with_band: bool,
) -> dict[str, object]:
    """Return the interquartile mean of several runs for each axis; empty if the runs have no position in common."""
    found: dict[str, object] = {}
    for axis in AXES:
        curves: list[Curve] = [_curve(run[axis]) for run in runs]
        try:
            if with_band:
                grid, summary = summarize_curves(curves, points=points)
                columns = [grid.tolist(), summary.value.tolist()]
                if len(runs) >= FEWEST_FOR_BAND:
                    columns += [summary.low.tolist(), summary.high.tolist()]
            else:
                grid, values = on_grid([without_steps(curve) for curve in curves], points)
                columns = [grid.tolist(), values.mean(axis=-1).tolist()]
        except ConfigError:
            return {}
        found[axis] = [[_short(value) for value in column] for column in columns]
    return found


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return the columns of a curve with increasing positions; of equal positions, the last is kept."""
    kept = dict(points)
    return list(kept), list(kept.values())


def _columns(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[_short(x) for x, _ in points], [_short(y) for _, y in points]]


def _short(value: float) -> float:
    """Return a number with five significant digits, or all digits before the point."""
    if not math.isfinite(value):
        return 0.0
    rounded = float(f"{value:.5g}") if abs(value) < 1e5 else float(round(value))
    return int(rounded) if rounded.is_integer() else rounded


def to_data(groups: Sequence[Group], charts: Sequence[Chart]) -> Record:
    """Return the data of a page's charts in JSON's types; the script of the page reads them."""
    names: set[str] = set()
    return {
        "axes": AXES,
        "groups": [{"label": group.label, "color": place % COLORS, "dash": place // COLORS % DASHES}
                   for place, group in enumerate(groups)],
        "charts": [{"title": chart.title, "y": chart.y, "file": _file_name(chart.title, names), "lines": chart.lines}
                   for chart in charts]}


def _file_name(title: str, taken: set[str]) -> str:
    """Return a name for the downloads of a chart that no other chart of the page has."""
    base = re.sub(r"[^A-Za-z0-9]+", "_", title).strip("_") or "chart"
    name = next(name for name in itertools.chain([base], (f"{base}_{at}" for at in itertools.count(2)))
                if name not in taken)
    taken.add(name)
    return name
