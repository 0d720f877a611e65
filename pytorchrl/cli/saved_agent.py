"""Declare the flags of the commands that use a trained agent, and load the agent."""

from __future__ import annotations

import argparse

from pytorchrl.cli.parsing import Parser
from pytorchrl.files.run_directory import MODEL_NAME
from pytorchrl.support.code import make_importable
from pytorchrl.training.training import TrainedAgent, load


def count(text: str) -> int:
    """Convert an argument to an integer, such as a number of episodes; refuse integers below 1.

    Raises:
        ArgumentTypeError: The text is no such integer.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def add_run_dir(parser: Parser) -> None:
    """Add the argument that names the directory of the run."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run, the --log-dir of training")


def add_episode_flags(parser: Parser, environment: str) -> None:
    """Add the flags for playing episodes; `environment` completes "seed of ..." in the help of `--seed`."""
    parser.add_argument("--episodes", type=count, default=10, metavar="INT", help="number of episodes [10]")
    parser.add_argument("--seed", type=_whole_seed, metavar="INT",
                        help=f"seed of {environment} and actions [the run's seed]")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the best action")


def add_agent_flags(parser: Parser) -> None:
    """Add the flags that `load_agent` reads, except the run's directory."""
    parser.add_argument("--model", default=MODEL_NAME, metavar="NAME", help=f"name of the model [{MODEL_NAME}]")
    parser.add_argument("--algorithm", metavar="MODULE:CLASS",
                        help="class of the run's algorithm, to import if it is your own")
    parser.add_argument("--trust", action="store_true",
                        help="import and execute code that the run names, such as a function that builds environments")


def load_agent(given: argparse.Namespace) -> TrainedAgent:
    """Load the agent of the run; `given` contains the parsed arguments."""
    if given.algorithm is not None or given.trust:
        make_importable()
    return load(given.run_dir, model=given.model, algorithm=given.algorithm, trust=given.trust)


def _whole_seed(text: str) -> int:
    """Convert an argument to a seed, a whole number from 0 to 2**63 - 1."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)
