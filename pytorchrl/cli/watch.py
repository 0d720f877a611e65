"""Implement `pytorchrl watch RUN_DIR`: show a run live in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.values import positive_seconds
from pytorchrl.monitor.live import show_once, watch


def run(arguments: Sequence[str]) -> int:
    """Show the run until it ends, and return the exit code."""
    parser = Parser(prog="pytorchrl watch", usage="pytorchrl watch RUN_DIR [flags]",
                    description="Show the worker tree of a run live: rates, queues, lags, time shares, restarts, and "
                                "the bottleneck. The command only reads the files of the run, and ends when the run "
                                "ends, or with q or Ctrl-C.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, the --log-dir of training")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--interval", type=positive_seconds, default=1.0, metavar="NUMBER",
                        help="seconds between two frames [1]")
    parser.add_argument("--width", type=int, metavar="COLUMNS",
                        help="with --once: columns of the frame [the terminal's]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    if given.width is not None and (not given.once or given.width < 40):
        parser.error(f"--width needs --once and at least 40 columns, got {given.width}")
    if given.once:
        show_once(Path(given.run_dir), width=given.width)
    else:
        watch(Path(given.run_dir), interval_s=given.interval)
    return 0
