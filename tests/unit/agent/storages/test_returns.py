"""Compare advantages and returns with plain loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.moments import mean_and_std
from pytorchrl.agent.storages.returns import gae
from tests.conftest import seeds

NO_FINALS = (torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0))


def rollout_of(reward, terminated, truncated, valid=None, final_index=NO_FINALS[0]):
    reward = torch.as_tensor(np.asarray(reward), dtype=torch.float32)
    shape = reward.shape
    valid = np.ones(shape, bool) if valid is None else valid
    return RolloutData(
        obs={}, done=torch.zeros(shape[0] + 1, shape[1], dtype=torch.bool), rhs={}, mask=None,
        action=torch.zeros(shape, dtype=torch.int64), reward=reward, terminated=torch.as_tensor(terminated),
        truncated=torch.as_tensor(truncated), valid=torch.as_tensor(valid), final_index=final_index, final_obs={})


def brute_force(rollout, value, final_value, gamma, lam):
    """Return the discounted sum of temporal differences up to the end of the episode, for each transition."""
    finals = {tuple(pair): float(v) for pair, v in zip(rollout.final_index.tolist(), final_value, strict=True)}
    num_steps, num_envs = rollout.reward.shape
    advantage = np.zeros((num_steps, num_envs))
    for e in range(num_envs):
        for t in range(num_steps):
            factor = 1.0
            for k in range(t, num_steps):
                if not rollout.valid[k, e]:
                    break
                bootstrap = finals.get((k, e), float(value[k + 1, e]))
                if rollout.terminated[k, e]:
                    bootstrap = 0.0
                advantage[t, e] += factor * (float(rollout.reward[k, e]) + gamma * bootstrap - float(value[k, e]))
                if rollout.terminated[k, e] or rollout.truncated[k, e]:
                    break
                factor *= gamma * lam
    return advantage


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_gae_equals_brute_force_on_random_rollouts(seed):
    rng = np.random.default_rng(seed)
    num_steps, num_envs = int(rng.integers(1, 21)), int(rng.integers(1, 5))
    shape = (num_steps, num_envs)
    terminated = rng.random(shape) < 0.2
    truncated = (rng.random(shape) < 0.2) & ~terminated
    valid = rng.random(shape) < 0.9
    has_final = (terminated | truncated) & (rng.random(shape) < 0.5)
    index = torch.as_tensor(np.argwhere(has_final))
    rollout = rollout_of(rng.normal(size=shape), terminated, truncated, valid, index)
    value = torch.as_tensor(rng.normal(size=(num_steps + 1, num_envs)), dtype=torch.float32)
    final_value = torch.as_tensor(rng.normal(size=len(index)), dtype=torch.float32)
    gamma, lam = rng.uniform(0.5, 1.0), rng.uniform(0.0, 1.0)
    advantage, ret = gae(rollout, value, final_value, gamma, lam)
    expected = brute_force(rollout, value, final_value, gamma, lam)
    np.testing.assert_allclose(advantage, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ret, expected + value[:-1].numpy(), rtol=1e-6, atol=1e-6)


def test_gae_golden_values():
    column = lambda *values: np.array(values)[:, None]  # noqa: E731
    rollout = rollout_of(
        np.ones((5, 1)), column(False, True, False, False, False), column(False, False, False, True, False),
        final_index=torch.tensor([[1, 0], [3, 0]]))
    # The next values are 0.4, none (row 1 terminates), 0.2, 0.7 (last observation of the truncated row 3) and 0.6.
    value = torch.tensor([[0.5], [0.4], [0.3], [0.2], [0.1], [0.6]])
    advantage, _ = gae(rollout, value, torch.tensor([99.0, 0.7]), 0.9, 0.8)
    np.testing.assert_allclose(advantage[:, 0], [1.292, 0.6, 1.9096, 1.43, 1.44], atol=1e-6)


def test_gae_bootstraps_at_the_time_limit_of_an_endless_task():
    truncated = np.zeros((50, 1), bool)
    truncated[-1] = True
    rollout = rollout_of(np.ones((50, 1)), np.zeros((50, 1), bool), truncated, final_index=torch.tensor([[49, 0]]))
    value = 0.0
    for _ in range(200):
        # Row 50 contains the next episode's first observation, so the truncated episode must not bootstrap from it.
        _, ret = gae(rollout, torch.full((51, 1), value), torch.tensor([value]), 0.99, 0.95)
        value = float(ret.mean())
    assert value == pytest.approx(100.0, rel=1e-3)


def test_merged_mean_and_std_equal_those_of_all_values():
    values = np.random.default_rng(0).normal(3.0, 2.0, 100)
    parts = [values[:30], values[30:31], values[31:31], values[31:]]
    moments = [(len(p), p.mean() if len(p) else 0.0, ((p - p.mean()) ** 2).sum() if len(p) else 0.0) for p in parts]
    assert mean_and_std(moments) == pytest.approx((values.mean(), values.std(ddof=1)))
