"""Implement `pytorchrl export RUN_DIR`: write the policies of a run to files that work without this library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.saved_agent import add_agent_flags, add_run_dir, count, load_agent
from pytorchrl.export.formats import FORMATS


def run(arguments: Sequence[str]) -> int:
    """Export the policies and return the exit code."""
    given = _parse(arguments)
    agent = load_agent(given)
    for file in agent.export(given.out, to=given.to, checks=given.checks, overwrite=given.overwrite):
        show(f"wrote {file.path}: its actions and those of the agent agree for {file.num_observations} observations "
             f"(largest difference {file.largest_difference:.2g})")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pytorchrl export", usage="pytorchrl export RUN_DIR --to FORMAT [flags]",
                    description="Write the policy of a run to a file that works without this library. The file is kept "
                                "only if it chooses the same actions as the agent.")
    add_run_dir(parser)
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), metavar="FORMAT",
                        help=f"format of the file: {', '.join(FORMATS)} (extra `export`, except for torch)")
    parser.add_argument("--out", metavar="PATH", help="the file; with several policies, the name of each policy is "
                                                      "added to its name [policy.* in RUN_DIR]")
    parser.add_argument("--checks", type=count, default=1000, metavar="INT",
                        help="number of observations for which actions are compared [1000]")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    add_agent_flags(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser.parse(arguments)
