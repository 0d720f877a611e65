"""Compare algorithms that learn distributions of the return with independent loops in float64."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor, QActor
from pytorchrl.agent.algorithms import DDPG, DQN, R2D2, SAC, TD3, ReplayAlgorithm
from pytorchrl.agent.algorithms.r2d2 import rescale, unrescale
from pytorchrl.agent.fit import check_fit
from pytorchrl.agent.storages import ReplayBuffer
from pytorchrl.errors import ConfigError, ContractError
from tests.unit.agent.algorithms import test_r2d2
from tests.unit.agent.algorithms.test_replay_losses import (
    ACTION_SIZE,
    BOX,
    DISCRETE,
    NUM_ACTIONS,
    SAMPLES,
    SPACE,
    check_gradients,
    double,
    linear,
    make,
    make_batch,
    mlp,
    parameters,
    policy,
    squashed,
)

K, LOW, HIGH = 5, -2.0, 3.0
SUPPORT = np.linspace(LOW, HIGH, K)
ATOMS = {"categorical": {"distribution": "categorical", "num_atoms": K, "v_min": LOW, "v_max": HIGH},
         "quantile": {"distribution": "quantile", "num_atoms": K}}


# References: what one distribution (k,) is worth, and how it is learned


def probabilities(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def mean_of(kind, row):
    return probabilities(row) @ SUPPORT if kind == "categorical" else row.mean()


def target_of(kind, row, move):
    """Return the target for a sample: the distribution `row` whose returns are moved by `move`."""
    if kind == "quantile":
        return np.array([move(value) for value in row])
    found, gap = np.zeros(K), (HIGH - LOW) / (K - 1)
    for probability, value in zip(probabilities(row), SUPPORT, strict=True):
        place = (min(max(move(value), LOW), HIGH) - LOW) / gap
        left = min(math.floor(place), K - 2)
        found[left] += probability * (left + 1 - place)
        found[left + 1] += probability * (place - left)
    return found


def loss_of(kind, row, target):
    if kind == "categorical":
        p = probabilities(row)
        return sum(m * math.log(m / p[k]) for k, m in enumerate(target) if m > 0)
    total = 0.0
    for i, quantile in enumerate(row):
        for value in target:
            u = value - quantile
            huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
            total += abs((i + 0.5) / len(row) - (1.0 if u < 0 else 0.0)) * huber / len(target)
    return total


def q_net(params, obs, mask=None):
    """Return the outputs (B, n, k) of a network, with the mean of the advantages over the allowed actions."""
    features = mlp(params, "trunk.extractor.layers", obs)
    advantage = linear(params, "advantage_head", features).reshape(len(obs), NUM_ACTIONS, K)
    if "value_head.weight" not in params:
        return advantage
    outputs = linear(params, "value_head", features)[:, None] + advantage
    for row in range(len(obs)):
        allowed = np.ones(NUM_ACTIONS, bool) if mask is None else mask[row]
        if allowed.any():
            outputs[row] -= advantage[row][allowed].mean(0)
    return outputs


# DQN


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("kind", ATOMS)
def test_dqn_loss_and_gradient_follow_the_formula(kind, is_double, dueling, masked):
    algorithm = make(DQN, QActor, DISCRETE, {"dueling": dueling, **ATOMS[kind]}, double=is_double)
    batch = make_batch(True, masked)
    obs, next_obs = double(batch.obs["obs"]), double(batch.next_obs["obs"])
    mask, next_mask = (None if m is None else m.numpy() for m in (batch.mask, batch.next_mask))
    params = parameters(algorithm)
    outputs = q_net(params["target_q"], next_obs, next_mask)
    choosing = q_net(params["q"], next_obs, next_mask) if is_double else outputs
    targets = []
    for row, (ret, discount) in enumerate(zip(double(batch.ret), double(batch.discount), strict=True)):
        allowed = range(NUM_ACTIONS) if next_mask is None else np.flatnonzero(next_mask[row])
        best = max(allowed, key=lambda a, row=row: mean_of(kind, choosing[row, a]), default=0)
        targets.append(target_of(kind, outputs[row, best], lambda z, ret=ret, by=discount: ret + by * z))

    def losses(q):
        chosen = q_net(q, obs, mask)[np.arange(SAMPLES), batch.action.numpy()]
        return np.array([loss_of(kind, *pair) for pair in zip(chosen, targets, strict=True)])

    info = check_gradients(algorithm, batch, {"q": lambda q: np.mean(double(batch.weight) * losses(q))})
    np.testing.assert_allclose(info["errors"].numpy(), losses(params["q"]), rtol=1e-4, atol=1e-6)
    chosen = q_net(params["q"], obs, mask)[np.arange(SAMPLES), batch.action.numpy()]
    assert info["q"] == pytest.approx(np.mean([mean_of(kind, row) for row in chosen]), rel=1e-5)
    np.testing.assert_allclose(algorithm.td_errors(batch).numpy(), info["errors"].numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ATOMS)
def test_a_return_that_is_not_a_number_makes_the_whole_gradient_nan(kind):
    algorithm, batch = make(DQN, QActor, DISCRETE, ATOMS[kind]), make_batch(True)
    batch.ret[2] = math.nan
    (gradient,), _ = algorithm.compute_gradients(batch)
    assert gradient.isnan().all()


@pytest.mark.parametrize("kind", ATOMS)
def test_noisy_networks_use_new_noise_for_each_batch_and_none_for_evaluation(kind):
    algorithm = make(DQN, QActor, DISCRETE, {"noisy": True, "dueling": True, **ATOMS[kind]}, start_steps=0,
                     initial_epsilon=0.0, final_epsilon=0.0)
    batch = make_batch(True)
    assert len({algorithm.compute_gradients(batch)[1]["loss"] for _ in range(3)}) == 3
    obs, done = {"obs": np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)}, np.zeros(40, bool)
    plain = algorithm.actor.get_q_scores({"obs": torch.from_numpy(obs["obs"])}).argmax(-1).tolist()
    for module in (algorithm.actor.train(), algorithm.actor.eval()):
        assert module.q.training is module.training
        assert algorithm.acting_step(obs, {}, done, deterministic=True).action.tolist() == plain
        assert len({tuple(algorithm.acting_step(obs, {}, done).action) for _ in range(20)}) > 1


@pytest.mark.parametrize("num_envs", [1, 6])
@pytest.mark.parametrize("kind", ATOMS)
def test_numpy_chooses_the_same_actions_as_torch(kind, num_envs):
    small, plain = (make(DQN, QActor, DISCRETE, ATOMS[kind], start_steps=0, initial_epsilon=0.3, final_epsilon=0.3)
                    for _ in range(2))
    assert small._small_network is not None
    plain._small_network = None
    done = np.zeros(num_envs, bool)
    for seed in range(30):
        obs = {"obs": np.random.default_rng(seed).normal(size=(num_envs, 3)).astype(np.float32)}
        for deterministic in (False, True):
            chosen = [algorithm.acting_step(obs, {}, done, deterministic).action for algorithm in (small, plain)]
            np.testing.assert_array_equal(*chosen)


class OwnTarget(DQN):
    """Computes targets of means, as before distributions existed."""

    def target_values(self, batch):
        return batch.ret


def test_targets_of_means_are_refused_for_a_distribution():
    batch = make_batch(True)
    make(OwnTarget, QActor, DISCRETE).compute_gradients(batch)
    with pytest.raises(ContractError, match=r"shape \(7,\).*expected .* \(7, 5\) .*atoms of a distribution for each"):
        make(OwnTarget, QActor, DISCRETE, ATOMS["quantile"]).compute_gradients(batch)


class OwnAlgorithm(ReplayAlgorithm):
    """Knows nothing of distributions."""

    actor_class, target_groups = QActor, ("q",)

    def choose(self, obs, done, deterministic, mask):
        return self.actor.act(obs, mask)

    def losses(self, batch):
        raise NotImplementedError


@pytest.mark.parametrize(("cls", "options", "message"), [
    (OwnAlgorithm, {}, "OwnAlgorithm needs QActor with distribution=None, got distribution='quantile'.*DQN"),
    (DQN, {"loss": "mse"}, "loss='mse' needs an actor with distribution=None, got distribution='quantile'")])
def test_parts_that_contradict_a_distribution_are_refused(cls, options, message):
    actor = QActor.create_factory(SPACE, DISCRETE, **ATOMS["quantile"])
    algorithm = cls.create_factory(**options)
    with pytest.raises(ConfigError, match=message):
        check_fit(algorithm, actor, ReplayBuffer.create_factory(100))
    with pytest.raises(ConfigError, match=message):
        algorithm(actor=actor(seed=1), seed=2)


# R2D2


@pytest.mark.parametrize("options", [{}, {"value_rescaling": False}, {"double": False}, {"masked": True}], ids=str)
@pytest.mark.parametrize("kind", ATOMS)
def test_r2d2_loss_and_errors_equal_a_step_by_step_computation(kind, options):
    masked = options.get("masked", False)
    algorithm = test_r2d2.make("gru", ATOMS[kind], **{key: value for key, value in options.items() if key != "masked"})
    batch = test_r2d2.make_batch(algorithm, masked=masked)
    h, inverse = (rescale, unrescale) if algorithm.options.value_rescaling else (lambda x: x, lambda x: x)
    total, errors = 0.0, np.zeros(tuple(batch.ret.shape))
    for b in range(batch.ret.shape[1]):
        online, targets = ([double(row) for row in test_r2d2.step_by_step(net, batch, b)]
                           for net in (algorithm.actor.q, algorithm.targets["q"]))
        for t in np.flatnonzero(batch.valid[:, b].numpy()):
            row = int(batch.next_row[t, b])
            choosing = (online if algorithm.options.double else targets)[row]
            allowed = np.flatnonzero(batch.mask[row, b].numpy()) if masked else range(NUM_ACTIONS)
            best = max(allowed, key=lambda a, choosing=choosing: mean_of(kind, choosing[a]))

            def move(z, ret=float(batch.ret[t, b]), discount=float(batch.discount[t, b])):
                return float(h(ret + discount * inverse(torch.tensor(z, dtype=torch.float64))))

            target = target_of(kind, targets[row][best], move)
            errors[t, b] = loss_of(kind, online[batch.burn_in + t][int(batch.action[t, b])], target)
            total += float(batch.weight[b]) * errors[t, b]
    _, info = algorithm.compute_gradients(batch)
    assert info["loss"] == pytest.approx(total / int(batch.valid.sum()), rel=1e-4)
    np.testing.assert_allclose(info["errors"].numpy(), errors, rtol=1e-3, atol=1e-5)


def test_r2d2_refuses_another_loss_for_a_distribution_but_not_its_default():
    actor = QActor.create_factory(SPACE, gym.spaces.Discrete(4), recurrent_net="gru", **ATOMS["quantile"])
    assert R2D2.create_factory()(actor=actor(seed=1), seed=2).options.loss == "mse"
    with pytest.raises(ConfigError, match="loss='huber' needs an actor with distribution=None"):
        R2D2.create_factory(loss="huber")(actor=actor(seed=1), seed=2)


# SAC, TD3, DDPG


def critic_outputs(params, obs, action, count):
    """Return the outputs (count, B, k) of the critics."""
    rows = np.concatenate((obs, action), 1)
    return np.stack([linear(params, f"{i}.head", mlp(params, f"{i}.layers.layers", rows)) for i in range(count)])


def targets_of(kind, outputs, drop, batch, bonus):
    """Return the target of each sample, from the outputs (count, B, k) of all target critics."""
    found = []
    for row, (ret, discount) in enumerate(zip(double(batch.ret), double(batch.discount), strict=True)):
        def move(z, ret=ret, by=discount, extra=bonus[row]):
            return ret + by * (z + extra)

        if kind == "quantile":
            atoms = sorted(float(atom) for critic in outputs for atom in critic[row])
            found.append(np.array([move(atom) for atom in atoms[:len(atoms) - drop * len(outputs)]]))
        else:
            worst = min(outputs, key=lambda critic, row=row: mean_of(kind, critic[row]))
            found.append(target_of(kind, worst[row], move))
    return found


def losses_of(kind, outputs, targets):
    """Return the losses (count, B) of the critics."""
    return np.array([[loss_of(kind, *pair) for pair in zip(critic, targets, strict=True)] for critic in outputs])


def means_of(kind, outputs):
    return np.array([[mean_of(kind, row) for row in critic] for critic in outputs])


def preferred(kind, outputs):
    """Return what a policy of SAC maximizes: the mean of all quantiles, or the smallest mean of a critic."""
    return means_of(kind, outputs).mean(0) if kind == "quantile" else means_of(kind, outputs).min(0)


@pytest.mark.parametrize(("kind", "count", "drop"), [("categorical", 2, 2), ("quantile", 3, 2), ("quantile", 2, 0)])
def test_sac_losses_and_gradients_follow_the_formula(kind, count, drop):
    options = {"drop_atoms": drop} if kind == "quantile" else {}
    algorithm = make(SAC, OffPolicyActor, BOX, {"num_critics": count, **ATOMS[kind]}, initial_alpha=0.4, **options)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    generator = algorithm.update_generator.clone_state()
    next_noise, noise = (double(torch.empty(SAMPLES, ACTION_SIZE).normal_(generator=generator)) for _ in range(2))
    next_action, next_logp = squashed(params["pi"], next_obs, next_noise)
    targets = targets_of(kind, critic_outputs(params["target_q"], next_obs, next_action, count), drop, batch,
                         -0.4 * next_logp)
    if kind == "quantile":
        assert {len(target) for target in targets} == {count * (K - drop)}

    def loss_pi(pi):
        chosen, logp = squashed(pi, obs, noise)
        return np.mean(0.4 * logp - preferred(kind, critic_outputs(params["q"], obs, chosen, count)))

    mean_logp = squashed(params["pi"], obs, noise)[1].mean()

    def losses(q):
        return losses_of(kind, critic_outputs(q, obs, action, count), targets)

    info = check_gradients(algorithm, batch, {
        "q": lambda q: np.mean(double(batch.weight) * losses(q), 1).sum(), "pi": loss_pi,
        "alpha": lambda alpha: -float(alpha["log_alpha"]) * (mean_logp - ACTION_SIZE)})
    np.testing.assert_allclose(info["errors"].numpy(), losses(params["q"]).mean(0), rtol=1e-4, atol=1e-6)
    assert info["q"] == pytest.approx(means_of(kind, critic_outputs(params["q"], obs, action, count)).mean(), rel=1e-4)


@pytest.mark.parametrize("cls", [DDPG, TD3])
@pytest.mark.parametrize("kind", ATOMS)
def test_ddpg_and_td3_losses_and_gradients_follow_the_formula(kind, cls):
    options = {"target_noise": 0.0} if cls is TD3 else {}
    algorithm = make(cls, OffPolicyActor, BOX, {"policy": "deterministic", **ATOMS[kind]}, **options)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    next_action = np.tanh(policy(params["target_pi"], next_obs))
    targets = targets_of(kind, critic_outputs(params["target_q"], next_obs, next_action, 2), 2, batch,
                         np.zeros(SAMPLES))

    def loss_pi(pi):
        means = means_of(kind, critic_outputs(params["q"], obs, np.tanh(policy(pi, obs)), 2))
        return -(means.mean() if kind == "quantile" else means[0].mean())

    def losses(q):
        return losses_of(kind, critic_outputs(q, obs, action, 2), targets)

    info = check_gradients(algorithm, batch, {
        "q": lambda q: np.mean(double(batch.weight) * losses(q), 1).sum(), "pi": loss_pi})
    np.testing.assert_allclose(info["errors"].numpy(), losses(params["q"]).mean(0), rtol=1e-4, atol=1e-6)
    mean = np.mean([target.mean() if kind == "quantile" else target @ SUPPORT for target in targets])
    assert info["q"] == pytest.approx(mean, rel=1e-4, abs=1e-5)


def test_targets_of_a_random_subset_pool_its_atoms_only():
    actor = {"num_critics": 4, **ATOMS["quantile"]}
    algorithm = make(SAC, OffPolicyActor, BOX, actor, critic_subset=2, drop_atoms=1)
    outputs = torch.arange(4.0)[:, None, None] * 100 + torch.arange(float(K))
    seen = {tuple(algorithm.smallest(outputs).squeeze(0).tolist()) for _ in range(60)}
    expected = {tuple(sorted([*range(100 * i, 100 * i + K), *range(100 * j, 100 * j + K)])[:-2])
                for i in range(4) for j in range(i)}
    assert seen == expected


def test_values_of_distributions_of_critics_are_means():
    actor = OffPolicyActor.create_factory(SPACE, BOX, num_critics=3, **ATOMS["quantile"])(seed=1)
    obs, action = {"obs": torch.randn(6, 3)}, torch.rand(6, 2)
    outputs = torch.stack([critic(obs, action) for critic in actor.critics])
    assert outputs.shape == (3, 6, K)
    torch.testing.assert_close(actor.get_q_scores(obs, action), outputs.mean(-1))


@pytest.mark.parametrize(("actor", "options", "message"), [
    ({}, {"drop_atoms": 3}, "drop_atoms needs an actor with distribution='quantile', got distribution=None"),
    (ATOMS["categorical"], {"drop_atoms": 3}, "drop_atoms needs .*got distribution='categorical'"),
    (ATOMS["quantile"], {"drop_atoms": K}, "drop_atoms must be below .*num_atoms=5, got 5"),
    (ATOMS["quantile"], {"drop_atoms": -1}, "drop_atoms must be a whole number >= 0, got -1")])
def test_contradictory_numbers_of_atoms_are_refused(actor, options, message):
    factory = OffPolicyActor.create_factory(SPACE, BOX, **actor)
    with pytest.raises(ConfigError, match=message):
        check_fit(SAC.create_factory(**options), factory, ReplayBuffer.create_factory(100))


def test_distributions_of_discrete_actions_need_dqn():
    with pytest.raises(ConfigError, match=r"distribution='quantile' needs a Box of actions.*use QActor and DQN"):
        OffPolicyActor.create_factory(SPACE, DISCRETE, distribution="quantile")
