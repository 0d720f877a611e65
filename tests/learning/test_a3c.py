"""A3C learns CartPole from gradients that are one update behind: two gradient workers, asynchronous."""

from __future__ import annotations

import pytest

from pytorchrl import train


def play(seed, runtime):
    """Mean return of 20 episodes after training with the preset for CartPole, and the run's figures."""
    agent = train("a2c", "CartPole-v1", preset="a3c", seed=seed, runtime=runtime, progress=False)
    return agent.evaluate(20).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("runtime", ["simulated", pytest.param("ray", marks=pytest.mark.ray)])
def test_solves_cartpole(runtime, seed):
    result, summary = play(seed, runtime)
    assert result >= 475, summary
