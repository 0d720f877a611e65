"""Compare PPO with an intrinsic reward (random network distillation) to PPO without, where rewards are far away.

    python benchmarks/exploration.py [--seeds 3] [--steps 100000] [--length 40]

The states of the task are a chain. In each state, one of two actions, which differs from state to state, leads to the
next state, and the other one leads back. Only the last state has a reward, 1, and an episode has 9 steps more than the
chain has states, so a policy that acts at random practically never receives it. The score is the mean return of 10
evaluation episodes. The script prints one line of JSON per run.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import gymnasium as gym
import numpy as np
from results import origin

import pytorchrl as prl

VARIANTS: dict[str, dict[str, Any]] = {"ppo": {}, "ppo with rnd": {"intrinsic_reward": "rnd"}}


class Chain(gym.Env[np.ndarray, np.int64]):
    """A chain of states, of which only the last has a reward; observations are one-hot."""

    def __init__(self, length: int) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._forward = np.random.default_rng(0).integers(2, size=length)
        self._place = self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Return to the first state."""
        super().reset(seed=seed)
        self._place = self._num_steps = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move by one state."""
        self._place = self._place + 1 if action == self._forward[self._place] else max(0, self._place - 1)
        self._num_steps += 1
        is_last = self._place == len(self._forward) - 1
        return self._observe(), float(is_last), is_last, self._num_steps >= len(self._forward) + 9, {}

    def _observe(self) -> np.ndarray:
        return np.eye(len(self._forward), dtype=np.float32)[self._place]


def run(variant: str, seed: int, steps: int, length: int) -> dict[str, Any]:
    """Train once, and return the score."""
    agent = prl.train(
        "ppo", Chain, env_kwargs={"length": length}, num_envs=8, num_steps=128, num_epochs=2, num_mini_batch=4, lr=1e-3,
        entropy_coef=0.001, normalize_obs=False, normalize_reward=False, target_steps=steps, seed=seed, progress=False,
        tensorboard=False, **VARIANTS[variant])
    return {"variant": variant, "length": length, "seed": seed, "env_steps": agent.summary["env_steps"],
            "seconds": round(agent.summary["seconds"], 1), "return": agent.evaluate(10, seed=1).return_mean}


def main() -> None:
    """Train each variant with each seed."""
    parser = argparse.ArgumentParser(description="Measure what an intrinsic reward finds that PPO does not.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=40, help="number of states")
    args = parser.parse_args()
    for seed in range(1, args.seeds + 1):
        for variant in VARIANTS:
            print(json.dumps({**origin(), **run(variant, seed, args.steps, args.length)}), flush=True)


if __name__ == "__main__":
    main()
