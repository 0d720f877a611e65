"""Implement `pytorchrl report RUN_DIR...`: write one self-contained page about runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.output import show, show_stderr
from pytorchrl.cli.parsing import Parser
from pytorchrl.monitor.page import write_report
from pytorchrl.monitor.view import read_run


def run(arguments: Sequence[str]) -> int:
    """Write the HTML page about the given runs, and return the exit code."""
    parser = Parser(prog="pytorchrl report", usage="pytorchrl report RUN_DIR... [flags]",
                    description="Write one HTML page about one or more runs, which needs no network and no other file: "
                                "curves, tree, lags, ledger, time shares, faults, versions, settings and videos.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run, the --log-dir of training")
    parser.add_argument("-o", "--out", metavar="FILE", help="the HTML file [report.html in the first RUN_DIR]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    output = Path(given.out) if given.out else Path(given.run_dirs[0]) / "report.html"
    views = [read_run(Path(run_dir)) for run_dir in given.run_dirs]
    show_stderr(*(f"pytorchrl: warning: {problem}" for view in views for problem in view.problems))
    write_report(views, output)
    show(f"wrote {output}")
    return 0
