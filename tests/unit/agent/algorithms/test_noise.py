"""Test Ornstein-Uhlenbeck noise."""

from __future__ import annotations


import pytest
import torch

from pytorchrl.agent.algorithms.noise import OrnsteinUhlenbeck


def test_ou_noise_has_the_expected_deviation_and_starts_at_zero():
    noise = OrnsteinUhlenbeck(0.15, 0.2, 1.0)
    generator = torch.Generator().manual_seed(0)
    done = torch.zeros(2000, dtype=torch.bool)
    for _ in range(60):
        state = noise.draw(2000, 2, done, generator)
    assert float(state.std()) == pytest.approx(0.380, abs=0.01)
    assert float(state.mean()) == pytest.approx(0.0, abs=0.03)
    done[:1000] = True
    state = noise.draw(2000, 2, done, generator)
    assert float(state[:1000].std()) == pytest.approx(0.2, abs=0.01)
    assert float(state[1000:].std()) == pytest.approx(0.380, abs=0.02)


def test_noise_scales_with_the_square_root_of_the_time_step():
    noise = OrnsteinUhlenbeck(0.15, 0.2, 0.25)
    state = noise.draw(2000, 2, torch.ones(2000, dtype=torch.bool), torch.Generator().manual_seed(0))
    assert float(state.std()) == pytest.approx(0.1, abs=0.005)
