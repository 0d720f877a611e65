"""Tests that REDQ, DroQ and CrossQ learn Pendulum in a few thousand env steps."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import train

_FAST = {"start_steps": 500, "lr_q": 1e-3, "lr_pi": 1e-3}
# Smaller ensembles and networks, and fewer updates than those of the papers, so that a run takes half a minute.
RUNS = {
    "redq": {"target_steps": 2000, "num_updates": 3, "num_critics": 5, "policy_delay": 1, **_FAST},
    "droq": {"target_steps": 2000, "num_updates": 5, "policy_delay": 2, **_FAST},
    "crossq": {"target_steps": 3500, "critic_hidden_sizes": (64, 64), **_FAST}}


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_a_variant_swings_a_pendulum_up_in_few_steps(name):
    """Check the median of three seeds, because a short run is sometimes bad: SAC reaches -370 in 3,500 steps."""
    results = [train(name, "Pendulum-v1", seed=seed, progress=False, **RUNS[name]).evaluate(20).return_mean
               for seed in (1, 2, 3)]
    assert statistics.median(results) >= -250, results
