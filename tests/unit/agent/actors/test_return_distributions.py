"""Compare distributions of the return with golden values and with loops in float64."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import QActor
from pytorchrl.agent.actors.return_distributions import Categories, Quantiles, ValueEstimate
from pytorchrl.errors import ConfigError, ContractError

SPACE, FOUR = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4)
OBS = {"obs": torch.as_tensor(np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32))}


def make(**options):
    return QActor.create_factory(SPACE, FOUR, **{"hidden_sizes": (8,), "activation": "tanh", **options})(seed=3)


def logits_of(probabilities):
    return torch.tensor(probabilities).log()


def projected(probabilities, returns, low, high):
    """Return the projection of a distribution to atoms from `low` to `high`, computed atom by atom."""
    gap, found = (high - low) / (len(probabilities) - 1), [0.0] * len(probabilities)
    for probability, value in zip(probabilities, returns, strict=True):
        place = (min(max(value, low), high) - low) / gap
        left = min(math.floor(place), len(found) - 2)
        found[left] += probability * (left + 1 - place)
        found[left + 1] += probability * (place - left)
    return found


# Categories


def test_a_projection_has_known_probabilities():
    estimate = Categories(5, -1.0, 1.0)
    target = estimate.target(logits_of([[0.1, 0.2, 0.4, 0.2, 0.1]]), torch.tensor([0.5]), torch.tensor([0.9]))
    torch.testing.assert_close(target, torch.tensor([[0.0, 0.08, 0.2, 0.44, 0.28]]))


@pytest.mark.parametrize(("ret", "discount", "expected"), [
    (0.0, 1.0, [0.1, 0.2, 0.4, 0.2, 0.1]),  # each atom moves to itself
    (0.5, 1.0, [0.0, 0.1, 0.2, 0.4, 0.3]),  # each atom moves to its neighbor, the last one beyond the range
    (0.0, 0.0, [0.0, 0.0, 1.0, 0.0, 0.0]),  # a termination with a reward of 0
    (1.0, 0.0, [0.0, 0.0, 0.0, 0.0, 1.0]), (-1.0, 0.0, [1.0, 0.0, 0.0, 0.0, 0.0]),
    (7.0, 0.5, [0.0, 0.0, 0.0, 0.0, 1.0]), (-7.0, 0.5, [1.0, 0.0, 0.0, 0.0, 0.0])])
def test_no_probability_is_lost_or_doubled_where_an_atom_meets_an_atom(ret, discount, expected):
    target = Categories(5, -1.0, 1.0).target(
        logits_of([[0.1, 0.2, 0.4, 0.2, 0.1]]), torch.tensor([ret]), torch.tensor([discount]))
    torch.testing.assert_close(target, torch.tensor([expected]))


def test_projections_equal_those_of_a_loop_and_keep_the_mean():
    rng, low, high = np.random.default_rng(0), -3.0, 5.0
    estimate = Categories(21, low, high)
    logits = torch.as_tensor(rng.normal(size=(200, 21)).astype(np.float32))
    ret = torch.as_tensor(rng.uniform(-6, 8, 200).astype(np.float32))
    discount = torch.as_tensor(rng.choice([0.0, 0.5, 0.99, 1.0], 200).astype(np.float32))
    target = estimate.target(logits, ret, discount).numpy()
    np.testing.assert_allclose(target.sum(1), 1.0, rtol=1e-5)
    probabilities = logits.double().softmax(-1).numpy()
    for row, found in enumerate(target):
        returns = [float(ret[row]) + float(discount[row]) * z for z in np.linspace(low, high, 21)]
        np.testing.assert_allclose(found, projected(probabilities[row], returns, low, high), atol=1e-5)
        clipped = np.clip(returns, low, high) @ probabilities[row]
        assert found @ np.linspace(low, high, 21) == pytest.approx(clipped, abs=1e-4)


def test_the_categorical_loss_is_the_divergence_from_the_target_with_the_gradient_of_the_cross_entropy():
    rng = np.random.default_rng(2)
    estimate, logits = Categories(7, -1.0, 1.0), torch.as_tensor(rng.normal(size=(4, 7)), dtype=torch.float64)
    target = torch.as_tensor(rng.dirichlet(np.ones(7), 4))
    target[0] = torch.eye(7)[2]  # after a termination, all probability may be at one atom
    logits.requires_grad_()
    losses = estimate.loss(logits, target)
    for row, loss in enumerate(losses.tolist()):
        p = np.exp(logits.detach().numpy()[row])
        p /= p.sum()
        m = target[row].numpy()
        expected = sum(m[k] * math.log(m[k] / p[k]) for k in range(7) if m[k] > 0)
        assert loss == pytest.approx(expected)
    losses.sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - target)
    best = target.clamp(min=1e-30).log()
    torch.testing.assert_close(estimate.loss(best, target), torch.zeros(4, dtype=torch.float64))


# Quantiles


def test_the_quantile_loss_has_a_known_value():
    outputs, target = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 3.0]])
    assert float(Quantiles(3).loss(outputs, target)) == pytest.approx(0.916667, abs=1e-6)


def test_the_quantile_loss_and_its_gradient_equal_those_of_a_loop():
    rng = np.random.default_rng(4)
    estimate = Quantiles(5)
    outputs = torch.as_tensor(2 * rng.normal(size=(3, 5)).astype(np.float32)).requires_grad_()
    target = torch.as_tensor(2 * rng.normal(size=(3, 4)).astype(np.float32))

    def loss_of(row, quantiles):
        total = 0.0
        for i, quantile in enumerate(quantiles):
            for other in target[row].tolist():
                u = other - quantile
                huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                total += abs((i + 0.5) / 5 - (1.0 if u < 0 else 0.0)) * huber / 4
        return total

    losses = estimate.loss(outputs, target)
    losses.sum().backward()
    for row, loss in enumerate(losses.tolist()):
        values = outputs[row].tolist()
        assert loss == pytest.approx(loss_of(row, values), rel=1e-5)
        for i in range(5):
            above, below = list(values), list(values)
            above[i], below[i] = values[i] + 1e-6, values[i] - 1e-6
            slope = (loss_of(row, above) - loss_of(row, below)) / 2e-6
            assert float(outputs.grad[row, i]) == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize("shift", [0.0, 1e5])
def test_the_quantile_loss_of_sorted_targets_equals_that_of_all_pairs(shift, monkeypatch):
    """Compare the loss on a CPU with that of compiled code and GPUs, also for values far from 0 and equal values."""
    generator = torch.Generator().manual_seed(1)
    estimate = Quantiles(6).double()
    outputs = (3 * torch.randn(3, 4, 6, generator=generator) + shift).double()
    target = (3 * torch.randn(4, 9, generator=generator) + shift).double()
    target[0, :3], target[1, 2:5] = outputs[0, 0, 2], outputs[0, 1, 0] + torch.arange(-1, 2)
    found = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda is_compiling=is_compiling: is_compiling)
        own = outputs.clone().requires_grad_()
        losses = estimate.loss(own, target)
        losses.square().sum().backward()
        found.append((losses.detach(), own.grad))
    assert found[0][0].shape == (3, 4)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_the_quantile_loss_of_a_value_that_is_not_finite_is_not_finite(wrong):
    numbers = torch.arange(6.0).reshape(2, 3)
    for place in range(3):
        bad = numbers.clone()
        bad[0, place] = wrong
        for losses in (Quantiles(3).loss(bad, numbers), Quantiles(3).loss(numbers, bad)):
            assert losses.isfinite().tolist() == [False, True]


def test_quantiles_that_minimize_the_loss_are_in_order():
    """Learn the quantiles of numbers 0, 10, 20, ..., for which the quadratic part of the loss hardly matters.

    With levels in the wrong order, or with the wrong sign of an error, the smallest output would become the largest.
    """
    estimate, outputs = Quantiles(5), torch.full((1, 5), 500.0, requires_grad=True)
    target = 10 * torch.arange(101.0)[None]
    optimizer = torch.optim.Adam([outputs], lr=5.0)
    for step in range(1500):
        optimizer.param_groups[0]["lr"] = 5.0 * 0.995**step
        optimizer.zero_grad()
        estimate.loss(outputs, target).sum().backward()
        optimizer.step()
    torch.testing.assert_close(outputs.detach(), torch.tensor([[100.0, 300.0, 500.0, 700.0, 900.0]]), atol=10, rtol=0)


def test_quantiles_of_a_target_are_moved_returns():
    outputs = torch.tensor([[0.0, 1.0, 4.0], [1.0, 2.0, 3.0]])
    target = Quantiles(3).target(outputs, torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.0]))
    assert target.tolist() == [[2.0, 2.5, 4.0], [-1.0, -1.0, -1.0]]


# Networks


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("kind", ["categorical", "quantile"])
def test_values_are_the_means_of_the_outputs(kind, dueling):
    actor = make(distribution=kind, num_atoms=7, dueling=dueling)
    outputs = actor.q(OBS, None, None)
    assert outputs.shape == (6, 4, 7)
    weights = outputs.softmax(-1) if kind == "categorical" else torch.full((6, 4, 7), 1 / 7)
    returns = torch.linspace(-10, 10, 7) if kind == "categorical" else outputs
    expected = torch.stack([(weights[..., k] * returns.expand_as(outputs)[..., k]) for k in range(7)]).sum(0)
    scores = actor.get_q_scores(OBS)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(actor.get_q_scores(OBS, torch.tensor([3, 0, 1, 2, 3, 1])),
                               expected[range(6), [3, 0, 1, 2, 3, 1]])
    assert torch.equal(actor.act(OBS), scores.argmax(-1))


def test_a_dueling_network_averages_the_advantages_of_each_atom_over_allowed_actions():
    actor = make(distribution="quantile", num_atoms=3, dueling=True)
    features, _ = actor.q.trunk(OBS, None, None)
    value = actor.q.value_head(features)
    mask = torch.tensor([[True, False, True, True]] * 5 + [[False] * 4])
    outputs = actor.q(OBS, mask, None)
    for k in range(3):
        torch.testing.assert_close(outputs[:5, [0, 2, 3], k].mean(1), value[:5, k])
    torch.testing.assert_close(actor.q(OBS, None, None).mean(1), value)
    assert outputs.isfinite().all()


@pytest.mark.parametrize("kind", ["categorical", "quantile"])
def test_means_in_numpy_equal_those_in_torch(kind):
    estimate = make(distribution=kind, num_atoms=6).estimate
    outputs = 50 * torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = estimate.mean(outputs).numpy()
    np.testing.assert_allclose(estimate.means_in_numpy(outputs.flatten(1).numpy()), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(estimate.means_in_numpy(outputs[0].flatten().numpy()), expected[0], rtol=1e-5, atol=1e-5)


def test_a_mean_is_a_distribution_with_one_atom():
    estimate, outputs = ValueEstimate(), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    chosen = estimate.of_action(outputs, torch.tensor([1, 0]))
    target = estimate.target(chosen, torch.tensor([0.5, -1.0]), torch.tensor([0.5, 0.0]))
    assert target.tolist() == [1.5, -1.0]
    assert estimate.loss(chosen, target).tolist() == [0.125, 8.0]
    assert estimate.errors(chosen, target, estimate.loss(chosen, target)).tolist() == [0.5, 4.0]


# Options


def test_defaults_and_values_of_options_reach_the_network():
    assert make(distribution="categorical").estimate.num_atoms == 51
    assert make(distribution="quantile").estimate.num_atoms == 200
    assert make().estimate.num_atoms is None
    actor = make(distribution="categorical", num_atoms=3, v_min=-2.0, v_max=6.0)
    assert actor.estimate.support.tolist() == [-2.0, 2.0, 6.0]
    assert torch.allclose(make(distribution="quantile", num_atoms=4).estimate.levels,
                          torch.tensor([0.125, 0.375, 0.625, 0.875]))


def test_the_support_is_not_saved_and_moves_with_the_actor():
    actor = make(distribution="categorical")
    assert not any("estimate" in name for name in (*actor.state_buffers(), *actor.state_dict()))
    assert actor.to(torch.float64).estimate.support.dtype == torch.float64


@pytest.mark.parametrize(("options", "message"), [
    ({"distribution": "normal"}, "distribution must be one of .*got 'normal'"),
    ({"num_atoms": 51}, "num_atoms needs distribution='categorical' or 'quantile', got None"),
    ({"distribution": "quantile", "v_max": 5.0}, "v_max needs distribution='categorical', got 'quantile'"),
    ({"v_min": -1.0, "v_max": 5.0}, "v_min, v_max needs distribution='categorical', got None"),
    ({"distribution": "categorical", "num_atoms": 1}, "num_atoms must be .*whole number >= 2"),
    ({"distribution": "categorical", "v_min": 10.0}, "v_min must be below v_max, got 10.0 and 10.0")])
def test_wrong_and_contradictory_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        QActor.create_factory(SPACE, FOUR, **options)


class OwnActor(QActor):
    """Builds a network that knows nothing of atoms."""

    def build_networks(self, generator):
        self.q = OwnNet()


class OwnNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, obs, mask, generator):
        return self.layer(obs["obs"])


def test_a_network_of_the_user_works_without_a_distribution_and_is_refused_with_one():
    assert OwnActor.create_factory(SPACE, FOUR)(seed=1).get_q_scores(OBS).shape == (6, 4)
    with pytest.raises(ContractError, match=r"returned a tensor of shape \(3, 4\).*expected .* of shape \(3, 4, 9\)"):
        OwnActor.create_factory(SPACE, FOUR, distribution="quantile", num_atoms=9)(seed=1)
