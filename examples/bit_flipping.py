"""Learn to flip bits until they match a goal, with hindsight experience replay (Andrychowicz et al. 2017).

    python examples/bit_flipping.py [--bits 8] [--relabel none] [--smoke]

With many bits, random actions almost never reach the goal, so without `relabel` all rewards are equal.
"""

from __future__ import annotations

import argparse
import functools

import gymnasium as gym
import numpy as np

from pytorchrl import train


class BitFlipping(gym.Env):
    """N bits, of which each action flips one; an episode ends at the goal, or after N steps.

    The reward of a step is 0 if the bits equal the goal, and -1 otherwise.
    """

    def __init__(self, num_bits: int = 8) -> None:
        bits = gym.spaces.MultiBinary(num_bits)
        self.observation_space = gym.spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), bits))
        self.action_space = gym.spaces.Discrete(num_bits)
        self._num_bits, self._num_steps = num_bits, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._bits, self._goal = self.np_random.integers(0, 2, (2, self._num_bits), dtype=np.int8)
        self._num_steps = 0
        return self._observation(), {}

    def step(self, action):
        self._bits[action] ^= 1
        self._num_steps += 1
        reward = float(self.compute_reward(self._bits, self._goal, {}))
        return self._observation(), reward, reward == 0.0, self._num_steps >= self._num_bits, {}

    @staticmethod
    def compute_reward(achieved_goal, desired_goal, info):
        """Return the rewards for achieved and desired goals, (..., num_bits), as an array (...)."""
        return (achieved_goal == desired_goal).all(-1) - 1.0

    @staticmethod
    def compute_terminated(achieved_goal, desired_goal, info):
        """Return whether episodes end; see `compute_reward`."""
        return (achieved_goal == desired_goal).all(-1)

    def _observation(self):
        return {"observation": self._bits.copy(), "achieved_goal": self._bits.copy(), "desired_goal": self._goal.copy()}
