"""Test that PPO learns CartPole from batches that are collected in several rounds and split into microbatches."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.training.training import make_learner


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("runtime", ["simulated", pytest.param("ray", marks=pytest.mark.ray)])
def test_solves_cartpole(runtime, seed):
    """Check that updates of 256 to 288 env steps use four or five microbatches, and that the policy solves CartPole."""
    torch.set_num_threads(1)
    learner, _ = make_learner(
        "ppo", "CartPole-v1", preset="microbatch", num_col_workers=2, train_batch_size=1024, num_mini_batch=4,
        microbatch_size=64,
        target_steps=200_000, runtime=runtime, seed=seed, progress=False)
    with learner:
        learner.train()
        result, metrics = learner.evaluate(20).return_mean, learner.get_metrics()
    assert metrics["scheme"]["backward_passes"] >= 4 * metrics["updates"]
    assert result >= 475, learner.summary()
