"""Tests of algorithms that learn from data sets: imitation, and learning from good and bad episodes."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import train
from pytorchrl.play.dataset import record_dataset

SEEDS = (1, 2, 3)


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_cloning_reaches_the_demonstrator_from_20_episodes(tmp_path):
    expert = train("ppo", "CartPole-v1", target_steps=50_000, seed=1, progress=False)
    data = record_dataset(expert, tmp_path / "expert.npz", num_episodes=20)
    assert data.returns.mean() >= 475
    for seed in SEEDS:
        agent = train("bc", "CartPole-v1", dataset=tmp_path / "expert.npz", target_steps=4000, seed=seed,
                      progress=False)
        assert agent.evaluate(20).return_mean >= 0.9 * data.returns.mean(), seed


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_values_find_the_good_episodes_among_bad_ones(tmp_path):
    """Check that IQL and TD3+BC score above behavior cloning with each seed; half of the data are good."""
    expert = train("sac", "Pendulum-v1", target_steps=12_000, seed=1, progress=False)
    untrained = train("sac", "Pendulum-v1", target_steps=0, seed=1, progress=False)
    record_dataset(expert, tmp_path / "expert.npz", num_episodes=50)
    record_dataset(untrained, tmp_path / "untrained.npz", num_episodes=50, deterministic=False)
    returns = {name: [train(name, "Pendulum-v1", dataset=tmp_path, target_steps=steps, seed=seed,
                            progress=False).evaluate(20).return_mean for seed in SEEDS]
               for name, steps in (("bc", 4000), ("iql", 8000), ("td3_bc", 8000))}
    for name in ("iql", "td3_bc"):
        assert min(returns[name]) > max(returns["bc"]), returns
        assert statistics.fmean(returns[name]) >= -650, returns
