"""Compare ensembles of critics with independent loops in float64: targets of subsets, and delayed policies."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from pytorchrl import train
from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.actors.critic_layers import Dropout
from pytorchrl.agent.algorithms import DDPG, SAC, TD3
from pytorchrl.errors import ConfigError, NonFiniteUpdateError
from tests.unit.agent.algorithms import replay_agents
from tests.unit.agent.algorithms.test_replay_losses import (
    ACTION_SIZE,
    BOX,
    DISCRETE,
    SAMPLES,
    check_gradients,
    critics,
    double,
    make,
    make_batch,
    parameters,
    policy,
    q_net,
    squashed,
)

CRITICS = 5


def lowest_of_subset(scores, draws, size):
    """Return the smallest scores of the critics with the largest draws, by loops; scores are (num_critics, ...)."""
    chosen = sorted(range(len(scores)), key=lambda i: -draws[i])[:size]
    found = scores[chosen[0]].copy()
    for i in chosen[1:]:
        for row in np.ndindex(found.shape):
            found[row] = min(found[row], scores[i][row])
    return found


def normal(generator, *shape):
    return double(torch.empty(shape).normal_(generator=generator))


@pytest.mark.parametrize("size", [1, 2, CRITICS])
def test_the_target_of_redq_is_the_smallest_of_a_random_subset_and_the_policy_maximizes_the_mean(size):
    algorithm = make(SAC, OffPolicyActor, BOX, {"num_critics": CRITICS}, initial_alpha=0.4, critic_subset=size)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    generator = algorithm.update_generator.clone_state()
    next_noise, draws, noise = normal(generator, SAMPLES, ACTION_SIZE), normal(generator, CRITICS), normal(
        generator, SAMPLES, ACTION_SIZE)
    next_action, next_logp = squashed(params["pi"], next_obs, next_noise)
    lowest = lowest_of_subset(critics(params["target_q"], next_obs, next_action, CRITICS), draws, size)
    target = double(batch.ret) + double(batch.discount) * (lowest - 0.4 * next_logp)

    def loss_pi(pi):
        chosen, logp = squashed(pi, obs, noise)
        return np.mean(0.4 * logp - critics(params["q"], obs, chosen, CRITICS).sum(0) / CRITICS)

    mean_logp = squashed(params["pi"], obs, noise)[1].mean()
    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(
            double(batch.weight) * (critics(q, obs, action, CRITICS) - target) ** 2, 1).sum(),
        "pi": loss_pi, "alpha": lambda alpha: -float(alpha["log_alpha"]) * (mean_logp - ACTION_SIZE)})


def test_subsets_of_discrete_sac_are_the_same_for_all_actions_and_rows():
    algorithm = make(SAC, OffPolicyActor, DISCRETE, {"num_critics": CRITICS}, initial_alpha=1.5, critic_subset=2)
    batch = make_batch(True)
    obs, next_obs = double(batch.obs["obs"]), double(batch.next_obs["obs"])
    params = parameters(algorithm)
    draws = normal(algorithm.update_generator.clone_state(), CRITICS)

    def probabilities(pi, x):
        weights = np.exp(policy(pi, x))
        return weights / weights.sum(1, keepdims=True)

    def scores(q, x):
        return np.stack([q_net(q, f"{i}.", x) for i in range(CRITICS)])

    def entropy(p):
        return -(p * np.log(p)).sum(1)

    p_next, rows, taken = probabilities(params["pi"], next_obs), np.arange(SAMPLES), batch.action.numpy()
    lowest = lowest_of_subset(scores(params["target_q"], next_obs), draws, 2)
    target = double(batch.ret) + double(batch.discount) * ((p_next * lowest).sum(1) + 1.5 * entropy(p_next))

    def loss_pi(pi):
        p = probabilities(pi, obs)
        return -np.mean(1.5 * entropy(p) + (p * scores(params["q"], obs).mean(0)).sum(1))

    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * (scores(q, obs)[:, rows, taken] - target) ** 2, 1).sum(),
        "pi": loss_pi, "alpha": lambda alpha: float(alpha["log_alpha"]) * (
            entropy(probabilities(params["pi"], obs)).mean() - algorithm.target_entropy)})


@pytest.mark.parametrize("cls", [DDPG, TD3])
def test_deterministic_policies_maximize_the_mean_of_all_critics_if_targets_use_subsets(cls):
    algorithm = make(cls, OffPolicyActor, BOX, {"policy": "deterministic", "num_critics": CRITICS}, critic_subset=2)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params = parameters(algorithm)
    generator = algorithm.update_generator.clone_state()
    next_action = np.tanh(policy(params["target_pi"], next_obs))
    if cls is TD3:
        next_action = np.clip(next_action + np.clip(0.2 * normal(generator, SAMPLES, ACTION_SIZE), -0.5, 0.5), -1, 1)
    lowest = lowest_of_subset(
        critics(params["target_q"], next_obs, next_action, CRITICS), normal(generator, CRITICS), 2)
    target = double(batch.ret) + double(batch.discount) * lowest
    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * (critics(q, obs, action, CRITICS) - target) ** 2, 1).sum(),
        "pi": lambda pi: -critics(params["q"], obs, np.tanh(policy(pi, obs)), CRITICS).mean()})


def test_each_update_draws_a_new_subset_and_all_subsets_are_equally_likely():
    algorithm = make(SAC, OffPolicyActor, BOX, {"num_critics": 4}, critic_subset=2)
    scores = torch.tensor([[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]])  # each pair has other smallest values
    found = collections.Counter(tuple(algorithm.smallest(scores).tolist()) for _ in range(3000))
    assert set(found) == {(i + 1.0, 4.0 - j) for i in range(4) for j in range(i + 1, 4)}
    assert all(abs(count / 3000 - 1 / 6) < 0.04 for count in found.values()), found


@pytest.mark.parametrize(("kind", "delayed"), [("sac", {"pi", "alpha"}), ("discrete_sac", {"pi", "alpha"}),
                                               ("td3", {"pi"}), ("ddpg", {"pi"})])
def test_only_every_nth_update_changes_the_policy(kind, delayed):
    algorithm = replay_agents.make(kind, policy_delay=3)
    for number in range(1, 8):
        before = {name: group.data.clone() for name, group in algorithm.groups.items()}
        targets = algorithm._target_vectors["q"].data.clone()
        replay_agents.update(algorithm, first=number)
        changed = {name for name, group in algorithm.groups.items() if not torch.equal(group.data, before[name])}
        assert changed == ({"q"} | delayed if number % 3 == 0 else {"q"})
        moves = not torch.equal(algorithm._target_vectors["q"].data, targets)
        assert moves == (number % 3 == 0 or kind != "td3"), "only the targets of TD3 are delayed, too"


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_the_loss_of_a_policy_that_does_not_change_is_not_computed(kind):
    """Count the passes of the first critic: two of them are those of the loss of the critics and of the policy."""
    algorithm, passes = replay_agents.make(kind, policy_delay=3), []
    algorithm.applies_at_once = True
    algorithm.actor.critics[0].register_forward_hook(lambda *_: passes.append(algorithm.num_updates_made + 1))
    replay_agents.update(algorithm, times=7)
    counts = collections.Counter(passes)
    assert counts == {1: 2, 2: 1, 3: 2, 4: 1, 5: 1, 6: 2, 7: 1}, "the losses of the first batch are all checked"
    passes.clear()
    algorithm.losses(replay_agents.make_batch(algorithm))
    assert len(passes) == 2, "all losses of a direct call are computed"


def test_subsets_and_batches_of_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"critic_subset must be at most .* num_critics=2, got 3; give num_critics=3"):
        train("sac", "Pendulum-v1", critic_subset=3)
    with pytest.raises(ConfigError, match=r"critic_subset must be a whole number >= 1"):
        SAC.create_factory(critic_subset=0)
    with pytest.raises(ConfigError, match="critic_norm='batch' needs mini_batch_size of at least 2"):
        train("sac", "Pendulum-v1", critic_norm="batch", mini_batch_size=1)


# Dropout, as in DroQ


def test_dropout_is_active_in_target_critics_and_in_the_loss_of_the_policy():
    """Compare with formulas that use the same masks; all draws come from a seed of the update generator."""
    algorithm = make(SAC, OffPolicyActor, BOX, {"critic_dropout": 0.4, "critic_hidden_sizes": (5,)}, initial_alpha=0.4,
                     learn_alpha=False, critic_subset=2)
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params, generator = parameters(algorithm), algorithm.update_generator.clone_state()
    seed = int(torch.randint(2**62, (), generator=generator))
    next_noise, _, noise = normal(generator, SAMPLES, ACTION_SIZE), normal(generator, 2), normal(
        generator, SAMPLES, ACTION_SIZE)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        masks = [[double(Dropout(0.4).mask(torch.ones(SAMPLES, 5))) for _ in range(2)] for _ in range(3)]
    of_target, of_critics, of_policy = masks
    assert len({mask.tobytes() for pair in masks for mask in pair}) == 6

    def dropped(q, x, a, masks):
        rows, found = np.concatenate((x, a), 1), []
        for i, mask in enumerate(masks):
            hidden = np.tanh((rows @ q[f"{i}.layers.layers.0.weight"].T + q[f"{i}.layers.layers.0.bias"]) * mask)
            found.append(hidden @ q[f"{i}.head.weight"][0] + q[f"{i}.head.bias"][0])
        return np.stack(found)

    next_action, next_logp = squashed(params["pi"], next_obs, next_noise)
    target = double(batch.ret) + double(batch.discount) * (
        dropped(params["target_q"], next_obs, next_action, of_target).min(0) - 0.4 * next_logp)

    def loss_pi(pi):
        chosen, logp = squashed(pi, obs, noise)
        return np.mean(0.4 * logp - dropped(params["q"], obs, chosen, of_policy).mean(0))

    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(
            double(batch.weight) * (dropped(q, obs, action, of_critics) - target) ** 2, 1).sum(),
        "pi": loss_pi})


# Critics without target networks, as in CrossQ


def batch_norm(params, name, x, moments=None):
    """Return batch normalization of x (rows, F) with the moments of the batch, or with given ones, and its moments."""
    own = x.mean(0), x.var(0)
    mean, variance = own if moments is None else moments
    return params[f"{name}.weight"] * (x - mean) / np.sqrt(variance + 1e-3) + params[f"{name}.bias"], own


def crossq(params, obs, action, moments=None):
    """Return values (num_critics, rows) of critics with one hidden layer, and the moments of their two norms."""
    values, found = [], []
    for i in range(2):
        given = (None, None) if moments is None else moments[i]
        x, first = batch_norm(params, f"{i}.layers.batch_norms.0", np.concatenate((obs, action), 1), given[0])
        x = np.tanh(x @ params[f"{i}.layers.layers.0.weight"].T + params[f"{i}.layers.layers.0.bias"])
        x, second = batch_norm(params, f"{i}.layers.batch_norms.1", x, given[1])
        values.append(x @ params[f"{i}.head.weight"][0] + params[f"{i}.head.bias"][0])
        found.append((first, second))
    return np.stack(values), found


@pytest.mark.parametrize("cls", [SAC, TD3])
def test_critics_of_crossq_process_both_halves_together_and_the_policy_sees_running_moments(cls):
    actor = {"critic_norm": "batch", "critic_hidden_sizes": (5,)}
    actor |= {} if cls is SAC else {"policy": "deterministic"}
    options = {"initial_alpha": 0.4, "learn_alpha": False} if cls is SAC else {"target_noise": 0.0}
    algorithm = make(cls, OffPolicyActor, BOX, actor, target_networks=False, **options)
    assert algorithm.targets == {}
    batch = make_batch(False)
    obs, next_obs, action = double(batch.obs["obs"]), double(batch.next_obs["obs"]), double(batch.action)
    params, generator = parameters(algorithm), algorithm.update_generator.clone_state()
    next_noise, noise = normal(generator, SAMPLES, ACTION_SIZE), normal(generator, SAMPLES, ACTION_SIZE)

    def actions(pi, x, draws):
        return squashed(pi, x, draws) if cls is SAC else (np.tanh(policy(pi, x)), 0.0)

    next_action, next_logp = actions(params["pi"], next_obs, next_noise)

    def joint(q):
        values, moments = crossq(q, np.concatenate((obs, next_obs)), np.concatenate((action, next_action)))
        return values[:, :SAMPLES], values[:, SAMPLES:], moments

    _, next_scores, moments = joint(params["q"])
    target = double(batch.ret) + double(batch.discount) * (next_scores.min(0) - 0.4 * next_logp)
    running = [[(0.01 * mean, 0.99 + 0.01 * variance) for mean, variance in of_critic] for of_critic in moments]

    def loss_pi(pi):
        chosen, logp = actions(pi, obs, noise)
        values = crossq(params["q"], obs, chosen, running)[0]
        return np.mean(0.4 * logp - (values.min(0) if cls is SAC else values[0]))

    check_gradients(algorithm, batch, {
        "q": lambda q: 0.5 * np.mean(double(batch.weight) * (joint(q)[0] - target) ** 2, 1).sum(), "pi": loss_pi})
    for critic, of_critic in zip(algorithm.actor.critics, running, strict=True):
        for norm, (mean, variance) in zip(critic.layers.batch_norms, of_critic, strict=True):
            np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(norm.running_var.numpy(), variance, rtol=1e-4)
            assert (int(norm.num_batches_tracked), norm.training) == (1, False), "one pass; afterwards, evaluation mode"


@pytest.mark.parametrize("kind", ["sac", "discrete_sac", "ddpg", "td3"])
def test_without_target_networks_the_networks_themselves_compute_the_targets(kind):
    """With polyak=0, target networks equal the networks after each update, so losses are the same."""
    with_targets = replay_agents.make(kind, polyak=0.0)
    without = replay_agents.make(kind, target_networks=False)
    for number in range(4):
        batch = replay_agents.make_batch(with_targets, seed=number)
        (expected, wanted), (gradients, info) = (
            algorithm.compute_gradients(batch) for algorithm in (with_targets, without))
        assert info.pop("errors").allclose(wanted.pop("errors"), atol=1e-5)
        assert info == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)
        for algorithm in (with_targets, without):
            if kind == "td3":  # whose targets are delayed
                algorithm.num_updates_made = 1
            algorithm.apply_gradients([gradient.clone() for gradient in expected])


def test_options_of_target_networks_need_target_networks():
    with pytest.raises(ConfigError, match="polyak, target_update_interval needs target_networks=True"):
        SAC.create_factory(target_networks=False, polyak=0.9, target_update_interval=3)


# Running


VARIANTS = {
    "redq": {"num_critics": 3, "critic_subset": 2, "policy_delay": 2},
    "droq": {"critic_norm": "layer", "critic_dropout": 0.1, "critic_subset": 2, "policy_delay": 2},
    "crossq": {"critic_norm": "batch", "target_networks": False, "critic_hidden_sizes": (7,), "policy_delay": 2}}


@pytest.mark.parametrize("mixed_precision", [False, True])
@pytest.mark.parametrize(("kind", "variant"), [
    *(("sac", name) for name in VARIANTS), *(("td3", name) for name in VARIANTS), ("discrete_sac", "redq")])
def test_updates_continue_bit_for_bit_after_a_restart(kind, variant, mixed_precision):
    options = dict(VARIANTS[variant])
    actor = {name: options.pop(name) for name in list(options)
             if (name.startswith("critic_") and name != "critic_subset") or name == "num_critics"}
    first, second = (replay_agents.make(kind, actor=actor, mixed_precision=mixed_precision, **options)
                     for _ in range(2))
    if kind != "discrete_sac":
        assert first._small is not None, "the policy has no such layers, so it still acts in NumPy"
    replay_agents.update(first, times=5)
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        replay_agents.update(algorithm, times=4, first=5)
    state, again = (replay_agents.leaves(algorithm.state_dict()) for algorithm in (first, second))
    assert replay_agents.equal(state, again)
    assert all(bool(group.data.isfinite().all()) for group in first.groups.values())
    if variant == "crossq":
        assert int(first.actor.critics[0].layers.batch_norms[0].num_batches_tracked) == 9


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_a_refused_update_leaves_the_running_moments_of_critics(kind):
    algorithm = replay_agents.make(kind, actor={"critic_norm": "batch"}, target_networks=False)
    replay_agents.update(algorithm)
    before = [buffer.clone() for buffer in algorithm.actor.critics.buffers()]
    batch = replay_agents.make_batch(algorithm)
    batch.ret[0] = float("inf")
    gradients, _ = algorithm.compute_gradients(batch)
    with pytest.raises(NonFiniteUpdateError):
        algorithm.apply_gradients(gradients)
    assert before
    assert replay_agents.equal(before, list(algorithm.actor.critics.buffers()))


@pytest.mark.parametrize("name", ["q", "pi"])
def test_an_extractor_of_the_user_with_batch_normalization_learns_only_from_the_storage(name):
    """Check that each update counts as one pass in the critics, because the loss of the policy learns no moments."""
    algorithm = replay_agents.make("sac", actor={"feature_extractor": Normed})
    replay_agents.update(algorithm, times=3)
    network = {"q": algorithm.actor.critics[0], "pi": algorithm.actor.policy}[name]
    (norm,) = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    assert int(norm.num_batches_tracked) == 3 * (1 if name == "q" else 2)


class Normed(torch.nn.Sequential):
    """A feature extractor with batch normalization."""

    out_features = 3

    def __init__(self, space):
        super().__init__(torch.nn.BatchNorm1d(space.shape[0]))


# Reports about other libraries; see tests/reports.md


def test_the_delay_of_the_policy_counts_updates_not_env_steps():
    """The number of env steps between updates shares a factor with the delay here, which must not matter."""
    changes = []

    class Watched(SAC):
        def apply_gradients(self, gradients=None):
            before = self.groups["pi"].data.clone()
            found = super().apply_gradients(gradients)
            changes.append(not torch.equal(before, self.groups["pi"].data))
            return found

    train(Watched, "Pendulum-v1", num_envs=2, num_steps=2, update_every=4, num_updates=2, policy_delay=4,
          start_steps=16, target_steps=48, mini_batch_size=4, hidden_sizes=(4,), progress=False)
    assert len(changes) >= 12
    assert changes == [number % 4 == 0 for number in range(1, len(changes) + 1)]


def test_target_critics_copy_running_moments():
    algorithm = replay_agents.make("sac", actor={"critic_norm": "batch"}, target_update_interval=2)
    for number in range(1, 5):
        replay_agents.update(algorithm, first=number)
        mine, theirs = (torch.cat([buffer.flatten().double() for buffer in network.buffers()])
                        for network in (algorithm.actor.critics, algorithm.targets["q"]))
        assert torch.equal(mine, theirs) == (number % 2 == 0)


@pytest.mark.parametrize("actor", [{}, {"critic_norm": "layer", "critic_dropout": 0.1}, {"critic_norm": "batch"}])
def test_critics_of_an_ensemble_start_with_different_weights(actor):
    critics = replay_agents.make("sac", actor={"num_critics": 4, **actor}).actor.critics
    first = [critic.layers.layers[0].weight for critic in critics]
    assert not any(torch.equal(first[i], first[j]) for i in range(4) for j in range(i))
