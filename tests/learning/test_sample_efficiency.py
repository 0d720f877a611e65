"""Tests that REDQ, DroQ and CrossQ learn Pendulum in fewer env steps than SAC."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import train

# Env steps, and options that make the networks of CrossQ as small as those of the preset for a processor.
RUNS = {"redq": (3000, {}), "droq": (3000, {}), "crossq": (5000, {"critic_hidden_sizes": (256, 256)})}


@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUNS)
def test_a_variant_swings_a_pendulum_up_in_few_steps(name):
    """Check the median of three seeds, because a short run is sometimes bad."""
    target_steps, options = RUNS[name]
    results = [train(name, "Pendulum-v1", seed=seed, progress=False, target_steps=target_steps, **options)
               .evaluate(20).return_mean for seed in (1, 2, 3)]
    assert statistics.median(results) >= -250, results
