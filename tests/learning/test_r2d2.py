"""Tests that R2D2 recalls a cue that was shown several steps earlier, while DQN, which has no memory, guesses."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import train

CHANCE = 0.25
ARMS_STEPS = 6
SHARED = {
    "env_kwargs": {"num_cues": 4, "delay": 6}, "num_envs": 4, "num_steps": 7, "replay_size": 5000, "start_steps": 500,
    "update_every": 28,
    "num_updates": 1, "target_update_interval": 25, "n_step": 3, "gamma": 0.97, "lr": 3e-3, "adam_eps": 1e-5,
    "epsilon_steps": 5000,
    "final_epsilon": 0.05, "epsilon_per_worker": False, "hidden_sizes": (32,), "progress": False}
R2D2 = {"length": 7, "burn_in": 0, "period": 7, "mini_batch_size": 32, "recurrent_net": "gru", "recurrent_size": 32}
DQN = {"mini_batch_size": 224, "polyak": 0.0}
# On a busy machine, the learner falls behind the collectors, which therefore wait for it.
SHARDS = {"preset": "r2d2", "num_replay_workers": 2, "min_replay_ratio": 7.0, "max_replay_ratio": 8.0}


def play(algorithm, target_steps, seed=1, **settings):
    """Train, then return the share of correct answers in 200 episodes and the summary of the run."""
    torch.set_num_threads(1)
    agent = train(algorithm, "pytorchrl/Recall-v0", target_steps=target_steps, seed=seed, **{
        **SHARED, **(R2D2 if algorithm == "r2d2" else DQN), **settings})
    return agent.evaluate(200, seed=100 + seed).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_recalls_the_cue(seed):
    share, summary = play("r2d2", 40_000, seed)
    assert share >= 0.9, summary


@pytest.mark.learning
@pytest.mark.timeout(900)
def test_returns_without_memory_are_at_chance():
    share, summary = play("dqn", 40_000)
    assert share == pytest.approx(CHANCE, abs=0.12), summary
    assert summary["updates"] > 1000


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [{**SHARDS, "runtime": "simulated", "costs": {"step": 1e-3, "grad": 1e-3}},
                                      {**SHARDS, "runtime": "threads"}, pytest.param(SHARDS, marks=pytest.mark.ray)],
                         ids=["simulated", "threads", "ray"])
def test_memory_recalls_the_cue_with_replay_shards(settings):
    share, summary = play("r2d2", 60_000, **settings)
    assert share >= 0.9, summary


class TwoArms(gym.Env):
    """An environment in which one of two actions is rewarded; the rewarded action is drawn for each episode.

    Only rewards show which action is right. A random action has a mean reward of 1/2.
    """

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right, self.t = int(self.np_random.integers(2)), 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.ones(1, np.float32), float(int(action) == self.right), self.t == ARMS_STEPS, False, {}


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_shown", [True, False])
def test_a_memory_of_actions_and_rewards_finds_the_best_arm(is_shown):
    """Check that R2D2 finds the rewarded action after one guess, but only if it sees past actions and rewards."""
    torch.set_num_threads(1)
    settings = {name: value for name, value in SHARED.items() if name != "env_kwargs"}
    agent = train("r2d2", TwoArms, target_steps=16_000, seed=1, **{
        **settings, **R2D2, "num_steps": ARMS_STEPS, "update_every": 4 * ARMS_STEPS, "length": ARMS_STEPS,
        "period": ARMS_STEPS,
        "prev_action_reward": is_shown})
    mean = agent.evaluate(200, seed=100).return_mean
    if is_shown:
        assert mean >= ARMS_STEPS - 0.8, agent.summary
    else:
        assert mean == pytest.approx(ARMS_STEPS / 2, abs=0.8), agent.summary
