"""Tests that PPO with an intrinsic reward solves a chain whose only reward PPO without one never receives."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import train

LENGTH = 40
SETTINGS = {"num_envs": 8, "num_steps": 128, "num_epochs": 2, "num_mini_batch": 4, "lr": 1e-3, "entropy_coef": 0.001,
            "normalize_obs": False, "normalize_reward": False, "progress": False}


class Chain(gym.Env):
    """One of two actions, which differs from state to state, leads on; an episode has 9 steps more than states."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0.0, 1.0, (LENGTH,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.forward = np.random.default_rng(0).integers(2, size=LENGTH)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.num_steps = 0
        return np.eye(LENGTH, dtype=np.float32)[0], {}

    def step(self, action):
        self.place = self.place + 1 if action == self.forward[self.place] else max(0, self.place - 1)
        self.num_steps += 1
        is_last = self.place == LENGTH - 1
        return (np.eye(LENGTH, dtype=np.float32)[self.place], float(is_last), is_last,
                self.num_steps >= LENGTH + 9, {})


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_intrinsic_rewards_find_a_reward_at_the_end_of_a_chain():
    found = {}
    for options in ({}, {"intrinsic_reward": "rnd"}):
        found[len(options)] = [
            train("ppo", Chain, seed=seed, target_steps=100_000, **SETTINGS, **options).evaluate(10).return_mean
            for seed in (1, 2, 3)]
    assert found[0] == [0.0, 0.0, 0.0]
    assert sorted(found[1])[1] == 1.0, found[1]
