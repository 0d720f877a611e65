"""Test that A2C with its preset learns CartPole from few steps."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import train


@pytest.mark.learning
@pytest.mark.timeout(600)
def test_a2c_learns_cartpole_from_few_steps():
    """Check the median of three seeds after a fifth of the steps of the preset."""
    results = [train("a2c", "CartPole-v1", seed=seed, progress=False, target_steps=100_000).evaluate(20).return_mean
               for seed in (1, 2, 3)]
    assert statistics.median(results) >= 300, results
