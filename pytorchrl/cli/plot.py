"""Implement `pytorchrl plot RUN_DIR...`: draw learning curves as a PNG."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.plotting import plot_runs


def run(arguments: Sequence[str]) -> int:
    """Plot the runs and return the exit code."""
    given = _parse(arguments)
    output = Path(given.output) if given.output else Path(given.run_dirs[0]) / "curve.png"
    plot_runs([Path(run_dir) for run_dir in given.run_dirs], output, x=given.x, y=given.y)
    show(f"wrote {output}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pytorchrl plot", usage="pytorchrl plot RUN_DIR... [flags]",
                    description="Draw learning curves of one or more runs into one picture.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run, the --log-dir of training")
    parser.add_argument("-o", "--output", metavar="FILE", help="the PNG file [curve.png in the first RUN_DIR]")
    parser.add_argument("--x", default="env_steps", choices=("env_steps", "seconds", "updates"),
                        help="horizontal axis [env_steps]")
    parser.add_argument("--y", default="return_mean", metavar="NAME",
                        help="vertical axis: the name of a number in metrics.jsonl, e.g. algorithm/loss [return_mean]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser.parse(arguments)
