"""Compare the losses of algorithms that learn from data sets with implementations in NumPy and plain loops."""

from __future__ import annotations

import dataclasses
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor, OnPolicyActor, ValueActor
from pytorchrl.agent.actors.squashed import squashed_log_prob_of
from pytorchrl.agent.algorithms import BC, DDPG, IQL, TD3
from pytorchrl.agent.algorithms.iql import expectile_loss
from pytorchrl.errors import ConfigError
from tests.unit.agent.algorithms.test_replay_losses import (
    BOX,
    DISCRETE,
    SAMPLES,
    check_gradients,
    critics,
    double,
    linear,
    make,
    make_batch,
    mlp,
    parameters,
    policy,
    q_net,
    slope,
)


def test_expectile_loss_of_a_list_of_errors():
    """Compare with hand-computed values: 0.8 u^2 for positive errors, and 0.2 u^2 for negative ones."""
    errors = torch.tensor([2.0, -2.0, 0.5, -0.5, 0.0])
    torch.testing.assert_close(expectile_loss(errors, 0.8), torch.tensor([3.2, 0.8, 0.2, 0.05, 0.0]))


@pytest.mark.parametrize(("expectile", "expected"), [(0.5, 2.0), (0.9, 56 / 12), (0.99, 596 / 102)])
def test_minimizer_of_the_expectile_loss_is_the_expectile(expectile, expected):
    """Check the value V that minimizes the loss of the samples 0, 0, 2 and 6.

    For V in [2, 6], the derivative is 0 where expectile (6 - V) = (1 - expectile) (3 V - 2). For the expectile 0.9,
    this is 9 (6 - V) = 3 V - 2, so V = 56 / 12.
    """
    samples = torch.tensor([0.0, 0.0, 2.0, 6.0], dtype=torch.float64)
    found = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(4000):
        (slope,) = torch.autograd.grad(expectile_loss(samples - found, expectile).mean(), found)
        found = (found - 0.5 * slope).detach().requires_grad_()
    assert float(found.detach()) == pytest.approx(expected, abs=1e-6)


def iql_reference(algorithm, batch, scores, log_prob):
    """Return the losses of IQL as functions of the parameters of each group, computed sample by sample."""
    options, params = algorithm.options, parameters(algorithm)
    obs, next_obs = double(batch.obs["obs"]), double(batch.next_obs["obs"])
    q = scores(params["target_q"]).min(0)
    values, next_values = policy(params["v"], obs)[:, 0], policy(params["v"], next_obs)[:, 0]
    target = [double(batch.ret)[i] + double(batch.discount)[i] * next_values[i] for i in range(SAMPLES)]
    importance = double(batch.weight)
    weights = [min(math.exp(options.advantage_beta * (q[i] - values[i])), options.max_weight) for i in range(SAMPLES)]

    def loss_q(own):
        total = 0.0
        for row in scores(own):
            total += 0.5 * sum(importance[i] * (row[i] - target[i]) ** 2 for i in range(SAMPLES)) / SAMPLES
        return total

    def loss_v(own):
        total = 0.0
        for i, value in enumerate(policy(own, obs)[:, 0]):
            error = q[i] - value
            total += importance[i] * (options.expectile if error > 0 else 1 - options.expectile) * error**2
        return total / SAMPLES

    def loss_pi(own):
        logp = log_prob(own)
        return -sum(weights[i] * logp[i] for i in range(SAMPLES)) / SAMPLES

    return {"q": loss_q, "pi": loss_pi, "v": loss_v}, weights, target


@pytest.mark.parametrize("options", [{}, {"expectile": 0.95, "advantage_beta": 10.0, "max_weight": 1.5}])
def test_iql_losses_and_gradients_follow_the_formula(options):
    algorithm = make(IQL, ValueActor, BOX, **options)
    with torch.no_grad():
        algorithm.actor.value.head.bias.sub_(0.3)  # so that some advantages are positive
    batch = make_batch(False)
    batch.action[0] = torch.tensor([1.0, -1.0])  # at the bounds, where the density would be infinite
    obs, action = double(batch.obs["obs"]), double(batch.action)

    def log_prob(pi):
        mean, log_std = np.split(policy(pi, obs), 2, axis=1)
        inner = np.clip(action, -0.999, 0.999)
        u = np.log((1 + inner) / (1 - inner)) / 2
        z = (u - mean) / np.exp(log_std)
        return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - inner**2)).sum(1)

    references, weights, target = iql_reference(algorithm, batch, lambda q: critics(q, obs, action), log_prob)
    info = check_gradients(algorithm, batch, references)
    assert info["weight"] == pytest.approx(np.mean(weights), rel=1e-4)
    deltas = critics(parameters(algorithm)["q"], obs, action) - np.array(target)
    np.testing.assert_allclose(info["errors"].numpy(), np.abs(deltas).mean(0), rtol=1e-4)
    assert (max(weights) == 1.5) == bool(options)  # some weights are clipped
    assert min(weights) < 1 < max(weights)


@pytest.mark.parametrize("masked", [False, True])
def test_discrete_iql_losses_and_gradients_follow_the_formula(masked):
    algorithm = make(IQL, ValueActor, DISCRETE)
    batch = make_batch(True, masked)
    if masked:  # recorded actions were allowed
        batch.mask[torch.arange(SAMPLES), batch.action] = True
    obs, rows, taken = double(batch.obs["obs"]), np.arange(SAMPLES), batch.action.numpy()
    mask = np.ones((SAMPLES, DISCRETE.n), bool) if batch.mask is None else batch.mask.numpy()

    def log_prob(pi):
        logits = policy(pi, obs)
        return logits[rows, taken] - np.log((np.exp(logits) * mask).sum(1))

    references, *_ = iql_reference(
        algorithm, batch, lambda q: np.stack([q_net(q, f"{i}.", obs)[rows, taken] for i in range(2)]), log_prob)
    check_gradients(algorithm, batch, references)


def test_weights_of_the_policy_are_clipped_at_100():
    """Check weights for advantages 0, 1, 2 and 10: exp(3 A), at most 100, as in the authors' code."""
    algorithm = make(IQL, ValueActor, BOX)
    with torch.no_grad():
        for target in algorithm.targets["q"]:
            target.head.weight.zero_()
        algorithm.actor.value.head.weight.zero_()
        algorithm.actor.value.head.bias.zero_()
    found = []
    for advantage in (0.0, 1.0, 2.0, 10.0):
        with torch.no_grad():
            for target in algorithm.targets["q"]:
                target.head.bias.fill_(advantage)
        found.append(algorithm.compute_gradients(make_batch(False))[1]["weight"])
    np.testing.assert_allclose(found, [1.0, math.exp(3.0), 100.0, 100.0], rtol=1e-5)


def test_density_of_given_actions_is_that_of_the_policy():
    """Check that densities over a grid of actions sum up to 1, and that an action at a bound has a finite gradient."""
    grid = torch.linspace(-0.9985, 0.9985, 4001)[:, None]
    mean, log_std = torch.full((4001, 1), 0.3), torch.full((4001, 1), -0.7)
    mass = squashed_log_prob_of(grid, mean, log_std).exp().sum() * float(grid[1] - grid[0])
    assert float(mass) == pytest.approx(1.0, abs=1e-3)
    mean = torch.zeros(2, 1, requires_grad=True)
    squashed_log_prob_of(torch.tensor([[1.0], [-1.0]]), mean, torch.zeros(2, 1)).sum().backward()
    torch.testing.assert_close(mean.grad, torch.atanh(torch.tensor([[0.999], [-0.999]])))


# TD3+BC


@pytest.mark.parametrize("bc_alpha", [2.5, 0.3])
@pytest.mark.parametrize("cls", [TD3, DDPG])
def test_policy_stays_close_to_the_data(cls, bc_alpha):
    """Check the loss sample by sample; the scale of Q has no gradient, so it is computed once."""
    algorithm = make(cls, OffPolicyActor, BOX, {"policy": "deterministic"}, bc_alpha=bc_alpha)
    batch = make_batch(False)
    obs, action, params = double(batch.obs["obs"]), double(batch.action), parameters(algorithm)
    values = critics(params["q"], obs, np.tanh(policy(params["pi"], obs)))[0]
    shift = values.mean() + 0.5 * values.std()  # values of both signs, whose mean is not 0
    with torch.no_grad():
        algorithm.actor.critics[0].head.bias.sub_(float(shift))
    params, values = parameters(algorithm), values - shift
    assert values.min() < 0 < values.max()
    scale = bc_alpha / (sum(abs(value) for value in values) / SAMPLES)

    def loss(pi):
        chosen, total = np.tanh(policy(pi, obs)), 0.0
        found = critics(params["q"], obs, chosen)[0]
        for i in range(SAMPLES):
            distance = sum((chosen[i, k] - action[i, k]) ** 2 for k in range(2)) / 2
            total += distance - scale * found[i]
        return total / SAMPLES

    gradients, info = algorithm.compute_gradients(batch)
    assert info["loss_pi"] == pytest.approx(loss(params["pi"]), rel=1e-5)
    gradient = dict(zip(algorithm.groups, gradients, strict=True))["pi"].double().numpy()
    vector, rng = algorithm.groups["pi"], np.random.default_rng(1)
    own = {name: double(value) for name, value in vector.split(vector.data).items()}
    for _ in range(3):
        direction = {name: rng.normal(size=value.shape) for name, value in own.items()}
        flat = np.concatenate([value.reshape(-1) for value in direction.values()])
        assert slope(loss, own, direction) == pytest.approx(float(gradient @ flat), rel=1e-4)


def test_scale_of_the_values_does_not_change_the_policy():
    """Check that the gradient of the policy is the same if all values are 1000 times as large."""
    gradients = []
    for factor in (1.0, 1000.0):
        algorithm = make(TD3, OffPolicyActor, BOX, {"policy": "deterministic"}, bc_alpha=2.5)
        with torch.no_grad():
            for parameter in algorithm.actor.critics[0].head.parameters():
                parameter.mul_(factor)
        gradients.append(algorithm.compute_gradients(make_batch(False))[0][list(algorithm.groups).index("pi")].clone())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def test_values_of_zero_leave_the_imitation():
    algorithm = make(TD3, OffPolicyActor, BOX, {"policy": "deterministic"}, bc_alpha=2.5)
    with torch.no_grad():
        for parameter in algorithm.actor.critics[0].head.parameters():
            parameter.zero_()
    gradients, info = algorithm.compute_gradients(make_batch(False))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert info["loss_pi"] > 0


# Behavior cloning


def policy_outputs(params, obs):
    return linear(params, "policy_head", mlp(params, "policy.extractor.layers", obs))


@pytest.mark.parametrize("masked", [False, True])
def test_cloning_of_discrete_actions_is_cross_entropy(masked):
    algorithm = make(BC, OnPolicyActor, DISCRETE, {"policy_gain": 1.0})
    batch = make_batch(True, masked)
    if masked:
        batch.mask[torch.arange(SAMPLES), batch.action] = True
    mask = np.ones((SAMPLES, DISCRETE.n), bool) if batch.mask is None else batch.mask.numpy()

    def log_probs(own):
        logits = policy_outputs(own, double(batch.obs["obs"]))
        return np.array([logits[i, a] - math.log(sum(math.exp(logits[i, k]) for k in range(DISCRETE.n) if mask[i, k]))
                         for i, a in enumerate(batch.action.tolist())])

    info = check_gradients(algorithm, batch, {"all": lambda own: -np.mean(double(batch.weight) * log_probs(own))})
    (params,) = [{name: double(value) for name, value in group.split(group.data).items()}
                 for group in algorithm.groups.values()]
    np.testing.assert_allclose(info["errors"].numpy(), -log_probs(params), rtol=1e-5, atol=1e-7)


def test_cloning_of_continuous_actions_maximizes_the_density():
    algorithm = make(BC, OnPolicyActor, BOX, {"log_std_init": -0.5})
    batch = make_batch(False)
    obs, action = double(batch.obs["obs"]), double(batch.action)

    def loss(own):
        z = (action - policy_outputs(own, obs)) / np.exp(own["distribution.log_std"])
        logp = (-0.5 * z**2 - own["distribution.log_std"] - 0.5 * math.log(2 * math.pi)).sum(1)
        return -np.mean(double(batch.weight) * logp)

    check_gradients(algorithm, batch, {"all": loss})


@pytest.mark.parametrize(("space", "actions"), [
    (gym.spaces.MultiDiscrete([3, 2]), [[2, 1], [0, 0], [1, 1]]), (gym.spaces.MultiBinary(2), [[0, 1], [1, 1], [1, 0]]),
    (gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), [[0.5, -9.0], [1.0, 3.0], [0.0, 0.0]])])
def test_cloning_learns_actions_of_each_space(space, actions):
    """Check that the policy repeats three actions, each at a different observation; other spaces are tested above."""
    algorithm = make(BC, OnPolicyActor, space, lr=0.02, max_grad_norm=None)
    value = {name: parameter.detach().clone() for name, parameter in algorithm.actor.value.named_parameters()}
    batch = make_batch(False)
    obs = {"obs": torch.eye(3)}
    dtype = torch.float32 if isinstance(space, gym.spaces.Box) else torch.int64
    batch = dataclasses.replace(
        batch, obs=obs, next_obs=obs, action=torch.tensor(actions, dtype=dtype), weight=torch.ones(3),
        ret=torch.zeros(3), discount=torch.zeros(3))
    for _ in range(600):
        algorithm.apply_gradients(algorithm.compute_gradients(batch)[0])
    acted = algorithm.acting_step({"obs": np.eye(3, dtype=np.float32)}, {}, np.zeros(3, bool), deterministic=True)
    np.testing.assert_allclose(acted.clipped_action, actions, atol=0.3)
    assert all(torch.equal(value[name], parameter) for name, parameter in algorithm.actor.value.named_parameters())


@pytest.mark.parametrize(("option", "value"), [("gamma", 0.9), ("polyak", 0.5), ("target_update_interval", 2)])
def test_cloning_refuses_options_of_values(option, value):
    with pytest.raises(ConfigError, match=f"{option} needs an algorithm that learns values, unlike BC"):
        BC.create_factory(**{option: value})


def test_updates_of_cloning_reuse_no_random_actions():
    """Check the example batch with which the precision is chosen: its actions are those of the policy."""
    algorithm = make(BC, OnPolicyActor, DISCRETE)
    assert set(algorithm.random_actions(200, None).tolist()) == {0, 1, 2, 3}
    mask = torch.tensor([[False, True, False, False]] * 20)
    assert set(algorithm.random_actions(20, mask).tolist()) == {1}
