"""Tests of replay algorithms with their presets: DQN and its variants on CartPole, the others on Pendulum."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import linear, train

# These agents explore only through the noise of their networks.
NOISY = {"noisy": True, "initial_epsilon": 0.0, "final_epsilon": 0.0}
PRIORITIZED = {"prioritized": True, "n_step": 3}
VARIANTS = {"plain": {}, "dueling": {"dueling": True}, "noisy": NOISY, "prioritized": PRIORITIZED}


def play(algorithm, env, seed, **settings):
    """Train, then return the mean return of 20 episodes and the summary of the run."""
    agent = train(algorithm, env, seed=seed, progress=False, **settings)
    return agent.evaluate(20).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dqn_solves_cartpole(variant):
    """Check the median of three seeds, because the final policy of a DQN run is sometimes bad."""
    results = [play("dqn", "CartPole-v1", seed, **VARIANTS[variant])[0] for seed in (1, 2, 3)]
    assert statistics.median(results) >= 400, results


@pytest.mark.learning
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "num_seeds", "options"), [
    ("c51", 3, {"lr": linear(1e-3, 0.0)}), ("rainbow", 3, {"lr": linear(1e-3, 0.0)}), ("qrdqn", 5, {})])
def test_distributions_of_the_return_learn_cartpole(name, num_seeds, options):
    """Check the median of the seeds; those of QR-DQN reached 465, 267, 463, 500 and 500."""
    results = [play(name, "CartPole-v1", seed, target_steps=40_000, **options)[0] for seed in range(1, num_seeds + 1)]
    assert statistics.median(results) >= 400, results


@pytest.mark.learning
@pytest.mark.timeout(7200)
def test_tqc_swings_a_pendulum_up():
    results = [play("tqc", "Pendulum-v1", seed, target_steps=10_000)[0] for seed in (1, 2, 3)]
    assert statistics.median(results) >= -250, results


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("algorithm", "options"), [
    ("sac", {}), ("td3", {}), ("ddpg", {}), ("mpo", {}),
    pytest.param("sac", {"block": "simba", "hidden_sizes": (64,), "normalize_obs": True, "optimizer": "adamw"},
                 id="sac with residual blocks")])
def test_continuous_control_swings_a_pendulum_up(algorithm, options, seed):
    result, summary = play(algorithm, "Pendulum-v1", seed, target_steps=20_000, **options)
    assert result >= -200, summary
