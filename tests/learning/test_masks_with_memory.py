"""Tests that agents with memory recall a cue while each step forbids half of the actions."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import train
from tests.unit.envs.memory_tasks import MaskedRecall

# Without memory, one of the two allowed actions is right.
CHANCE = 0.5
PPO = {"num_envs": 16, "num_steps": 28, "num_epochs": 4, "num_mini_batch": 2, "lr": 3e-3}
R2D2 = {"num_envs": 4, "num_steps": 7, "replay_size": 5000, "start_steps": 500, "update_every": 28, "num_updates": 1,
        "target_update_interval": 25, "n_step": 3, "lr": 3e-3, "adam_eps": 1e-5, "epsilon_steps": 5000,
        "final_epsilon": 0.05, "epsilon_per_worker": False, "length": 7, "burn_in": 0, "period": 7,
        "mini_batch_size": 32, "dueling": True}


def play(algorithm, seed, **settings):
    torch.set_num_threads(1)
    agent = train(algorithm, MaskedRecall, seed=seed, gamma=0.97, hidden_sizes=(32,), progress=False, **settings)
    return agent.evaluate(200, seed=100 + seed).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("algorithm", "settings"), [("ppo", PPO), ("appo", PPO), ("r2d2", R2D2)])
def test_memory_recalls_the_cue_among_allowed_actions(algorithm, settings, seed):
    share, summary = play(algorithm, seed, recurrent_net="gru", recurrent_size=32, target_steps=40_000, **settings)
    assert share >= 0.95, summary


@pytest.mark.learning
@pytest.mark.timeout(900)
def test_returns_without_memory_are_at_chance():
    share, summary = play("ppo", 1, target_steps=40_000, **PPO)
    assert share == pytest.approx(CHANCE, abs=0.12), summary
