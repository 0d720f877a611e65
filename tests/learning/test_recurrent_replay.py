"""Tests that SAC with memory swings up a pendulum whose velocity is hidden, and that SAC without memory does not."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import train
from tests.unit.envs.memory_tasks import WithoutVelocity


def play(**settings):
    """Train, then return the mean return of 20 episodes and the summary of the run."""
    torch.set_num_threads(1)
    agent = train("sac", "Pendulum-v1", wrappers=(WithoutVelocity,), seed=1, target_steps=16_000, num_updates=1,
                  progress=False, **settings)
    return agent.evaluate(20).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_memory_infers_the_velocity_of_the_pendulum():
    result, summary = play(recurrent_net="gru", recurrent_size=64, update_every=4)
    assert result >= -400, summary


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_without_memory_the_pendulum_does_not_swing_up():
    """Check that SAC fails, with twice as many updates as with memory."""
    result, summary = play(update_every=2)
    assert result <= -800, summary
