"""Implement `pytorchrl board RUNS_DIR`: serve a web page that lists runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.monitor.board import ADDRESS, Board


def run(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, and return the exit code."""
    parser = Parser(prog="pytorchrl board", usage="pytorchrl board RUNS_DIR [flags]",
                    description="Serve a page that lists the runs below a directory, refreshes itself, and links to a "
                                f"report of each run. Only this machine can reach it ({ADDRESS}). Ctrl-C ends it.")
    parser.add_argument("runs_dir", metavar="RUNS_DIR", help="directory of runs, such as runs/")
    parser.add_argument("--port", type=int, default=8311, metavar="NUMBER", help="port; 0: any free port [8311]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    with Board(Path(given.runs_dir), given.port) as board, contextlib.suppress(KeyboardInterrupt):
        show(f"http://{ADDRESS}:{board.server_port}/ lists the runs in {given.runs_dir}; Ctrl-C ends the board")
        board.serve_forever()
    return 0
