"""Algorithms that learn from replay, with their presets: DQN and its variants on CartPole, the others on Pendulum."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import linear, train

# Actions are explored by the noise of the network alone.
NOISY = {"noisy": True, "initial_epsilon": 0.0, "final_epsilon": 0.0, "lr": linear(1e-3, 0.0)}
PRIORITISED = {"prioritized": True, "n_step": 3, "lr": linear(1e-3, 0.0)}
VARIANTS = {"dueling": {"dueling": True}, "noisy": NOISY, "prioritised": PRIORITISED}


def play(algorithm, env, seed, **settings):
    """Mean return of 20 episodes after training, and the run's figures."""
    agent = train(algorithm, env, seed=seed, progress=False, **settings)
    return agent.evaluate(20).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dqn_solves_cartpole(variant):
    """The median of three seeds: the last policy of a short run of DQN is now and then a bad one."""
    results = [play("dqn", "CartPole-v1", seed, **VARIANTS[variant])[0] for seed in (1, 2, 3)]
    assert statistics.median(results) >= 475, results


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["sac", "td3", "ddpg"])
def test_continuous_control_swings_a_pendulum_up(algorithm, seed):
    result, summary = play(algorithm, "Pendulum-v1", seed, target_steps=20_000)
    assert result >= -200, summary
