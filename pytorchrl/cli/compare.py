"""Implement `pytorchrl compare RUNS...`: compare the scores of groups of runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytorchrl.analysis import (
    STATISTICS,
    Comparison,
    Estimate,
    Scores,
    compare,
    estimate,
    normalize,
    optimality_gap,
    read_scores,
)
from pytorchrl.analysis.aggregates import Array
from pytorchrl.analysis.drawing import check_ending, letters
from pytorchrl.analysis.plotting import plot_comparison
from pytorchrl.cli.groups import HELP, add_group_arguments, add_picture_arguments, groups_of, picture_of
from pytorchrl.cli.output import show, show_table, wrapped
from pytorchrl.cli.parsing import Parser
from pytorchrl.errors import ConfigError
from pytorchrl.learner.reporting import to_json

_TITLES = {"iqm": "IQM", "median": "median", "mean": "mean", "gap": "optimality gap"}
_AXES = {"env_steps": "env steps"}
# Longer labels are replaced by letters in the tables.
_LONGEST_LABEL = 20
_HELP = HELP + """
The runs on a task are scored at the same number of env steps: where the
shortest run ends, or at --at. With runs on several tasks, --reference gives the
scores that count as 0 and 1, such as those of a random policy and of a human.
Each group is compared with the first one, or with --baseline. Runs are compared
in pairs if both groups have the same seeds.
"""


def run(arguments: Sequence[str]) -> int:
    """Compare the groups and return the exit code.

    Raises:
        ConfigError: `--baseline` names no group, or the runs cannot be compared.
    """
    given = _parse(arguments)
    check_ending(Path(given.output or ""))
    groups = groups_of(given.runs, given.by)
    baseline = given.baseline if given.baseline is not None else next(iter(groups))
    if baseline not in groups:
        raise ConfigError(f"--baseline must be one of the groups {', '.join(map(repr, groups))}; got {baseline!r}")
    scores = read_scores(groups, x=given.x, y=given.y, score=given.score, at=given.at)
    values = _normalized(scores, dict(given.reference))
    found = {label: _aggregates(array, given.confidence, gap=bool(given.reference)) for label, array in values.items()}
    compared = {}
    for label, own in scores.items():
        if label != baseline:
            paired = not given.unpaired and own.is_paired_with(scores[baseline])
            compared[label] = compare(values[label], values[baseline], statistic=STATISTICS[given.statistic],
                                      paired=paired, confidence=given.confidence)
    if given.json:
        show(to_json(_as_dict(scores, found, compared, baseline, given)))
    else:
        _show(scores, found, compared, baseline, given)
    if given.output:
        plot_comparison(values, Path(given.output), confidence=given.confidence, gap=bool(given.reference),
                        unit="normalized score" if given.reference else given.y,
                        picture=picture_of(given, scores[baseline].tasks))
        if not given.json:
            show("", f"wrote {given.output}")
    return 0


def _normalized(scores: Mapping[str, Scores], references: Mapping[str, tuple[float, float]]) -> dict[str, Array]:
    """Return the scores of each group, normalized if `references` is not empty.

    Args:
        scores: The scores of each group, by its label.
        references: For each task, by name, the two scores that normalization maps to 0 and to 1.

    Raises:
        ConfigError: `references` names an unknown task, or there are several tasks and `references` lacks one of them.
    """
    tasks = next(iter(scores.values())).tasks
    missing = [task for task in tasks if task not in references]
    unknown = [task for task in references if task not in tasks]
    if unknown:
        raise ConfigError(f"--reference names the task {unknown[0]!r}; the tasks are {', '.join(tasks)}")
    if not references and len(tasks) == 1:
        return {label: own.values for label, own in scores.items()}
    if missing:
        raise ConfigError("scores of several tasks are averaged only if they are normalized; pass --reference "
                          f"TASK=LOW:HIGH, with the scores that count as 0 and 1, for {', '.join(missing)}")
    bounds = [references[task] for task in tasks]
    return {label: normalize(own.values, bounds) for label, own in scores.items()}


def _aggregates(values: Array, confidence: float, *, gap: bool) -> dict[str, Estimate]:
    found = {name: estimate(statistic, values, confidence=confidence) for name, statistic in STATISTICS.items()}
    if gap:
        found["gap"] = estimate(optimality_gap, values, confidence=confidence, bounds=(0.0, math.inf))
    return found


def _as_dict(scores: Mapping[str, Scores], found: Mapping[str, Mapping[str, Estimate]],
             compared: Mapping[str, Comparison], baseline: str, given: argparse.Namespace) -> dict[str, object]:
    groups = {label: {"runs": len(own.values), "tasks": own.tasks, "seeds": own.seeds, "scores": own.values.T.tolist(),
                      **{name: value.as_dict() for name, value in found[label].items()}}
              for label, own in scores.items()}
    comparisons = {label: {
        "paired": one.paired, "statistic": given.statistic, "difference": one.difference.as_dict(),
        "mean_difference": one.mean_difference.as_dict(), "probability_of_improvement": one.improvement.as_dict(),
        "p_value": one.p_value, "seeds_needed": one.seeds_needed} for label, one in compared.items()}
    first = scores[baseline]
    return {"confidence": given.confidence, "score": given.score, "y": given.y, "x": given.x,
            "scored_at": dict(zip(first.tasks, first.at, strict=True)), "groups": groups, "baseline": baseline,
            "comparisons": comparisons}


def _show(scores: Mapping[str, Scores], found: Mapping[str, Mapping[str, Estimate]],
          compared: Mapping[str, Comparison], baseline: str, given: argparse.Namespace) -> None:
    titles = [_TITLES[name] for name in next(iter(found.values()))]
    names = {label: label for label in scores}
    show(f"{given.confidence * 100:g}% confidence intervals in brackets", *_positions(scores[baseline], given.x))
    if max(map(len, scores)) > _LONGEST_LABEL:
        names = dict(zip(scores, letters(len(scores)), strict=True))
        show("", *(line for label, name in names.items() for line in wrapped(f"{name:3}{label}", indent=3)))
    show("")
    show_table(["group", "runs", *titles], [
        [names[label], str(own.values.size), *map(_estimated, found[label].values())] for label, own in scores.items()])
    if compared:
        show("", f"compared with {names[baseline]}:")
        title = f"difference of {_TITLES[given.statistic]}"
        show_table(["group", title, "difference of mean", "P(improvement)", "p", "test", "seeds for power 80%"], [
            [names[label], _estimated(one.difference), _estimated(one.mean_difference), f"{one.improvement:.2f}",
             "-" if math.isnan(one.p_value) else f"{one.p_value:.3g}", "paired t" if one.paired else "Welch's t",
             "-" if one.seeds_needed is None else str(one.seeds_needed)] for label, one in compared.items()])
    if min(len(own.values) for own in scores.values()) < 2:
        show("", "A group with a single run per task has no interval; train more seeds.")


def _positions(scores: Scores, x: str) -> list[str]:
    """Return lines that say where the runs on each task are scored; tasks with equal positions share a line."""
    tasks: dict[str, list[str]] = {}
    for task, at, (shortest, longest) in zip(scores.tasks, scores.at, scores.ends, strict=True):
        end = "all runs" if shortest == longest else f"shortest run; longest: {longest:,.0f}"
        where = f" ({end})" if at == shortest else ""
        tasks.setdefault(f"scored at {at:,.0f} {_AXES.get(x, x)}{where}", []).append(task)
    return [line for text, some in tasks.items() for line in wrapped(f"{', '.join(some)}: {text}", indent=2)]


def _estimated(estimate: Estimate) -> str:
    """Return an estimate with its interval, with three digits or in whole numbers, so that tables are narrow."""
    numbers = [float(number) for number in (estimate.value, estimate.low, estimate.high)]
    value, low, high = (f"{number:.0f}" if 100 <= abs(number) < 1e6 else f"{number:.3g}" for number in numbers)
    return f"{value} [{low}, {high}]" if math.isfinite(numbers[1]) else value


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pytorchrl compare", usage="pytorchrl compare RUN_DIR... | NAME=PATTERN... [flags]", epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare groups of runs: statistics with intervals, differences and tests.")
    add_group_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the picture, a .png, .pdf or .svg file [none]")
    add_picture_arguments(parser)
    parser.add_argument("--y", default="return_mean", metavar="NAME",
                        help="the score: the name of a number in metrics.jsonl, e.g. evaluation/return_mean "
                        "[return_mean]")
    parser.add_argument("--score", default="last", choices=("last", "area"),
                        help="last: the number at the end; area: its mean over the run (area under the curve) [last]")
    parser.add_argument("--x", default="env_steps", choices=("env_steps", "seconds", "updates"),
                        help="runs are scored at the same value of this number [env_steps]")
    parser.add_argument("--at", type=float, metavar="NUMBER",
                        help="score runs at this value of --x [the end of the shortest run]")
    parser.add_argument("--statistic", default="iqm", choices=tuple(STATISTICS),
                        help="statistic whose difference is shown; iqm is the interquartile mean [iqm]")
    parser.add_argument("--baseline", metavar="GROUP",
                        help="the group with which all other groups are compared [the first]")
    parser.add_argument("--reference", type=_reference, action="append", default=[], metavar="TASK=LOW:HIGH",
                        help="scores that count as 0 and as 1 on a task; one flag per task")
    parser.add_argument("--unpaired", action="store_true", help="do not pair runs with equal seeds")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="FRACTION",
                        help="confidence of the intervals [0.95]")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    if not given.output and (given.title is not None or given.size):
        parser.error("--title and --size are for the picture, which is only written with --output FILE")
    return given


def _reference(text: str) -> tuple[str, tuple[float, float]]:
    task, _, bounds = text.rpartition("=")
    try:
        low, high = map(float, bounds.split(":"))
    except ValueError:
        low = high = math.nan
    if not task or not low < high:
        raise argparse.ArgumentTypeError(f"expected TASK=LOW:HIGH with LOW < HIGH, such as CartPole-v1=20:500; got "
                                         f"{text!r}")
    return task, (low, high)
