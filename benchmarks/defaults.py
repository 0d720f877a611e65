"""Compare the presets of environments that belong to no suite with the options of CartPole, their earlier defaults.

    python benchmarks/defaults.py [--tasks empty highway maze swingup delay] [--defaults new old] [--seeds 1 2 3 4 5]
    python benchmarks/defaults.py --table docs/benchmarks/defaults.jsonl
    python benchmarks/defaults.py --list

Both kinds of runs use the same code, and differ only in the options that `train` chooses: "new" are the options of the
environment's kind, "old" those of `classic`. One line of JSON is printed per run: the mean return of sampled episodes
of the final policy, and the mean return over the training curve (`area`). From stored lines, `--table` prints for each
task the difference of the mean returns, and the probability that a run with the new defaults has a better final policy,
with their 95 % intervals. A tie counts as half an improvement.
`--list` trains nothing, and prints the first line of a run with each of the installed environments.

The tasks need the extra `envs`. A run takes 10 to 40 seconds of one core, and with highway-env 100 seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from asynchronous import area_of
from gymnasium.spaces import Box, Discrete
from results import origin

from pytorchrl import analysis, train
from pytorchrl.training import presets
from pytorchrl.training.training import make_learner


class Delay(gym.Env):
    """Drive a cart to a target and stop there within 200 steps; only the last reward tells how well that was done."""

    observation_space, action_space = Box(-np.inf, np.inf, (4,), np.float32), Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps, self._speed = 0, 0.0
        self._place, self._target = self.np_random.uniform(-1.0, 1.0, 2)
        return self._observation(), {}

    def step(self, action):
        self._steps += 1
        self._speed = 0.95 * self._speed + 0.005 * (action - 1)
        self._place += self._speed
        is_over = self._steps == 200
        reward = 10.0 - 10.0 * min(1.0, abs(self._place - self._target)) if is_over else 0.0
        return self._observation(), reward, is_over, False, {}

    def _observation(self):
        return np.array([self._place, 20 * self._speed, self._target, self._steps / 200], np.float32)


class Task(NamedTuple):
    """An environment to train in.

    Attributes:
        env: The environment, as `train` takes it.
        steps: Number of env steps.
        algorithm: The algorithm.
        episodes: Number of episodes of the final evaluation.
        options: Options of `train` that all runs share.
    """

    env: Any
    steps: int
    algorithm: str = "ppo"
    episodes: int = 100
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


IMAGE_ONLY = {"wrappers": ["minigrid.wrappers:ImgObsWrapper"]}
TASKS = {
    "empty": Task("minigrid:MiniGrid-Empty-5x5-v0", 60_000, options=IMAGE_ONLY),
    "maze": Task("gymnasium_robotics:PointMaze_UMazeDense-v3", 50_000, episodes=30),
    "swingup": Task("shimmy:dm_control/cartpole-swingup-v0", 50_000, episodes=10),
    "delay": Task(Delay, 60_000),
    "highway": Task("highway_env:highway-fast-v0", 10_000, episodes=20,
                    options={"env_kwargs": {"config": {"vehicles_count": 5}}}),
}
# More environments, for the list of the presets that `train` chooses: environment -> options.
LISTED: dict[str, dict[str, Any]] = {
    "minigrid:MiniGrid-DoorKey-8x8-v0": IMAGE_ONLY,
    "minigrid:MiniGrid-FourRooms-v0": {"wrappers": ["minigrid.wrappers:FlatObsWrapper"]},
    "minigrid:MiniGrid-Unlock-v0": {"wrappers": ["minigrid.wrappers:RGBImgObsWrapper",
                                                 "minigrid.wrappers:ImgObsWrapper"]},
    "highway_env:parking-v0": {}, "highway_env:merge-v0": {}, "highway_env:racetrack-v0": {},
    "gymnasium_robotics:PointMaze_Large-v3": {}, "gymnasium_robotics:AntMaze_UMaze-v5": {},
    "gymnasium_robotics:AdroitHandDoor-v1": {},
    "shimmy:dm_control/reacher-easy-v0": {}, "shimmy:dm_control/walker-walk-v0": {},
    "shimmy:dm_control/quadruped-run-v0": {}, "shimmy:dm_control/humanoid-stand-v0": {},
    "mpe2.simple_spread_v3": {"policies": "shared"},
    "phys2d/CartPole-v1": {"wrappers": ["gymnasium.wrappers:JaxToNumpy"]},
    "tabular/Blackjack-v0": {"wrappers": ["gymnasium.wrappers:JaxToNumpy"]},
    "ALE/Tetris-v5": {}, "Ant-v5": {}, "CarRacing-v3": {}, "Taxi-v4": {}, "Blackjack-v1": {},
}


def use_old_defaults() -> None:
    """Give environments without a suite the options of `classic`."""
    for (algorithm, suite), options in presets.registered().copy().items():
        if suite == "classic":
            for kind in presets.KINDS:
                presets.register(algorithm, kind, options)


def run(name: str, seed: int) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as folder:
        log_dir, start = Path(folder) / "run", time.process_time()
        agent = train(task.algorithm, task.env, target_steps=task.steps, seed=seed, log_dir=log_dir, progress=False,
                      **task.options)
        seconds = time.process_time() - start
        lines = (log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"final": agent.evaluate(task.episodes, deterministic=False, seed=1).return_mean,
            "area": area_of(list(map(json.loads, lines))), "updates": agent.summary["updates"], "cpu_s": seconds}


def table(lines: Iterable[str]) -> str:
    """Return a table with the probability of improvement of each task."""
    scores: dict[str, dict[str, list[float]]] = {}
    for record in map(json.loads, lines):
        if record["defaults"] not in ("new", "old"):  # an earlier state of the new ones, or a single changed option
            continue
        scores.setdefault(f"{record['task']}, {record['steps']:,} steps", {"new": [], "old": []})[
            record["defaults"]].append(record["final"])
    text = ["| task | seeds | old: mean (smallest to largest) | new | new - old | probability of improvement |",
            "|---|---|---|---|---|---|"]
    for task, of in scores.items():
        new, old = ([[score] for score in of[name]] for name in ("new", "old"))
        if new and old:
            shown = [f"{statistics.fmean(of[name]):.3g} ({min(of[name]):.3g} to {max(of[name]):.3g})"
                     for name in ("old", "new")]
            found = analysis.compare(new, old)
            text.append(f"| {task} | {len(new)} | {' | '.join(shown)} | {found.mean_difference:.2g} | "
                        f"{found.improvement:.2f} |")
    return "\n".join(text) + "\n"


def head_line(env: Any, options: dict[str, Any]) -> str:
    """Return the line that `train` shows first, up to the names of options."""
    learner, _ = make_learner("ppo", env, **options)
    return str(learner._title).partition(";")[0]  # shown with the progress


def main() -> None:
    """Train in each task with each seed and both defaults, and print the results."""
    parser = argparse.ArgumentParser(description="Compare presets of kinds of environments with CartPole's options.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--defaults", nargs="+", choices=["new", "old"], default=["new", "old"])
    parser.add_argument("--steps", type=int, help="env steps of each run, instead of the task's")
    parser.add_argument("--list", action="store_true", help="train nothing, and list environments and their presets")
    parser.add_argument("--table", type=Path, help="train nothing, and print a table of the results in this file")
    args = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "disabled")
    warnings.simplefilter("ignore")
    if args.table is not None:
        print(table(args.table.read_text(encoding="utf-8").splitlines()), end="")
        return
    if args.list:
        tasks = {task.env: task.options for task in TASKS.values() if isinstance(task.env, str)}
        for env, options in (tasks | LISTED).items():
            module = env.partition(":")[0].partition(".")[0] if ":" in env or "." in env else "gymnasium"
            if importlib.util.find_spec(module) is not None:
                print(f"{env}: {head_line(env, options)}", flush=True)
        return
    for seed, name, defaults in product(args.seeds, args.tasks, args.defaults):
        if args.steps is not None:
            TASKS[name] = TASKS[name]._replace(steps=args.steps)
        kept = dict(presets.registered())
        if defaults == "old":
            use_old_defaults()
        result = run(name, seed)
        for key, options in kept.items():
            presets.register(*key, options)
        print(json.dumps({**origin(), "task": name, "algorithm": TASKS[name].algorithm, "defaults": defaults,
                          "seed": seed, "steps": TASKS[name].steps, **result}), flush=True)


if __name__ == "__main__":
    main()
