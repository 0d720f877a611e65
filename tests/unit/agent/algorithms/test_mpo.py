"""Test MPO: golden values of the dual and of the divergences, losses compared with plain loops, limits, refusals."""

from __future__ import annotations

import dataclasses
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from pytorchrl import MPO, SAC, OffPolicyActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.agent.algorithms.duals import best_temperature, dual, inverse_softplus
from pytorchrl.errors import ConfigError
from tests.unit.agent.algorithms.replay_agents import BOX, DISCRETE, SPACE, make_batch

GOLDEN_Q = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 4.0]]).T


def make(space=BOX, seed=5, actor=None, **options):
    policy = {"policy": "gaussian"} if space is BOX else {}
    built = OffPolicyActor.create_factory(SPACE, space, **{"hidden_sizes": (6,), **policy, **(actor or {})})(seed=2)
    few = {"sample_action_num": 3} if space is BOX else {}
    algorithm = MPO.create_factory(**{**few, **options})(actor=built, seed=seed)
    # The target networks differ from the others, as after an update.
    generator = torch.Generator().manual_seed(9)
    for vector in algorithm._target_vectors.values():
        vector.data.add_(0.3 * torch.randn(len(vector), generator=generator))
    return algorithm


def uniform(q):
    return np.full(q.shape, -math.log(len(q)))


def divergence(q, prior, eta):
    """Return the mean divergence of the weights from the prior, one observation and action at a time."""
    found = []
    for column, logp in zip(q.T, prior.T, strict=True):
        weights = np.exp(logp + (column - column.max()) / eta)
        weights /= weights.sum()
        found.append(sum(w * (math.log(w) - p) for w, p in zip(weights, logp, strict=True) if w > 0))
    return float(np.mean(found))


# The dual of the E-step


def test_the_golden_temperature_keeps_the_divergence_at_its_bound():
    eta = best_temperature(GOLDEN_Q, uniform(GOLDEN_Q), 0.1)
    assert eta == pytest.approx(3.3792, abs=5e-5)
    assert divergence(GOLDEN_Q, uniform(GOLDEN_Q), eta) == pytest.approx(0.1, abs=1e-7)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("constraint", [1e-3, 0.1, 1.0])
def test_the_exact_temperature_minimizes_the_dual(scale, constraint):
    rng = np.random.default_rng(0)
    q, logits = scale * rng.normal(size=(9, 5)), rng.normal(size=(9, 5))
    prior = logits - np.log(np.exp(logits).sum(0))
    eta = best_temperature(q, prior, constraint)
    variable = torch.tensor(eta, dtype=torch.float64, requires_grad=True)
    value = dual(variable, torch.tensor(q), torch.tensor(prior), constraint)
    assert float(torch.autograd.grad(value, variable)[0]) == pytest.approx(0.0, abs=1e-6)
    for other in eta * np.geomspace(0.1, 10, 31):
        assert float(dual(torch.tensor(other), torch.tensor(q), torch.tensor(prior), constraint)) >= float(
            value.detach()) - 1e-9 * scale
    assert divergence(q, prior, eta) == pytest.approx(constraint, rel=1e-5)


def test_gradient_steps_of_the_dual_reach_the_exact_temperature():
    """Compare with many steps of gradient descent on one batch: google-deepmind/acme#270 asks for the minimum."""
    q = torch.tensor(GOLDEN_Q)
    parameter = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        dual(torch.nn.functional.softplus(parameter), q, torch.tensor(uniform(GOLDEN_Q)), 0.1).backward()
        optimizer.step()
    found = float(torch.nn.functional.softplus(parameter.detach()))
    assert found == pytest.approx(best_temperature(GOLDEN_Q, uniform(GOLDEN_Q), 0.1), rel=1e-4)


def test_the_dual_has_the_gradient_of_finite_differences():
    q, prior = torch.tensor(GOLDEN_Q), torch.tensor(uniform(GOLDEN_Q))
    for eta in (0.5, 3.0, 20.0):
        variable = torch.tensor(eta, dtype=torch.float64, requires_grad=True)
        found = float(torch.autograd.grad(dual(variable, q, prior, 0.1), variable)[0])
        high, low = (float(dual(torch.tensor(eta).double() + step, q, prior, 0.1)) for step in (1e-5, -1e-5))
        assert found == pytest.approx((high - low) / 2e-5, abs=1e-7)
        assert found == pytest.approx(0.1 - divergence(GOLDEN_Q, uniform(GOLDEN_Q), eta), abs=1e-7)


@pytest.mark.parametrize("q", [np.ones((3, 2)), np.zeros((1, 4)), np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])])
def test_values_without_differences_give_a_tiny_temperature(q):
    """Check values with which no temperature reaches a large divergence, so the dual is least as eta approaches 0."""
    eta = best_temperature(q, uniform(q), 0.9)
    assert 0 < eta < 1e-6


@pytest.mark.parametrize("value", [1e-8, 0.1, 10.0, 1000.0, 1e6])
def test_dual_parameters_start_at_the_softplus_of_their_values(value):
    found = torch.nn.functional.softplus(torch.tensor(inverse_softplus(value), dtype=torch.float64))
    assert float(found) == pytest.approx(value, rel=1e-6)


# Losses


def test_golden_divergences(monkeypatch):
    for per_dim in (False, True):
        algorithm = make(per_dim_constraining=per_dim)
        old, new = (torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.5]]).log()), (
            torch.tensor([[0.5, 0.5]]), torch.tensor([[2.0, 1.0]]).log())
        monkeypatch.setattr(algorithm.actor, "gaussian", lambda obs, policy=None, old=old, new=new: (
            new if policy is None else old), raising=False)
        zeros = torch.zeros(3, 1)
        _, found = algorithm._gaussian_step({}, None, torch.zeros(3, 1, 2), zeros, zeros)
        (kl_mean, mean_bound), (kl_var, var_bound) = found["alpha_mean"], found["alpha_var"]
        assert float(kl_mean.sum()) == pytest.approx(0.625)
        assert float(kl_var.sum()) == pytest.approx(0.636294, abs=1e-6)
        assert (kl_mean.shape, mean_bound, var_bound) == (((2,), 0.005, 5e-5) if per_dim else ((), 0.01, 1e-4))
        mean, std = old[0], old[1].exp()
        torch.testing.assert_close(kl_mean.sum(), kl_divergence(Normal(mean, std), Normal(new[0], std)).sum())
        torch.testing.assert_close(kl_var.sum(), kl_divergence(Normal(mean, std), Normal(mean, new[1].exp())).sum())


def values_of(critics, obs, action=None):
    """Return the least value of all critics, (B,) or (B, n)."""
    return torch.stack([critic(obs) if action is None else critic(obs, action) for critic in critics]).min(0).values


def softplus(x):
    return (1 + x.exp()).log()


def gaussian_losses(algorithm, batch):
    """Return the three losses of a Box, computed with torch's distributions, one draw at a time."""
    actor, count = algorithm.actor, algorithm.options.sample_action_num
    state = algorithm.update_generator.get_state()

    def policy(net, obs):
        mean, log_std = net(obs).chunk(2, -1)
        return Normal(mean, log_std.clamp(-20, 2).exp())

    def draws(old):
        noise = torch.empty(count, *old.mean.shape).normal_(generator=algorithm.update_generator)
        return [old.mean + old.stddev * row for row in noise]
    with torch.no_grad():
        after = policy(algorithm.targets["pi"], batch.next_obs)
        values = [values_of(algorithm.targets["q"], batch.next_obs, u.clamp(-1, 1)) for u in draws(after)]
        target = batch.ret + batch.discount * sum(values) / count
        old = policy(algorithm.targets["pi"], batch.obs)
        actions = draws(old)
        q = torch.stack([values_of(algorithm.targets["q"], batch.obs, u.clamp(-1, 1)) for u in actions])
    algorithm.update_generator.set_state(state)
    deltas = [critic(batch.obs, batch.action) - target for critic in actor.critics]
    q_loss = sum((batch.weight * delta**2).mean() for delta in deltas) / 2
    if "temperature" in algorithm.duals:
        eta = softplus(algorithm.duals["temperature"])
        dual_loss = eta * 0.1 + eta * (torch.exp(q / eta).mean(0)).log().mean()
    else:
        eta, dual_loss = torch.tensor(best_temperature(q.double().numpy(), uniform(q), 0.1)), 0.0
    weights = torch.exp(q / eta.detach())
    weights = weights / weights.sum(0)
    new = policy(actor.policy, batch.obs)
    pi_loss = 0.0
    for u, weight in zip(actions, weights, strict=True):
        likelihood = Normal(new.mean, old.stddev).log_prob(u) + Normal(old.mean, new.stddev).log_prob(u)
        pi_loss = pi_loss - (weight * likelihood.sum(-1)).mean()
    for name, other, bound in (("alpha_mean", Normal(new.mean, old.stddev), 0.01),
                               ("alpha_var", Normal(old.mean, new.stddev), 1e-4)):
        alpha, kl = softplus(algorithm.duals[name]), kl_divergence(old, other).mean(0)
        if alpha.dim() == 0:
            kl = kl.sum()
        pi_loss = pi_loss + (alpha.detach() * kl).sum()
        dual_loss = dual_loss + (alpha * (bound / alpha.numel() - kl.detach())).sum()
    return q_loss, pi_loss, dual_loss


def discrete_losses(algorithm, batch):
    """Return the three losses of a Discrete space, as sums over the allowed actions."""
    actor = algorithm.actor

    def policy(net, obs, mask):
        return Categorical(logits=net(obs) if mask is None else net(obs).masked_fill(~mask, -1e30))
    with torch.no_grad():
        after = policy(algorithm.targets["pi"], batch.next_obs, batch.next_mask)
        target = batch.ret + batch.discount * (after.probs * values_of(algorithm.targets["q"], batch.next_obs)).sum(-1)
        old = policy(algorithm.targets["pi"], batch.obs, batch.mask)
        q = values_of(algorithm.targets["q"], batch.obs)
    rows = torch.arange(len(q))
    deltas = [critic(batch.obs)[rows, batch.action] - target for critic in actor.critics]
    q_loss = sum((batch.weight * delta**2).mean() for delta in deltas) / 2
    eta, alpha = softplus(algorithm.duals["temperature"]), softplus(algorithm.duals["alpha"])
    dual_loss = eta * 0.1 + eta * (old.probs * torch.exp(q / eta)).sum(-1).log().mean()
    weights = old.probs * torch.exp(q / eta.detach())
    weights = weights / weights.sum(-1, keepdim=True)
    new = policy(actor.policy, batch.obs, batch.mask)
    kl = (old.probs * (old.logits - new.logits)).sum(-1).mean()
    pi_loss = -(weights * new.logits).sum(-1).mean() + alpha.detach() * kl
    return q_loss, pi_loss, dual_loss + alpha * (0.01 - kl.detach())


MASK = torch.tensor([[True, False, True, True]] * 4 + [[False, True, True, False]] * 4)


@pytest.mark.parametrize(("space", "options", "mask"), [
    (BOX, {}, None), (BOX, {"per_dim_constraining": True}, None), (BOX, {"dual_solver": "exact"}, None),
    (DISCRETE, {}, None), (DISCRETE, {}, MASK)], ids=["box", "per dimension", "exact", "discrete", "masked"])
def test_losses_and_gradients_equal_plain_formulas(space, options, mask):
    algorithm = make(space, init_alpha_var=20.0, **options) if space is BOX else make(space, **options)
    batch = make_batch(algorithm)
    if mask is not None:
        batch = dataclasses.replace(batch, mask=mask, next_mask=mask.flip(0), action=mask.float().argmax(-1))
    expected = (gaussian_losses if space is BOX else discrete_losses)(algorithm, batch)
    wanted = [torch.cat([part.flatten() for part in torch.autograd.grad(loss, algorithm.groups[name].params)])
              for name, loss in zip(("q", "pi", "dual"), expected, strict=True)]
    gradients, info = algorithm.compute_gradients(batch)
    constant = 0.0  # of the log-densities, which the losses leave out
    if space is BOX:
        with torch.no_grad():
            old_log_std = algorithm.targets["pi"](batch.obs).chunk(2, -1)[1].clamp(-20, 2)
        constant = float(2 * math.log(2 * math.pi) + old_log_std.sum(-1).mean())
    found = [info["loss"], info["loss_pi"] + constant, info["loss_dual"]]
    assert found == pytest.approx([float(loss.detach()) for loss in expected], rel=1e-4, abs=1e-5)
    assert list(algorithm.groups) == ["q", "pi", "dual"]
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("space", "options"), [(BOX, {"per_dim_constraining": True}), (DISCRETE, {})])
def test_graphs_of_the_losses_equal_the_losses(traced_only, space, options):
    plain, compiled = (make(space, compile=is_compiled, **options) for is_compiled in (False, True))
    for seed in range(3):
        batch = make_batch(plain, seed=seed)
        (expected, wanted), (gradients, info) = (
            algorithm.compute_gradients(batch) for algorithm in (plain, compiled))
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
        assert info.pop("errors").tolist() == pytest.approx(wanted.pop("errors").tolist(), rel=1e-4)
        assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        for algorithm in (plain, compiled):
            algorithm.apply_gradients([gradient.clone() for gradient in expected])


def test_means_and_standard_deviations_move_separately():
    """Check that one half of the policy's outputs gets no gradient from the other half's likelihood and divergence."""
    algorithm = make()
    mean, log_std = (torch.randn(4, 2, requires_grad=True) for _ in range(2))
    old = torch.randn(4, 2), torch.randn(4, 2)
    algorithm.actor.gaussian = lambda obs, policy=None: (mean, log_std) if policy is None else old
    draws = torch.randn(3, 4, 2)
    fit, kls = algorithm._gaussian_step({}, None, draws, None, torch.full((3, 4), 1 / 3))
    by_mean = torch.autograd.grad(fit.sum(), mean, retain_graph=True)[0]
    torch.testing.assert_close(by_mean, ((draws - mean) / (2 * old[1]).exp()).mean(0).detach())
    assert torch.autograd.grad(kls["alpha_mean"][0], log_std, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(kls["alpha_var"][0], mean, allow_unused=True) == (None,)


def test_equal_values_never_make_the_duals_negative_or_nan():
    """Check a temperature that falls for ever: without a floor, q / eta would be 0 / 0 in the end."""
    for space in (BOX, DISCRETE):
        algorithm = make(space, lr_dual=5.0, lr_q=0.0, lr_pi=0.0)
        with torch.no_grad():
            for critic in algorithm.targets["q"]:
                for parameter in critic.parameters():
                    parameter.zero_()
        for _ in range(20):
            gradients, info = algorithm.compute_gradients(make_batch(algorithm))
            algorithm.apply_gradients(gradients)
            assert all(map(math.isfinite, [value for name, value in info.items() if name != "errors"]))
        assert 0 < info["temperature"] < 2e-8


def test_alpha_stays_below_its_limit():
    algorithm = make(alpha_max=2.0, lr_dual=1.0, init_alpha_mean=1.0, kl_mean_constraint=1e-9, kl_var_constraint=1e-9)
    assert float(torch.nn.functional.softplus(algorithm.duals["alpha_var"].detach())) == pytest.approx(2.0)
    for _ in range(10):
        algorithm.apply_gradients(algorithm.compute_gradients(make_batch(algorithm))[0])
    info = algorithm.compute_gradients(make_batch(algorithm))[1]
    assert (info["alpha_mean"], info["alpha_var"]) == pytest.approx((2.0, 2.0), rel=1e-5)


@pytest.mark.parametrize(("space", "option", "value"), [
    (BOX, "lr_q", 1e-2), (BOX, "lr_pi", 1e-2), (BOX, "lr_dual", 1e-1), (BOX, "dual_constraint", 1.0),
    (BOX, "kl_mean_constraint", 1.0), (BOX, "kl_var_constraint", 1.0), (DISCRETE, "kl_constraint", 1.0),
    (BOX, "sample_action_num", 5), (BOX, "per_dim_constraining", True), (BOX, "dual_solver", "exact"),
    (BOX, "init_temperature", 1.0), (BOX, "init_alpha_mean", 1.0), (DISCRETE, "init_alpha_mean", 1.0),
    (BOX, "init_alpha_var", 1.0), (BOX, "alpha_max", 1.0), (BOX, "polyak", 0.5), (BOX, "target_update_interval", 1),
    (BOX, "max_grad_norm", 1e-3)])
def test_every_option_changes_what_is_learned(space, option, value):
    states = []
    for options in ({}, {option: value}):
        algorithm = make(space, **{"target_update_interval": 2, "optimizer": "sgd", **options})
        for seed in range(3):
            algorithm.apply_gradients(algorithm.compute_gradients(make_batch(algorithm, seed=seed))[0])
        _, info = algorithm.compute_gradients(make_batch(algorithm, seed=3))
        states.append([algorithm.groups["q"].data.sum().item(), algorithm.groups["pi"].data.sum().item(),
                       info["loss_dual"], info["loss_pi"], info["temperature"]])
    assert states[0] != states[1]


# Acting and parts


@pytest.mark.parametrize("policy", ["gaussian", "stochastic"])
def test_actions_are_bounded_and_the_mode_is_the_bounded_mean(policy):
    algorithm = make(actor={"policy": policy})
    with torch.no_grad():
        algorithm.actor.policy.head.bias.copy_(torch.tensor([3.0, -0.5, 0.0, 0.0]))
    obs = {"obs": np.zeros((200, 3), np.float32)}
    mean = algorithm.actor.gaussian({"obs": torch.zeros(1, 3)})[0][0].detach()
    bounded = mean.clamp(-1, 1) if policy == "gaussian" else mean.tanh()
    algorithm.parameters = {**algorithm.parameters, "random_actions": 0.0}
    best = algorithm.acting_step(obs, {}, np.zeros(200, bool), deterministic=True)
    np.testing.assert_allclose(best.action, bounded.expand(200, 2), rtol=1e-6)
    drawn = algorithm.acting_step(obs, {}, np.zeros(200, bool))
    assert np.abs(drawn.action).max() <= 1.0
    assert (drawn.action == 1.0).any() == (policy == "gaussian")
    assert all(BOX.contains(action) for action in drawn.clipped_action)
    assert drawn.action[:, 1].std() > 0.3


@pytest.mark.parametrize(("space", "options", "message"), [
    (BOX, {"kl_constraint": 0.1}, "kl_constraint needs Discrete actions, got Box"),
    (DISCRETE, {"sample_action_num": 5, "kl_var_constraint": 1.0},
     "kl_var_constraint, sample_action_num needs a Box of actions, got Discrete"),
    (BOX, {"dual_solver": "exact", "init_temperature": 2.0}, "init_temperature needs dual_solver='gradient'"),
    (BOX, {"dual_solver": "exact", "compile": True}, "compile=True does not support dual_solver='exact'"),
    (BOX, {"dual_constraint": 0.0}, "dual_constraint must be"),
    (BOX, {"dual_solver": "newton"}, "dual_solver must be")])
def test_options_without_an_effect_are_refused(space, options, message):
    envs = VecEnv.create_factory("Pendulum-v1" if space is BOX else "CartPole-v1", vec_env_size=1)
    actor = OffPolicyActor.create_factory(envs.observation_space, envs.action_space)
    with pytest.raises(ConfigError, match=message):
        Scheme(MPO.create_factory(**options), actor, ReplayBuffer.create_factory(100), envs)


def test_other_policies_are_refused():
    envs = VecEnv.create_factory("Pendulum-v1", vec_env_size=1)

    def scheme(algorithm, policy):
        actor = OffPolicyActor.create_factory(envs.observation_space, envs.action_space, policy=policy)
        return Scheme(algorithm.create_factory(), actor, ReplayBuffer.create_factory(100), envs)
    with pytest.raises(ConfigError, match="MPO needs OffPolicyActor with policy='gaussian' or 'stochastic'"):
        scheme(MPO, "deterministic")
    with pytest.raises(ConfigError, match=r"SAC needs OffPolicyActor with policy='stochastic'.*for this .*: MPO"):
        scheme(SAC, "gaussian")
    with pytest.raises(ConfigError, match="policy='gaussian' needs a Box of actions"):
        OffPolicyActor.create_factory(SPACE, gym.spaces.Discrete(2), policy="gaussian")
