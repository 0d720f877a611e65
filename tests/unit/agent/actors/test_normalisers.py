from __future__ import annotations

import numpy as np
import torch

from pytorchrl.agent.actors.normalisers import RunningMoments, moments


def _samples(count, seed):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) * 5 + torch.tensor([1e4, 0.0, -7.0])


def test_merged_moments_agree_with_numpy_over_everything():
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


def test_normalise_shifts_scales_and_clips():
    running = RunningMoments((3,))
    samples = _samples(500, 0)
    running.merge(moments(samples))
    x = samples[:9].clone()
    x[0, 1] = 1e6
    x[1, 1] = -1e6
    result = running.normalise(x)
    expected = (x.double().numpy() - samples.double().numpy().mean(0)) / samples.double().numpy().std(0)
    np.testing.assert_allclose(result.numpy(), np.clip(expected, -10, 10), atol=2e-3)
    assert result.dtype == torch.float32
    assert result[0, 1] == 10.0
    assert result[1, 1] == -10.0


def test_nothing_changes_before_the_first_samples():
    running = RunningMoments((3,))
    running.merge(moments(_samples(0, 0)))
    x = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(running.normalise(x), x)


def test_all_of_it_travels_in_the_state():
    first, second = RunningMoments((3,)), RunningMoments((3,))
    first.merge(moments(_samples(50, 0)))
    second.load_state_dict(first.state_dict())
    x = _samples(4, 1)
    assert torch.equal(first.normalise(x), second.normalise(x))
    for running in (first, second):
        running.merge(moments(_samples(9, 2)))
    assert torch.equal(first.m2, second.m2)
