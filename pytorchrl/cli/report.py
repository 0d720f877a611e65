"""Implement `pytorchrl report RUNS...`: write one self-contained page about runs."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.groups import HELP, add_group_arguments, named_groups_of, paths_of
from pytorchrl.cli.output import show, show_stderr
from pytorchrl.cli.parsing import Parser
from pytorchrl.monitor.page import write_report
from pytorchrl.monitor.view import read_run


def run(arguments: Sequence[str]) -> int:
    """Write the HTML page about the given runs, and return the exit code."""
    parser = Parser(prog="pytorchrl report", usage="pytorchrl report RUNS [flags]", epilog=HELP,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    description="Write one HTML page about runs, which needs no network and no other\n"
                                "file: curves, final scores, what looks wrong, the worker tree, lags,\n"
                                "ledger, time shares, faults, settings, command, commit and machine.")
    add_group_arguments(parser)
    parser.add_argument("-o", "--out", metavar="FILE", help="the HTML file [report.html in the first run's directory]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    groups = named_groups_of(given.runs, given.by)
    paths = paths_of(given.runs) if groups is None else list(dict.fromkeys(itertools.chain(*groups.values())))
    output = Path(given.out) if given.out else paths[0] / "report.html"
    views = [read_run(path) for path in paths]
    show_stderr(*(f"pytorchrl: warning: {problem}" for view in views for problem in view.problems))
    write_report(views, output, groups)
    show(f"wrote {output}")
    return 0
