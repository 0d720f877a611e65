from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.agent.actors.normalizers import RunningMoments, discounted_sums, moments
from pytorchrl.agent.data import RolloutData


def _samples(count, seed):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) * 5 + torch.tensor([1e4, 0.0, -7.0])


def test_merged_moments_equal_numpy_moments_of_all_data():
    running = RunningMoments((3,))
    parts = [_samples(count, seed) for seed, count in enumerate((1, 40, 0, 7, 300))]
    for part in parts:
        running.merge(moments(part))
    everything = torch.cat(parts).double().numpy()
    assert float(running.count) == 348
    np.testing.assert_allclose(running.mean.numpy(), everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.m2.numpy() / 348, everything.var(0), rtol=1e-9)
    np.testing.assert_allclose(running.shift.numpy(), everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(running.scale.numpy(), 1 / np.sqrt(everything.var(0) + 1e-8), rtol=1e-6)


def test_normalize_shifts_scales_and_clips():
    running = RunningMoments((3,))
    samples = _samples(500, 0)
    running.merge(moments(samples))
    x = samples[:9].clone()
    x[0, 1] = 1e6
    x[1, 1] = -1e6
    result = running.normalize(x)
    expected = (x.double().numpy() - samples.double().numpy().mean(0)) / samples.double().numpy().std(0)
    np.testing.assert_allclose(result.numpy(), np.clip(expected, -10, 10), atol=2e-3)
    assert result.dtype == torch.float32
    assert result[0, 1] == 10.0
    assert result[1, 1] == -10.0


def test_nothing_changes_before_the_first_samples():
    running = RunningMoments((3,))
    running.merge(moments(_samples(0, 0)))
    x = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(running.normalize(x), x)


def test_numpy_gives_the_same_bits_and_follows_later_merges():
    running = RunningMoments((3,))
    normalize = running.in_numpy()
    for seed in range(3):
        running.merge(moments(_samples(20, seed)))
        x = _samples(50, 9)
        x[0], x[1] = torch.tensor([torch.nan, torch.inf, -torch.inf]), 1e9
        before = x.clone()
        np.testing.assert_array_equal(normalize(x.numpy()), running.normalize(x).numpy())
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def test_state_contains_all_moments():
    first, second = RunningMoments((3,)), RunningMoments((3,))
    first.merge(moments(_samples(50, 0)))
    second.load_state_dict(first.state_dict())
    x = _samples(4, 1)
    assert torch.equal(first.normalize(x), second.normalize(x))
    for running in (first, second):
        running.merge(moments(_samples(9, 2)))
    assert torch.equal(first.m2, second.m2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
def test_numbers_around_1e9_keep_their_spread(dtype):
    """Check the moments and the normalized values of numbers that float32 would round to multiples of 64."""
    generator = torch.Generator().manual_seed(0)
    deviations = torch.randn(4000, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 3.0])
    samples = (1e9 + deviations).round(decimals=3).to(dtype)
    running = RunningMoments((2,))
    for part in samples.split(700):
        running.merge(moments(part))
    exact = samples.double().numpy()
    np.testing.assert_allclose(running.mean.numpy(), exact.mean(0), rtol=1e-15)
    np.testing.assert_allclose(running.scale.numpy(), 1 / exact.std(0), rtol=1e-6)
    seen = running.normalize(samples)
    assert seen.dtype == torch.float32
    np.testing.assert_allclose(seen.numpy(), (exact - exact.mean(0)) / exact.std(0), atol=1e-6)


def test_booleans_are_normalized_as_0_and_1():
    flags = torch.tensor([[True, False], [True, True], [False, True], [True, True]])
    running = RunningMoments((2,))
    running.merge(moments(flags))
    np.testing.assert_array_equal(running.normalize(flags).numpy(), running.normalize(flags.float()).numpy())
    assert running.normalize(flags).std(0, correction=0).tolist() == pytest.approx([1.0, 1.0])


def column_rollout(reward, ended, valid):
    """Return a rollout of one environment with these rewards, ends of episodes and valid rows."""
    steps = len(reward)
    return RolloutData(
        obs={}, done=torch.zeros(steps + 1, 1, dtype=torch.bool), rhs={}, mask=None,
        action=torch.zeros(steps, 1, dtype=torch.int64), reward=torch.tensor(reward)[:, None],
        terminated=torch.tensor(ended)[:, None], truncated=torch.zeros(steps, 1, dtype=torch.bool),
        valid=torch.tensor(valid)[:, None], final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={})


def test_discounted_sums_continue_across_rollouts_and_reset_after_episodes():
    rollout = column_rollout([1.0, 1.0, 5.0, 2.0], [False, True, False, False], [True, True, False, True])
    running = np.array([10.0])
    sums = discounted_sums(rollout, 0.5, running)
    assert sums[:, 0].tolist() == [6.0, 4.0, 0.0, 2.0]
    assert running.tolist() == [2.0]


def test_discounted_sums_are_repeated_unchanged_where_a_row_within_an_episode_is_invalid():
    rollout = column_rollout([1.0, 5.0, 2.0, 5.0], [False] * 4, [True, False, True, False])
    running = np.array([10.0])
    sums = discounted_sums(rollout, 0.5, running)
    assert sums[:, 0].tolist() == [6.0, 6.0, 5.0, 5.0]
    assert running.tolist() == [5.0]


@pytest.mark.parametrize("seed", range(4))
def test_discounted_sums_equal_a_loop_wherever_rollouts_are_cut(seed):
    """Check sums of three environments over rollouts of one to nine rows, which end and begin with ends of episodes."""
    rng, running, plain = np.random.default_rng(seed), np.zeros(3), np.zeros(3)
    for steps in (1, 9, 1, 4, 1, 1, 7):
        reward = rng.normal(size=(steps, 3)).astype(np.float32)
        valid = rng.random((steps, 3)) < 0.8
        ended = (rng.random((steps, 3)) < 0.4) & valid
        truncated = ended & (rng.random((steps, 3)) < 0.5)
        rollout = RolloutData(
            obs={}, done=torch.zeros(steps + 1, 3, dtype=torch.bool), rhs={}, mask=None,
            action=torch.zeros(steps, 3, dtype=torch.int64), reward=torch.tensor(reward),
            terminated=torch.tensor(ended & ~truncated), truncated=torch.tensor(truncated), valid=torch.tensor(valid),
            final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={})
        sums = discounted_sums(rollout, 0.9, running)
        for t, e in np.ndindex(steps, 3):
            plain[e] = 0.9 * plain[e] + reward[t, e] if valid[t, e] else plain[e]
            assert sums[t, e] == pytest.approx(plain[e])
            plain[e] = 0.0 if ended[t, e] else plain[e]
        np.testing.assert_allclose(running, plain, atol=1e-12)
