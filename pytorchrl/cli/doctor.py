"""Implement `pytorchrl doctor RUN_DIR`: say what looks wrong in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.monitor.view import read_run


def run(arguments: Sequence[str]) -> int:
    """Print a sentence for each thing that looks wrong; return 1 if there is any, otherwise 0."""
    parser = Parser(prog="pytorchrl doctor", usage="pytorchrl doctor RUN_DIR",
                    description="Say what looks wrong in a run, which may still continue. Exit codes: 0 nothing, "
                                "1 something.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    view = read_run(parser.parse(arguments).run_dir.expanduser())
    sentences = [*view.problems, *(finding.sentence for finding in view.findings)]
    if view.state == "silent":
        sentences.append(f"no record was written for {view.age_s:,.0f} s, and the run has not ended; it was perhaps "
                         "killed")
    show(*(sentences or ["nothing looks wrong"]))
    return int(bool(sentences))
