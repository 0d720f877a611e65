"""PPO learns CartPole from gradients of two workers that each lossy codec has rounded, on the virtual clock."""

from __future__ import annotations

import pytest

from pytorchrl import train


def play(codec, seed, target_steps=100_000):
    """Mean return of 20 episodes after training, and the metrics of its scheme."""
    agent = train("ppo", "CartPole-v1", target_steps=target_steps, num_grad_workers=2, compress_grads_to_send=codec, seed=seed,
                  runtime="simulated", progress=False)
    return agent.evaluate(20).return_mean, agent.summary


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "topk"])
def test_learns_cartpole(codec, seed):
    result, summary = play(codec, seed)
    assert result >= 400, summary
