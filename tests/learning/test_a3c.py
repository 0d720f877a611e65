"""Test that A3C with two asynchronous gradient workers, whose gradients are one update old, learns CartPole."""

from __future__ import annotations

import pytest

from pytorchrl import train


def play(seed, runtime):
    """Train with the preset for CartPole; return the mean return of 20 episodes and the summary of the run."""
    agent = train("a2c", "CartPole-v1", preset="a3c", seed=seed, runtime=runtime, progress=False)
    return agent.evaluate(20).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("runtime", ["simulated", pytest.param("ray", marks=pytest.mark.ray)])
def test_solves_cartpole(runtime, seed):
    result, summary = play(seed, runtime)
    assert result >= 475, summary
