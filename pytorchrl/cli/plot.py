"""Implement `pytorchrl plot RUNS...`: draw learning curves into a PNG, PDF or SVG file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytorchrl.analysis import STATISTICS, Run
from pytorchrl.analysis.drawing import check_ending
from pytorchrl.analysis.plotting import FEWEST_FOR_BAND, LOG_AXES, plot_groups
from pytorchrl.cli.groups import HELP, add_group_arguments, add_picture_arguments, groups_of, picture_of
from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser


def run(arguments: Sequence[str]) -> int:
    """Plot the runs and return the exit code."""
    given = _parse(arguments)
    check_ending(Path(given.output or ""))
    groups = groups_of(given.runs, given.by)
    first = next(iter(groups.values()))[0].path
    output = Path(given.output) if given.output else first / "curve.png"
    picture = picture_of(given, (run.task for runs in groups.values() for run in runs), given.log or "")
    plot_groups(_by_task(groups), output, x=given.x, y=given.y, statistic=STATISTICS[given.statistic],
                smoothing=given.smooth, confidence=given.confidence, picture=picture)
    show(f"wrote {output}")
    return 0


def _by_task(groups: Mapping[str, Sequence[Run]]) -> dict[str, list[Path]]:
    """Map the label of each group to the directories of its runs; with several tasks, split each group by task."""
    tasks = {run.task for runs in groups.values() for run in runs}
    found: dict[str, list[Path]] = {}
    for label, runs in groups.items():
        for run in runs:
            found.setdefault(label if len(tasks) == 1 else f"{label} {run.task}", []).append(run.path)
    return found


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pytorchrl plot", usage="pytorchrl plot RUN_DIR... | NAME=PATTERN... [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=HELP,
        description="Draw learning curves into one picture: one line per group of runs, with its\n"
                    f"confidence interval, or its single runs if there are fewer than {FEWEST_FOR_BAND}.")
    add_group_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="the picture, a .png, .pdf or .svg file [curve.png in the first RUN_DIR]")
    add_picture_arguments(parser)
    parser.add_argument("--x", default="env_steps", choices=("env_steps", "seconds", "updates"),
                        help="horizontal axis [env_steps]")
    parser.add_argument("--y", default="return_mean", metavar="NAME",
                        help="vertical axis: the name of a number in metrics.jsonl, e.g. algorithm/loss [return_mean]")
    parser.add_argument("--log", choices=LOG_AXES, help="axes with a logarithmic scale [none]")
    parser.add_argument("--statistic", default="iqm", choices=tuple(STATISTICS),
                        help="statistic over the runs of a group; iqm is the interquartile mean [iqm]")
    parser.add_argument("--smooth", type=float, default=0.02, metavar="FRACTION",
                        help="each run is averaged in a moving window of this fraction of its length; 0: no smoothing "
                             "[0.02]")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="FRACTION",
                        help="confidence of the intervals [0.95]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser.parse(arguments)
