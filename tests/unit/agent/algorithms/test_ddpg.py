"""Test the exploration noise of DDPG and the delayed updates of TD3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.agent.algorithms.ddpg import OrnsteinUhlenbeck
from tests.unit.agent.algorithms.replay_agents import act, make, make_batch, update


def test_gaussian_noise_is_independent_per_dimension_and_clipped():
    algorithm = make("ddpg", start_steps=0, noise_std=0.1)
    best = act(algorithm, deterministic=True)
    noise = np.stack([act(algorithm) - best for _ in range(2000)]).reshape(2000, -1)
    assert np.abs(noise.mean(0)).max() < 0.02
    np.testing.assert_allclose(noise.std(0), 0.1, atol=0.01)
    assert np.abs(np.corrcoef(noise.T) - np.eye(12)).max() < 0.1
    algorithm.update_algorithm_parameter("noise_std", 50.0)
    assert set(np.abs(act(algorithm, 5)).reshape(-1).round(3)) >= {1.0}
    assert np.abs(act(algorithm, 5)).max() == 1.0


@pytest.mark.parametrize("options", [{"noise_std": 50.0}, {"noise": "ou", "ou_sigma": 50.0}], ids=["gaussian", "ou"])
def test_noisy_actions_of_torch_stay_within_the_bounds(options):
    algorithm = make("ddpg", start_steps=0, **options)
    algorithm.choose_small = lambda obs, deterministic: None  # the test above covers small policies
    actions = np.abs(act(algorithm, 20))
    assert actions.max() == 1.0
    assert (actions < 1.0).any()


def test_td3_updates_policy_and_targets_at_every_second_update():
    algorithm = make("td3")
    for number in range(1, 7):
        before = {name: group.data.clone() for name, group in algorithm.groups.items()}
        targets = algorithm._target_vectors["pi"].data.clone(), algorithm._target_vectors["q"].data.clone()
        update(algorithm, first=number)
        assert not torch.equal(algorithm.groups["q"].data, before["q"])
        assert torch.equal(algorithm.groups["pi"].data, before["pi"]) == (number % 2 == 1)
        for old, name in zip(targets, ("pi", "q"), strict=True):
            assert torch.equal(algorithm._target_vectors[name].data, old) == (number % 2 == 1)
    assert algorithm._optimizers["pi"].num_steps == 3


def test_td3_leaves_out_the_policys_gradient_where_it_is_not_used():
    plain, brief = make("td3"), make("td3")
    brief.applies_at_once = True
    for number in range(1, 7):
        (expected, wanted), (gradients, info) = (
            algorithm.compute_gradients(make_batch(algorithm, seed=number)) for algorithm in (plain, brief))
        due = number % 2 == 0
        if not due:
            del wanted["loss_pi"]
        torch.testing.assert_close(info, wanted, rtol=0.0, atol=0.0)
        index = list(brief.groups).index("pi")
        assert bool(expected[index].any())
        assert bool(gradients[index].any()) == due
        for algorithm in (plain, brief):
            algorithm.apply_gradients()
        for name, group in plain.groups.items():
            assert torch.equal(brief.groups[name].data, group.data)


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
