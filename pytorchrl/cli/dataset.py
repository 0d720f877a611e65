"""Implement `pytorchrl dataset RUN_DIR`: write episodes of a trained agent as a data set."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from pytorchrl.cli.output import show, show_stderr
from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.saved_agent import add_agent_flags, add_episode_flags, add_run_dir, load_agent
from pytorchrl.play.dataset import record_dataset

# Shortest time between two lines of progress, in seconds.
_INTERVAL_S = 5.0


def run(arguments: Sequence[str]) -> int:
    """Record the episodes and return the exit code."""
    given = _parse(arguments)
    agent = load_agent(given)
    dataset = record_dataset(
        agent, given.out, num_episodes=given.episodes, deterministic=not given.stochastic, seed=given.seed,
        overwrite=given.overwrite, on_episode=_progress(given.episodes))
    returns = dataset.returns.tolist()
    show(f"wrote {given.out}: {len(returns)} {'episode' if len(returns) == 1 else 'episodes'}, "
         f"{len(dataset.rewards):,} steps, mean return {statistics.fmean(returns):.2f} (from {min(returns):.1f} to "
         f"{max(returns):.1f})")
    return 0


def _progress(num_episodes: int) -> Callable[[int, int], None]:
    """Return a function that prints the number of episodes so far, at most once in `_INTERVAL_S` seconds."""
    last = time.monotonic()

    def report(episodes: int, steps: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _INTERVAL_S:
            last = time.monotonic()
            show_stderr(f"{episodes:,} of {num_episodes:,} episodes, {steps:,} steps")
    return report


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pytorchrl dataset", usage="pytorchrl dataset RUN_DIR --out FILE [flags]",
                    description="Play whole episodes with a trained agent, and write their observations, actions and "
                                "raw rewards as a data set.")
    add_run_dir(parser)
    parser.add_argument("--out", required=True, metavar="FILE",
                        help="a file *.npz, or, without a suffix, the id of a data set of Minari, such as "
                             "cartpole/expert-v0 (extra `offline`)")
    add_episode_flags(parser, "the environment")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing data set")
    add_agent_flags(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser.parse(arguments)
