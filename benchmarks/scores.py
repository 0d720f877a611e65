"""Measure reference scores: which returns does training reach, after how many env steps and how much processor time?

    python benchmarks/scores.py [--cases sac-halfcheetah crossq-walker2d] [--seeds 1 2 3 4 5] [--hours 1.0]
    python benchmarks/scores.py --list

Each case of `CASES` trains with the settings of the published score beside it, or with those of a preset. A run is a
process of its own with one thread. When it ends, its line of JSON is appended to `docs/benchmarks/scores.jsonl`, and
later calls skip it, so the table grows in as many calls as needed: no new run starts after `--hours`. A line contains
the return of the final policy (20 episodes without exploration, of its own seed), the mean return of the last 100
training episodes, the processor's time, and the learning curve: env steps, processor seconds so far, and mean return of
an evaluation at this point. Evaluations count as processor time. `report.py` makes the tables and figures of the file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from recurrent import Shown
from results import origin

from pytorchrl import linear, train
from pytorchrl.callbacks import Callback

OUT = Path(__file__).parent.parent / "docs" / "benchmarks" / "scores.jsonl"
POINTS, EPISODES = 20, 10
"""Evaluations of a run, and their episodes."""


class Case(NamedTuple):
    """A run to repeat with several seeds.

    Attributes:
        algorithm: The name that `train` takes.
        env: Id of the environment.
        steps: Number of env steps.
        options: Further options of `train`.
        published: The score to compare with, and its source; empty if there is none.
        seeds: Number of seeds.
    """

    algorithm: str
    env: str
    steps: int
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    published: str = ""
    seeds: int = 5

    @property
    def env_name(self) -> str:
        """Id of the environment, with its wrapper."""
        return f"{self.env}, velocity hidden" if "wrappers" in self.options else self.env


_SIMBA = "10 seeds, SimbaV2's results"
_PUBLISHED = {
    ("qrdqn", "CartPole-v1"): "386 ± 64 (sb3-contrib)", ("qrdqn", "Acrobot-v1"): "-73 ± 2 (sb3-contrib)",
    ("qrdqn", "LunarLander-v3"): "168 ± 39 (sb3-contrib, v2)", ("c51", "CartPole-v1"): "481 ± 21 (CleanRL, 500k steps)",
    ("c51", "Acrobot-v1"): "-88 ± 6 (CleanRL, 500k steps)"}
_DISCRETE = {
    "num_steps": 4, "update_every": 4, "num_updates": 2, "replay_size": 50_000, "start_steps": 1000, "gamma": 0.98,
    "mini_batch_size": 128, "hidden_sizes": (64, 64), "lr_q": 1e-3, "lr_pi": 1e-3}
_HIDDEN = {"wrappers": (functools.partial(Shown, entries=(0, 1)),)}
_PPO = {"normalize_obs": False, "normalize_reward": False}
CASES = {
    "ppo-cartpole": Case("ppo", "CartPole-v1", 100_000, {
        **_PPO, "num_envs": 8, "num_steps": 32, "gae_lambda": 0.8, "num_epochs": 20, "num_mini_batch": 1, "gamma": 0.98,
        "lr": linear(1e-3, 0.0), "clip_param": linear(0.2, 0.0), "entropy_coef": 0.0}, "500 (RL-Zoo, evaluated)", 3),
    "ppo-acrobot": Case("ppo", "Acrobot-v1", 200_000, {
        **_PPO, "num_envs": 16, "num_steps": 256, "gae_lambda": 0.94, "num_epochs": 4, "num_mini_batch": 64,
        "gamma": 0.99, "lr": 3e-4, "entropy_coef": 0.0}, "-73.5 ± 18 (RL-Zoo, 1M steps)", 3),
    "ppo-pendulum": Case("ppo", "Pendulum-v1", 100_000, {
        **_PPO, "num_envs": 4, "num_steps": 1024, "gae_lambda": 0.95, "num_epochs": 10, "num_mini_batch": 64,
        "gamma": 0.9, "lr": 1e-3, "entropy_coef": 0.0}, "-172 ± 104 (RL-Zoo, with gSDE)", 3),
    "ppo-lunarlander": Case("ppo", "LunarLander-v3", 1_000_000, {
        **_PPO, "num_envs": 16, "num_steps": 1024, "gae_lambda": 0.98, "num_epochs": 4, "num_mini_batch": 256,
        "gamma": 0.999, "lr": 3e-4, "entropy_coef": 0.01}, "242 ± 32 (RL-Zoo, v2)", 3),
    "ppo-halfcheetah": Case("ppo", "HalfCheetah-v5", 1_000_000, {
        "num_envs": 1, "num_steps": 2048, "gae_lambda": 0.95, "normalize_obs": True, "normalize_reward": True,
        "num_epochs": 10, "num_mini_batch": 32, "gamma": 0.99, "lr": linear(3e-4, 0.0), "entropy_coef": 0.0,
        "use_clipped_value_loss": True}, "1443 ± 46 (CleanRL, v4, while training)", 3),
    "sac-halfcheetah": Case("sac", "HalfCheetah-v4", 100_000, {}, f"6,156 ± 738 ({_SIMBA})"),
    "sac-walker2d": Case("sac", "Walker2d-v4", 100_000, {}, f"690 ({_SIMBA})"),
    "td3-halfcheetah": Case("td3", "HalfCheetah-v4", 100_000),
    "td3-walker2d": Case("td3", "Walker2d-v4", 100_000),
    "crossq-halfcheetah": Case("crossq", "HalfCheetah-v4", 100_000, {}, f"8,112 ± 944 (2,048 units; {_SIMBA})"),
    "crossq-walker2d": Case("crossq", "Walker2d-v4", 100_000, {}, f"3,914 (2,048 units; {_SIMBA})"),
    "sac200k-halfcheetah": Case("sac", "HalfCheetah-v4", 200_000, {}, f"7,679 ± 898 ({_SIMBA})"),
    "droq-halfcheetah": Case("droq", "HalfCheetah-v4", 25_000, seeds=3),
    "sac-bipedalwalker": Case("sac", "BipedalWalker-v3", 300_000, seeds=3),
    "tqc-bipedalwalker": Case("tqc", "BipedalWalker-v3", 300_000, seeds=3),
    **{f"{name}-{env.partition('-')[0].lower()}": Case(name, env, steps, {}, _PUBLISHED.get((name, env), ""))
       for env, steps in (("CartPole-v1", 100_000), ("Acrobot-v1", 100_000), ("LunarLander-v3", 250_000))
       for name in ("dqn", "c51", "qrdqn", "rainbow")},
    "pqn-cartpole": Case("pqn", "CartPole-v1", 500_000, {}, "495 ± 7 (CleanRL)"),
    "pqn-acrobot": Case("pqn", "Acrobot-v1", 500_000, {}, "-96 ± 6 (CleanRL)"),
    "pqn-lunarlander": Case("pqn", "LunarLander-v3", 500_000),
    **{f"{name}-cartpole": Case(name, "CartPole-v1", 100_000) for name in ("a2c", "impala", "appo", "r2d2")},
    "sac-cartpole": Case("sac", "CartPole-v1", 100_000, _DISCRETE),
    **{f"{name}-pendulum": Case(name, "Pendulum-v1", 20_000) for name in ("sac", "td3", "ddpg", "mpo")},
    "sac+simba-pendulum": Case("sac", "Pendulum-v1", 20_000, {
        "block": "simba", "hidden_sizes": (64,), "normalize_obs": True, "optimizer": "adamw"}),
    "sac+gru-hidden": Case("sac", "Pendulum-v1", 20_000, {
        **_HIDDEN, "recurrent_net": "gru", "recurrent_size": 64, "update_every": 4, "num_updates": 1}),
    "sac-hidden": Case("sac", "Pendulum-v1", 20_000, _HIDDEN),
}


class Curve(Callback):
    """The learning curve of a run: env steps, seconds of the processor so far, and the mean return of an evaluation.

    Attributes:
        points: The points so far.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float]] = []

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        """Add a point."""
        point = run.scheme.env_steps, round(time.process_time(), 1), round(evaluation.return_mean, 2)
        self.points.append(point)


def run(name: str, seed: int) -> dict[str, Any]:
    """Train once, and return the results."""
    case, curve = CASES[name], Curve()
    warnings.simplefilter("ignore")
    start = time.process_time()
    agent = train(
        case.algorithm, case.env, target_steps=case.steps, seed=seed, progress=False, callbacks=[curve],
        eval_every=case.steps // POINTS, eval_episodes=EPISODES, **case.options)
    seconds = time.process_time() - start
    final = agent.evaluate(20, seed=seed)
    return {"case": name, "algorithm": case.algorithm, "env": case.env_name, "seed": seed,
            "env_steps": agent.summary["env_steps"], "updates": agent.summary["updates"], "cpu_s": round(seconds, 1),
            "eval_return": round(final.return_mean, 2), "eval_std": round(final.return_std, 2),
            "train_return": round(agent.summary["return_mean"], 2), "curve": curve.points}


def main() -> None:
    """Parse the command line, make the runs that are missing, and store their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of each case; default: from 1 to its number")
    parser.add_argument("--hours", type=float, default=1.0, help="hours after which no run is started")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--list", action="store_true", help="train nothing, and print all cases")
    parser.add_argument("--run", nargs=2, metavar=("CASE", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps({**origin(), **run(options.run[0], int(options.run[1]))}, ensure_ascii=False))
        return
    if options.list:
        for name, case in CASES.items():
            print(f"{name:22} {case.env_name:28} {case.steps:9,} steps, {case.seeds} seeds  {case.published}")
        return
    end = time.monotonic() + 3600 * options.hours
    wanted = {name: options.seeds or range(1, CASES[name].seeds + 1) for name in options.cases}
    # The first seed of all cases comes first, so that a table that is not finished has a row for each case.
    for seed, name in sorted((seed, name) for name, seeds in wanted.items() for seed in seeds):
        lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
        if any((found["case"], found["seed"]) == (name, seed) for found in map(json.loads, lines)):
            continue
        if time.monotonic() > end:
            return
        found = subprocess.run(
            [sys.executable, __file__, "--run", name, str(seed)], check=True, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout.splitlines()[-1]
        with options.out.open("a", encoding="utf-8") as file:
            file.write(f"{found}\n")
        print(found, flush=True)


if __name__ == "__main__":
    main()
