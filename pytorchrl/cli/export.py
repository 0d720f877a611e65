"""Implement `pytorchrl export RUN_DIR`: write the policies of a run to files that work without this library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pytorchrl.cli.enjoy import count
from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.train import make_importable
from pytorchrl.export.formats import FORMATS
from pytorchrl.run_directory import MODEL_NAME
from pytorchrl.training import load


def run(arguments: Sequence[str]) -> int:
    """Export the policies and return the exit code."""
    given = _parse(arguments)
    if given.algorithm is not None:
        make_importable()
    agent = load(given.run_dir, model=given.model, algorithm=given.algorithm)
    for file in agent.export(given.out, to=given.to, checks=given.checks, overwrite=given.overwrite):
        show(f"wrote {file.path}: its actions and those of the agent agree for {file.num_observations} observations "
             f"(largest difference {file.largest_difference:.2g})")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pytorchrl export", usage="pytorchrl export RUN_DIR --to FORMAT [flags]",
                    description="Write the policy of a run to a file that works without this library. The file is kept "
                                "only if it chooses the same actions as the agent.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run, the --log-dir of training")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), metavar="FORMAT",
                        help=f"format of the file: {', '.join(FORMATS)} (extra `export`, except for torch)")
    parser.add_argument("--out", metavar="PATH", help="the file; with several policies, the name of each policy is "
                                                      "added to its name [policy.* in RUN_DIR]")
    parser.add_argument("--checks", type=count, default=1000, metavar="INT",
                        help="number of observations for which actions are compared [1000]")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--model", default=MODEL_NAME, metavar="NAME", help=f"name of the model [{MODEL_NAME}]")
    parser.add_argument("--algorithm", metavar="MODULE:CLASS",
                        help="class of the run's algorithm, to import if it is your own")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser.parse(arguments)
