"""Test that GRPO learns a token task from random weights, with its preset and with old data."""

from __future__ import annotations

import statistics

import pytest

from pytorchrl import train


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [
    {}, {"num_col_workers": 1, "col_communication": "async", "max_policy_lag": 4, "on_policy_lag": "wait",
         "correction": "decoupled", "runtime": "simulated", "costs": {"grad": 1.0}}], ids=["preset", "old"])
def test_grpo_learns_to_sort(options):
    """Check the median of three seeds; the reward is 2 if all answers are right, and 0.1 for random digits."""
    results = [train("grpo", "tokens/SortDigits", seed=seed, progress=False, target_steps=200_000,
                     **options).evaluate(200).return_mean for seed in (1, 2, 3)]
    assert statistics.median(results) >= 1.7, results
