"""Compare the losses of replay algorithms with independent implementations in NumPy and float64."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor, QActor
from pytorchrl.agent.algorithms import DDPG, DQN, SAC, TD3
from pytorchrl.agent.data import ReplayBatch

SAMPLES, OBS_SIZE, NUM_ACTIONS, ACTION_SIZE = 7, 3, 4, 2
SPACE = gym.spaces.Box(-1, 1, (OBS_SIZE,), np.float32)
BOX = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
DISCRETE = gym.spaces.Discrete(NUM_ACTIONS)
SMALL = {"hidden_sizes": (5, 6), "activation": "tanh"}


def make_batch(is_discrete, masked=False, seed=3):
    rng = np.random.default_rng(seed)
    action = rng.integers(NUM_ACTIONS, size=SAMPLES) if is_discrete else rng.uniform(
        -1, 1, (SAMPLES, ACTION_SIZE)).astype(np.float32)
    mask, next_mask = rng.random((2, SAMPLES, NUM_ACTIONS)) < 0.5
    for allowed in mask, next_mask:
        allowed[:, 1] |= ~allowed.any(1)
    discount = rng.random(SAMPLES).astype(np.float32)
    discount[0] = 0.0
    next_mask[0] = False  # after a termination, a mask may forbid all actions
    arrays = {
        "action": action, "ret": 3 * rng.normal(size=SAMPLES), "discount": discount, "weight": rng.random(SAMPLES)}
    tensors = {name: torch.as_tensor(x if x.dtype == np.int64 else x.astype(np.float32)) for name, x in arrays.items()}
    obs, next_obs = torch.as_tensor(rng.normal(size=(2, SAMPLES, OBS_SIZE)).astype(np.float32))
    return ReplayBatch(
        obs={"obs": obs}, next_obs={"obs": next_obs}, ids=torch.arange(SAMPLES), **tensors,
        mask=torch.as_tensor(mask) if masked else None, next_mask=torch.as_tensor(next_mask) if masked else None)


def make(cls, actor_class, space, actor=None, **options):
    """Return an algorithm whose target networks differ from its online networks."""
    built = actor_class.create_factory(SPACE, space, **{**SMALL, **(actor or {})})(seed=2)
    return with_other_targets(cls.create_factory(**options)(actor=built, seed=5))


def with_other_targets(algorithm):
    """Change the target networks of an algorithm at random, and return the algorithm."""
    noise = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for target in algorithm.targets.values():
            for parameter in target.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
    return algorithm


def double(tensor):
    return tensor.detach().numpy().astype(np.float64)


def parameters(algorithm):
    """Return all parameters as {network: {name: float64 array}}."""
    found = {name: {key: double(value) for key, value in network.named_parameters()}
             for name, network in algorithm.actor.networks().items()}
    for name, target in algorithm.targets.items():
        found[f"target_{name}"] = {key: double(value) for key, value in target.named_parameters()}
    return found


def linear(params, name, x):
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def mlp(params, name, x):
    layer = 0
    while f"{name}.{layer}.weight" in params:
        x = np.tanh(linear(params, f"{name}.{layer}", x))
        layer += 1
    assert layer == 2
    return x


def q_net(params, prefix, obs, mask=None):
    features = mlp(params, f"{prefix}trunk.extractor.layers", obs)
    advantage = linear(params, f"{prefix}advantage_head", features)
    if f"{prefix}value_head.weight" not in params:
        return advantage
    rows = [row if mask is None or not mask[i].any() else row[mask[i]] for i, row in enumerate(advantage)]
    means = np.array([0.0 if mask is not None and not mask[i].any() else row.mean() for i, row in enumerate(rows)])
    return linear(params, f"{prefix}value_head", features) + advantage - means[:, None]


def policy(params, obs):
    return linear(params, "head", mlp(params, "trunk.extractor.layers", obs))


def critics(params, obs, action, count=2):
    rows = np.concatenate((obs, action), 1)
    return np.stack([linear(params, f"{i}.head", mlp(params, f"{i}.layers.layers", rows))[:, 0] for i in range(count)])


def slope(loss, params, direction):
    """Return the derivative of `loss(params)` along a direction, by central differences."""
    size = 1e-6
    ends = [loss({key: value + sign * size * direction[key] for key, value in params.items()}) for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * size)


def check_gradients(algorithm, batch, references):
    """Compare gradients with the slopes of float64 losses, and return the info of the gradients.

    `references` maps each parameter group to its loss, a function of the parameters of that group.
    """
    gradients, info = algorithm.compute_gradients(batch)
    assert list(algorithm.groups) == list(references)
    rng = np.random.default_rng(1)
    for (group, vector), gradient in zip(algorithm.groups.items(), gradients, strict=True):
        params = {name: double(value) for name, value in vector.split(vector.data).items()}
        for _ in range(3):
            direction = {name: rng.normal(size=value.shape) for name, value in params.items()}
            flat = np.concatenate([value.reshape(-1) for value in direction.values()])
            assert slope(references[group], params, direction) == pytest.approx(float(double(gradient) @ flat),
                                                                                rel=1e-4, abs=1e-5)
        name = "loss" if group == "q" else f"loss_{group}"
        assert info[name] == pytest.approx(float(references[group](params)), rel=1e-5, abs=1e-6)
    return info


# DQN


def huber(delta):
    return np.where(np.abs(delta) <= 1, 0.5 * delta**2, np.abs(delta) - 0.5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("is_double", [False, True])
def test_dqn_loss_and_gradient_follow_the_formula(is_double, loss, dueling, masked):
    algorithm = make(DQN, QActor, DISCRETE, {"dueling": dueling}, double=is_double, loss=loss)
    batch = make_batch(True, masked)
    obs, next_obs = double(batch.obs["obs"]), double(batch.next_obs["obs"])
    mask, next_mask = (None if m is None else m.numpy() for m in (batch.mask, batch.next_mask))
    params = parameters(algorithm)
    target_scores = q_net(params["target_q"], "", next_obs, next_mask)
    choosing = q_net(params["q"], "", next_obs, next_mask) if is_double else target_scores
    allowed = np.ones_like(choosing, bool) if next_mask is None else next_mask
    best = [max(np.flatnonzero(row), key=lambda a, i=i: choosing[i, a], default=0) for i, row in enumerate(allowed)]
    target = double(batch.ret) + double(batch.discount) * target_scores[np.arange(SAMPLES), best]

    def delta(q):
        return q_net(q, "", obs, mask)[np.arange(SAMPLES), batch.action.numpy()] - target

    shape = huber if loss == "huber" else np.square
    info = check_gradients(algorithm, batch, {"q": lambda q: np.mean(double(batch.weight) * shape(delta(q)))})
    np.testing.assert_allclose(info["errors"].numpy(), np.abs(delta(params["q"])), rtol=1e-5)
    assert info["errors"].max() > 1  # some errors reach the linear part of the Huber loss


def test_double_target_differs_from_single_on_a_table():
    scores = {"q": [[1.0, 5.0, 0.0, 0.0]], "target_q": [[7.0, 2.0, 0.0, 0.0]]}
    batch = make_batch(True)
    errors = {}
    for is_double in (True, False):
        algorithm = make(DQN, QActor, DISCRETE, double=is_double)
        for name, network in (("q", algorithm.actor.q), ("target_q", algorithm.targets["q"])):
            with torch.no_grad():
                network.advantage_head.weight.zero_()
                network.advantage_head.bias.copy_(torch.tensor(scores[name][0]))
        batch.action[:], batch.ret[:], batch.discount[:] = 0, 10.0, 0.5
        errors[is_double] = algorithm.compute_gradients(batch)[1]["errors"]
    assert errors[True].tolist() == [10.0 + 0.5 * 2.0 - 1.0] * SAMPLES
    assert errors[False].tolist() == [10.0 + 0.5 * 7.0 - 1.0] * SAMPLES


def test_noisy_networks_use_new_noise_for_each_batch():
    algorithm = make(DQN, QActor, DISCRETE, {"noisy": True})
    batch = make_batch(True)
    losses = [algorithm.compute_gradients(batch)[1]["loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    gradient = dict(algorithm.actor.q.named_parameters())["advantage_head.weight_sigma"].grad
    assert gradient.abs().sum() > 0


# DDPG, TD3


@pytest.mark.parametrize("num_critics", [1, 2])
def test_ddpg_losses_and_gradients_follow_the_formula(num_critics):
    algorithm = make(DDPG, OffPolicyActor, BOX, {"policy": "deterministic", "num_critics": num_critics})
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    next_action = np.tanh(policy(params["target_pi"], next_obs))
    target = double(batch.ret) + double(batch.discount) * critics(
        params["target_q"], next_obs, next_action, num_critics).min(0)

    def deltas(q):
        return critics(q, obs, action, num_critics) - target

    info = check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * deltas(q) ** 2, 1).sum(),
        "pi": lambda pi: -critics(params["q"], obs, np.tanh(policy(pi, obs)), num_critics)[0].mean()})
    np.testing.assert_allclose(info["errors"].numpy(), np.abs(deltas(params["q"])).mean(0), rtol=1e-5)


@pytest.mark.parametrize("clip", [0.5, 0.01])
def test_td3_target_noise_is_clipped_and_drawn_per_sample_and_dimension(clip):
    algorithm = make(TD3, OffPolicyActor, BOX, {"policy": "deterministic"}, target_noise=0.3, noise_clip=clip)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    generator = algorithm.update_generator.clone_state()
    noise = double(torch.empty(SAMPLES, ACTION_SIZE).normal_(generator=generator))
    next_action = np.clip(np.tanh(policy(params["target_pi"], next_obs)) + np.clip(0.3 * noise, -clip, clip), -1, 1)
    target = double(batch.ret) + double(batch.discount) * critics(params["target_q"], next_obs, next_action).min(0)
    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * (critics(q, obs, action) - target) ** 2, 1).sum(),
        "pi": lambda pi: -critics(params["q"], obs, np.tanh(policy(pi, obs)))[0].mean()})


# SAC


def squashed(params, obs, noise):
    """Return actions and their log-densities, computed directly from the change of variables."""
    mean, log_std = np.split(policy(params, obs), 2, axis=1)
    log_std = np.clip(log_std, -20, 2)
    u = mean + np.exp(log_std) * noise
    logp = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - np.tanh(u) ** 2)
    return np.tanh(u), logp.sum(1)


@pytest.mark.parametrize("learn_alpha", [True, False])
def test_sac_losses_and_gradients_follow_the_formula(learn_alpha):
    algorithm = make(SAC, OffPolicyActor, BOX, initial_alpha=0.4, learn_alpha=learn_alpha)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    generator = algorithm.update_generator.clone_state()
    next_noise, noise = (double(torch.empty(SAMPLES, ACTION_SIZE).normal_(generator=generator)) for _ in range(2))
    next_action, next_logp = squashed(params["pi"], next_obs, next_noise)
    target = double(batch.ret) + double(batch.discount) * (
        critics(params["target_q"], next_obs, next_action).min(0) - 0.4 * next_logp)

    def loss_pi(pi):
        chosen, logp = squashed(pi, obs, noise)
        return np.mean(0.4 * logp - critics(params["q"], obs, chosen).min(0))

    mean_logp = squashed(params["pi"], obs, noise)[1].mean()
    references = {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * (critics(q, obs, action) - target) ** 2, 1).sum(),
        "pi": loss_pi}
    if learn_alpha:
        references["alpha"] = lambda alpha: -float(alpha["log_alpha"]) * (mean_logp - ACTION_SIZE)
    info = check_gradients(algorithm, batch, references)
    deltas = critics(params["q"], obs, action) - target
    np.testing.assert_allclose(info["errors"].numpy(), np.abs(deltas).mean(0), rtol=1e-4)
    assert info["alpha"] == pytest.approx(0.4)
    assert info["entropy"] == pytest.approx(-mean_logp, rel=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_discrete_sac_losses_and_gradients_follow_the_formula(masked):
    algorithm = make(SAC, OffPolicyActor, DISCRETE, initial_alpha=1.5)
    batch = make_batch(True, masked)
    obs, next_obs = double(batch.obs["obs"]), double(batch.next_obs["obs"])
    masks = [np.ones((SAMPLES, NUM_ACTIONS), bool) if m is None else m.numpy() for m in (batch.mask, batch.next_mask)]
    params = parameters(algorithm)

    def probabilities(pi, x, mask):
        weights = np.where(mask | ~mask.any(1, keepdims=True), np.exp(policy(pi, x)), 0.0)
        return weights / weights.sum(1, keepdims=True)

    def entropy(p):
        return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(1)

    def scores(q, x):
        return np.stack([q_net(q, f"{i}.", x) for i in range(2)])

    p_next = probabilities(params["pi"], next_obs, masks[1])
    next_value = (p_next * scores(params["target_q"], next_obs).min(0)).sum(1) + 1.5 * entropy(p_next)
    target = double(batch.ret) + double(batch.discount) * next_value
    rows, taken, lowest = np.arange(SAMPLES), batch.action.numpy(), scores(params["q"], obs).min(0)

    def loss_pi(pi):
        p = probabilities(pi, obs, masks[0])
        return -np.mean(1.5 * entropy(p) + (p * lowest).sum(1))

    allowed = masks[0].sum(1)
    aim = 0.89 * np.log(np.where(allowed == 0, NUM_ACTIONS, allowed)).mean()
    mean_entropy = entropy(probabilities(params["pi"], obs, masks[0])).mean()
    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * (scores(q, obs)[:, rows, taken] - target) ** 2, 1).sum(),
        "pi": loss_pi,
        "alpha": lambda alpha: float(alpha["log_alpha"]) * (mean_entropy - aim)})


def test_sac_alpha_falls_while_entropy_is_above_its_target():
    factors = {}
    for target in (-50.0, 50.0):
        algorithm = make(SAC, OffPolicyActor, BOX, target_entropy=target)
        algorithm.compute_gradients(make_batch(False))
        algorithm.apply_gradients()
        factors[target] = float(algorithm.log_alpha.detach().exp())
    assert factors[-50.0] < 1 < factors[50.0]


# All algorithms


@pytest.mark.parametrize("kind", ["dqn", "td3", "sac"])
def test_non_finite_loss_makes_the_whole_gradient_nan(kind):
    algorithm = make_kind(kind)
    batch = make_batch(kind == "dqn")
    batch.ret[2] = float("inf")
    gradients, _ = algorithm.compute_gradients(batch)
    assert all(gradient.isnan().all() for gradient in gradients)


def make_kind(kind):
    if kind == "dqn":
        return make(DQN, QActor, DISCRETE)
    if kind == "sac":
        return make(SAC, OffPolicyActor, BOX)
    return make(TD3, OffPolicyActor, BOX, {"policy": "deterministic"})


@pytest.mark.parametrize(("cls", "actor_class", "space", "actor"), [
    (DQN, QActor, DISCRETE, {"dueling": True, "noisy": True}), (SAC, OffPolicyActor, BOX, {}),
    (DQN, QActor, DISCRETE, {"dueling": True, "distribution": "categorical"}),
    (DQN, QActor, DISCRETE, {"dueling": True, "distribution": "quantile"}),
    (SAC, OffPolicyActor, BOX, {"distribution": "quantile", "num_atoms": 9}),
    (TD3, OffPolicyActor, BOX, {"policy": "deterministic", "distribution": "categorical"}),
    (SAC, OffPolicyActor, DISCRETE, {}), (TD3, OffPolicyActor, BOX, {"policy": "deterministic"})])
def test_mixed_precision_rounds_products_only(cls, actor_class, space, actor):
    """Check that losses and gradients in mixed precision are float32, and close to those in full precision."""
    plain, mixed = (make(cls, actor_class, space, actor, mixed_precision=flag) for flag in (False, True))
    batch = make_batch(space is DISCRETE)
    (expected, wanted), (gradients, info) = (algorithm.compute_gradients(batch) for algorithm in (plain, mixed))
    assert info["errors"].dtype == torch.float32
    assert not torch.equal(info["errors"], wanted["errors"])
    torch.testing.assert_close(info.pop("errors"), wanted.pop("errors"), rtol=0.02, atol=0.02)
    assert info == pytest.approx(wanted, rel=0.02, abs=0.02)
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert float(torch.linalg.vector_norm(gradient - other)) < 0.05 * float(torch.linalg.vector_norm(other))
    torch.testing.assert_close(mixed.td_errors(batch), plain.td_errors(batch), rtol=0.02, atol=0.02)
    assert not torch.equal(mixed.td_errors(batch), plain.td_errors(batch))
