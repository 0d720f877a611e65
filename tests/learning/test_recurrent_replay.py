"""Tests that SAC with memory swings up a pendulum whose velocity is hidden, and that SAC without memory does not."""

from __future__ import annotations

import statistics

import pytest
import torch

from pytorchrl import train
from tests.unit.envs.memory_tasks import WithoutVelocity


def play(**settings):
    """Train with three seeds, and return the mean returns of 20 episodes."""
    torch.set_num_threads(1)
    return [train("sac", "Pendulum-v1", wrappers=(WithoutVelocity,), seed=seed, target_steps=20_000, num_updates=1,
                  progress=False, **settings).evaluate(20).return_mean for seed in (1, 2, 3)]


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_memory_infers_the_velocity_of_the_pendulum():
    results = play(recurrent_net="gru", recurrent_size=64, update_every=4)
    assert statistics.median(results) >= -400, results


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_without_memory_the_pendulum_does_not_swing_up():
    """Check that SAC fails, with twice as many updates as with memory."""
    results = play(update_every=2)
    assert statistics.median(results) <= -800, results
