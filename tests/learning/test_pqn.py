"""Test that PQN learns CartPole from few steps, with a larger learning rate than that of its preset."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import linear, train


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_pqn_solves_cartpole():
    """Check the median of three seeds, because the final policy of a short run is sometimes bad."""
    results = [train("pqn", "CartPole-v1", seed=seed, progress=False, num_steps=32, lr=linear(2e-3, 0.0),
                     epsilon_steps=20_000, target_steps=60_000).evaluate(20).return_mean for seed in (1, 2, 3)]
    assert statistics.median(results) >= 400, results
