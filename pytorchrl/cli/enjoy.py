"""Implement `pytorchrl enjoy RUN_DIR`: evaluate a trained agent, and optionally show or film the episodes."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

from pytorchrl.agent.data import Evaluation
from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.saved_agent import add_agent_flags, add_episode_flags, add_run_dir, load_agent
from pytorchrl.learner.reporting import by_policy, to_json
from pytorchrl.play.video import record_video, show_episodes
from pytorchrl.training.training import TrainedAgent


def run(arguments: Sequence[str]) -> int:
    """Play episodes and return the exit code."""
    given = _parse(arguments)
    agent = load_agent(given)
    evaluation = _play(agent, given)
    returns, lengths = list(evaluation.returns), list(evaluation.lengths)
    mean, deviation = statistics.fmean(returns), statistics.pstdev(returns)
    policies = {policy: statistics.fmean(values) for policy, values in evaluation.policy_returns.items()}
    if given.json:
        show(to_json({"return_mean": mean, "return_std": deviation, "episodes": len(returns),
                      "length_mean": statistics.fmean(lengths), "returns": returns,
                      **({"videos": given.out} if given.render == "video" else {}),
                      **({"policy_return_means": policies} if policies else {})}))
    else:
        show(f"mean return of {len(returns)} evaluation episodes: {mean:.2f} "
             f"(standard deviation {deviation:.2f}, from {min(returns):.1f} to "
             f"{max(returns):.1f}){by_policy(policies)}")
        if given.render == "video":
            show(f"filmed in {given.out}")
    return 0


def _play(agent: TrainedAgent, given: argparse.Namespace) -> Evaluation:
    """Play the episodes; with `--render`, one after the other in a single environment, which can be shown or filmed."""
    options = {"num_episodes": given.episodes, "seed": given.seed, "deterministic": not given.stochastic}
    if given.render == "human":
        return show_episodes(agent, **options)
    if given.render == "video":
        return record_video(agent, given.out, **options)
    return agent.evaluate(**options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pytorchrl enjoy", usage="pytorchrl enjoy RUN_DIR [flags]",
                    description="Play whole episodes with a trained agent and print their raw returns.")
    add_run_dir(parser)
    add_episode_flags(parser, "environments")
    add_agent_flags(parser)
    parser.add_argument("--render", choices=("human", "video"), metavar="MODE",
                        help="play the episodes in a window, or print token tasks (human), or film them (video, "
                             "extra `video`)")
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
        if os.path.islink(given.out):
            parser.error(f"{given.out} is a link, which may come from the author of the run; name the directory of the "
                         "videos with --out DIR")
    return given
