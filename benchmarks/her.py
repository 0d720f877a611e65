"""Measure how many goals are reached with and without hindsight experience replay.

    python benchmarks/her.py [--tasks bits maze] [--relabel future none] [--bits 15] [--seeds 1] [--steps STEPS]

| task | environment and algorithm |
|---|---|
| `bits` | flip `--bits` bits until they equal a goal, in at most as many steps (Andrychowicz et al. 2017), with DQN |
| `maze` | accelerate a point to a goal in a room of 15 x 15 squares (`pytorchrl/TorchPointMaze-v0`), with SAC |

In both tasks, the reward only tells whether the goal is reached. `success` is the share of 200 evaluation episodes that
reach their goal. In the room, each episode has 80 steps, and the way to the farthest goal takes 75; uniformly random
actions reach 4 % of the goals. The task `drawing` measures the time of drawing 256 transitions from a replay of
100,000 with episodes of 50 steps. The script prints one line of JSON per run, and asserts nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from results import print_result

import pytorchrl as prl
from pytorchrl.agent.data import RolloutData
from pytorchrl.envs.tensors.maze import TorchPointMaze

_ROOM = 17
"""Side of the room, with its walls."""
_MAZE_STEPS = 80


def bit_flipping() -> Any:
    """Return the module of the example that contains the environment."""
    path = Path(__file__).parents[1] / "examples" / "bit_flipping.py"
    spec = importlib.util.spec_from_file_location("bit_flipping", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task_of(name: str, bits: int) -> tuple[str, Any, dict[str, Any], Any]:
    """Return the algorithm, the environment, the options of `train` and the function of terminations of a task."""
    if name == "bits":
        cls = bit_flipping().BitFlipping
        return "dqn", functools.partial(cls, bits), {
            "target_steps": 40_000, "num_envs": 8, "num_steps": 2, "replay_size": 100_000, "start_steps": 500,
            "update_every": 16, "num_updates": 4, "mini_batch_size": 128, "hidden_sizes": (256,), "lr": 1e-3,
            "gamma": 0.98, "polyak": 0.95, "target_update_interval": 1, "initial_epsilon": 0.3, "final_epsilon": 0.05,
            "epsilon_steps": 20_000}, cls.compute_terminated
    maze = "#" * _ROOM, *["#" + "." * (_ROOM - 2) + "#"] * (_ROOM - 2), "#" * _ROOM
    return "sac", "pytorchrl/TorchPointMaze-v0", {
        "env_kwargs": {"maze": maze, "max_episode_steps": _MAZE_STEPS}, "reward_transform": minus_one,
        "target_steps": 30_000, "num_envs": 16, "num_steps": 2, "replay_size": 100_000, "start_steps": 1_000,
        "update_every": 32, "num_updates": 8, "mini_batch_size": 128, "hidden_sizes": (64, 64), "lr_q": 1e-3,
        "lr_pi": 1e-3, "lr_alpha": 1e-3, "polyak": 0.99, "gamma": 0.98, "normalize_obs": True}, (
            TorchPointMaze.compute_terminated)


def minus_one(reward: np.ndarray) -> np.ndarray:
    """Return rewards of -1 in each step until the goal is reached, as in Andrychowicz et al. 2017."""
    return reward - 1.0


def run(name: str, relabel: str | None, seed: int, bits: int, steps: int | None) -> dict[str, Any]:
    """Train once, and return the share of goals that are reached."""
    algorithm, env, options, terminated = task_of(name, bits)
    if steps is not None:
        options["target_steps"] = steps
    if relabel is not None:
        options |= {"relabel": relabel, "goal_terminated": terminated}
    start = time.process_time()
    agent = prl.train(algorithm, env, seed=seed, progress=False, **options)
    cpu_s = time.process_time() - start
    return {"task": name, "algorithm": algorithm, **({"bits": bits} if name == "bits" else {}), "relabel": relabel,
            "seed": seed, "env_steps": agent.summary["env_steps"], "updates": agent.summary["updates"],
            "success": success(name, agent), "cpu_s": round(cpu_s, 1)}


def success(name: str, agent: prl.TrainedAgent) -> float:
    """Return the share of 200 evaluation episodes that reach the goal."""
    games = agent.evaluate(200)
    # In the step that reaches the goal, the reward is one more than in all others: 0 instead of -1, or 1 instead of 0.
    least = -np.array(games.lengths) if name == "bits" else 0
    return float(np.mean(np.array(games.returns) > least))


def drawing(relabel: str | None, num_draws: int) -> dict[str, Any]:
    """Return the time of drawing a batch, with and without new goals."""
    steps, envs = 50, 20
    own = {} if relabel is None else {
        "relabel": relabel, "goal_reward": lambda achieved, desired, info: np.linalg.norm(
            achieved - desired, axis=-1) < 0.5}
    storage = prl.ReplayBuffer.create_factory(100_000, rollout_size=steps, **own)(
        actor=SimpleNamespace(initial_states=lambda num_envs: {}), algorithm=SimpleNamespace(gamma=0.98),
        num_envs=envs, seed=1)
    rng = np.random.default_rng(1)
    flags = torch.zeros(steps, envs, dtype=torch.bool)
    truncated, done = flags.clone(), torch.zeros(steps + 1, envs, dtype=torch.bool)
    truncated[-1], done[0], done[-1] = True, True, True
    sizes = {"observation": 10, "achieved_goal": 3, "desired_goal": 3}
    start = time.process_time()
    for _ in range(100_000 // steps // envs):
        obs = {name: torch.from_numpy(rng.random((steps + 1, envs, size), np.float32) + 9.0 * (name == "desired_goal"))
               for name, size in sizes.items()}
        storage.insert_data_slice([RolloutData(
            obs=obs, done=done, rhs={}, mask=None, action=torch.zeros(steps, envs, 4), reward=torch.zeros(steps, envs),
            terminated=flags, truncated=truncated, valid=~flags,
            final_index=torch.stack([torch.full((envs,), steps - 1), torch.arange(envs)], 1),
            final_obs={name: leaf[-1] for name, leaf in obs.items()})])
    inserting = time.process_time() - start
    times = []
    for _ in range(num_draws):
        start = time.perf_counter()
        storage.sample(256)
        times.append(time.perf_counter() - start)
    return {"task": "drawing", "relabel": relabel, "batch": 256, "us": round(1e6 * float(np.median(times)), 1),
            "insert_us_per_step": round(1e6 * inserting / 100_000, 3), "bytes_per_step": storage.num_bytes / 100_000}


def main() -> None:
    """Run the tasks, and print a line for each run."""
    parser = argparse.ArgumentParser(description="Measure hindsight experience replay.")
    parser.add_argument("--tasks", nargs="+", default=["bits", "maze", "drawing"], choices=("bits", "maze", "drawing"))
    parser.add_argument("--relabel", nargs="+", default=["future", "none"],
                        choices=("future", "final", "episode", "none"))
    parser.add_argument("--bits", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None, help="env steps of a run; by default, those of the task")
    parser.add_argument("--draws", type=int, default=2_000, help="batches that the task drawing draws")
    args = parser.parse_args()
    for task in args.tasks:
        for relabel in (None if name == "none" else name for name in args.relabel):
            if task == "drawing":
                print_result(drawing(relabel, args.draws), indent=None)
            else:
                for seed in range(1, args.seeds + 1):
                    print_result(run(task, relabel, seed, args.bits, args.steps), indent=None)


if __name__ == "__main__":
    main()
