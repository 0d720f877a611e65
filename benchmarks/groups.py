"""Compare PPO with a critic that sees a hidden state to PPO without: scores, and the interval of their difference.

    python benchmarks/groups.py [--seeds 5] [--steps 20000] [--load 30]

In each episode, a hidden load is drawn, which is added to the reward of every step. The rest of the reward is the
negative squared distance of the action from a measured place, so the best policy does not depend on the load. However,
a critic that does not see the load cannot predict the returns, and all advantages contain its noise. Both policies see
only the leaf `measured`. The score is the mean return of 100 evaluation episodes without a load. The script prints one
line of JSON per run, and one for the difference of the means with its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import gymnasium as gym
import numpy as np
from results import origin

import pytorchrl as prl
from pytorchrl import analysis

CRITICS = {"hidden": ["measured", "hidden"], "measured": ["measured"]}
Observation = dict[str, np.ndarray]


class Load(gym.Env[Observation, np.ndarray]):
    """A task of 16 steps with a hidden load, which is uniform in [-size, size]."""

    observation_space = gym.spaces.Dict({"measured": gym.spaces.Box(-1.0, 1.0, (4,), np.float32),
                                         "hidden": gym.spaces.Box(-1.0, 1.0, (1,), np.float32)})
    action_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, size: float) -> None:
        self._size = size

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        """Draw a load and a place."""
        super().reset(seed=seed)
        self._load, self._left = self.np_random.uniform(-1, 1, 1).astype(np.float32), 16
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Return the reward for an action at the last place, and draw the next place."""
        reward = self._size * float(self._load[0]) - float(np.square(action - self._place).sum())
        self._left -= 1
        return self._observe(), reward, self._left == 0, False, {}

    def _observe(self) -> Observation:
        self._place = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return {"measured": self._place, "hidden": self._load}


def run(critic: str, seed: int, steps: int, load: float) -> dict[str, Any]:
    """Train once, and return the score."""
    agent = prl.train(
        "ppo", Load, obs_groups={"actor": ["measured"], "critic": CRITICS[critic]}, env_kwargs={"size": load},
        test_env_kwargs={"size": 0.0}, num_envs=8, num_steps=128, target_steps=steps, seed=seed, progress=False,
        tensorboard=False)
    return {"load": load, "critic": critic, "seed": seed, "env_steps": agent.summary["env_steps"],
            "return": agent.evaluate(100, seed=1).return_mean}


def main() -> None:
    """Train with each critic and seed, and compare the scores."""
    parser = argparse.ArgumentParser(description="Measure the effect of a critic that sees a hidden state.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--load", type=float, default=30.0, help="largest load")
    args = parser.parse_args()
    scores: dict[str, list[float]] = {critic: [] for critic in CRITICS}
    for seed in range(1, args.seeds + 1):
        for critic, found in scores.items():
            result = run(critic, seed, args.steps, args.load)
            found.append(result["return"])
            print(json.dumps({**origin(), **result}), flush=True)
    if args.seeds > 1:
        difference = analysis.estimate(analysis.difference(analysis.mean), scores["hidden"], scores["measured"], seed=1)
        print(json.dumps({**origin(), "load": args.load, "env_steps": args.steps,
                          "difference": difference.as_dict()}), flush=True)


if __name__ == "__main__":
    main()
