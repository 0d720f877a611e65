"""Implement `pytorchrl enjoy RUN_DIR`: play episodes with a trained agent, and show or film others."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.train import make_importable
from pytorchrl.reporting import by_policy, to_json
from pytorchrl.run_directory import MODEL_NAME
from pytorchrl.training import TrainedAgent, load
from pytorchrl.video import record_video, show_episodes


def run(arguments: Sequence[str]) -> int:
    """Play episodes and return the exit code."""
    given = _parse(arguments)
    if given.algorithm is not None or given.trust:
        make_importable()
    agent = load(given.run_dir, model=given.model, algorithm=given.algorithm, trust=given.trust)
    rendered = _render(agent, given)
    evaluation = agent.evaluate(given.episodes, seed=given.seed, deterministic=not given.stochastic)
    returns, lengths = list(evaluation.returns), list(evaluation.lengths)
    mean, deviation = statistics.fmean(returns), statistics.pstdev(returns)
    policies = {policy: statistics.fmean(values) for policy, values in evaluation.policy_returns.items()}
    if given.json:
        show(to_json({"return_mean": mean, "return_std": deviation, "episodes": len(returns),
                      "length_mean": statistics.fmean(lengths), "returns": returns,
                      **({"rendered_returns": list(rendered)} if rendered else {}),
                      **({"policy_return_means": policies} if policies else {})}))
    else:
        if rendered:
            verb = "showed" if given.render == "human" else f"filmed in {given.out}:"
            show(f"{verb} {len(rendered)} other {'episode' if len(rendered) == 1 else 'episodes'}, with returns of "
                 + ", ".join(f"{value:.1f}" for value in rendered))
        show(f"mean return of {len(returns)} evaluation episodes: {mean:.2f} "
             f"(standard deviation {deviation:.2f}, from {min(returns):.1f} to "
             f"{max(returns):.1f}){by_policy(policies)}")
    return 0


def _render(agent: TrainedAgent, given: argparse.Namespace) -> tuple[float, ...]:
    """Show or film episodes if that is asked for, and return their returns; otherwise, return an empty tuple.

    These episodes are not those of the evaluation, whose environments are stepped together and cannot be rendered.
    """
    options = {"num_episodes": given.episodes, "seed": given.seed, "deterministic": not given.stochastic}
    if given.render == "human":
        return show_episodes(agent, **options).returns
    return record_video(agent, given.out, **options).returns if given.render == "video" else ()


def count(text: str) -> int:
    """Return a number of episodes or checks, at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def whole_seed(text: str) -> int:
    """Return a seed for argparse."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pytorchrl enjoy", usage="pytorchrl enjoy RUN_DIR [flags]",
                    description="Play whole episodes with a trained agent and print their raw returns.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run, the --log-dir of training")
    parser.add_argument("--episodes", type=count, default=10, metavar="INT", help="number of episodes [10]")
    parser.add_argument("--seed", type=whole_seed, metavar="INT",
                        help="seed of environments and actions [the run's seed]")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the best action")
    parser.add_argument("--model", default=MODEL_NAME, metavar="NAME", help=f"name of the model [{MODEL_NAME}]")
    parser.add_argument("--algorithm", metavar="MODULE:CLASS",
                        help="class of the run's algorithm, to import if it is your own")
    parser.add_argument("--trust", action="store_true",
                        help="import code that the run names, such as a function of environments, and execute it")
    parser.add_argument("--render", choices=("human", "video"), metavar="MODE",
                        help="also show as many other episodes in a window (human), or film them (video, extra "
                             "`video`)")
    parser.add_argument("--out", metavar="DIR", help="directory of the videos [RUN_DIR/videos]")
    parser.add_argument("--video", metavar="DIR", help="the same as --render video --out DIR")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, in the last line")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    if given.video is not None:
        if given.render is not None or given.out is not None:
            parser.error("--video DIR is the same as --render video --out DIR; give only one of the two")
        given.render, given.out = "video", given.video
    if given.out is not None and given.render != "video":
        parser.error(f"--out {given.out} needs --render video")
    if given.render == "video" and given.out is None:
        given.out = os.path.join(given.run_dir, "videos")
    return given
