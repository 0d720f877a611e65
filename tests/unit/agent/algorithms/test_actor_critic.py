"""Compare ensembles of critics with independent loops in float64: targets of subsets, and delayed policies."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from pytorchrl import train
from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.algorithms import DDPG, SAC, TD3
from pytorchrl.errors import ConfigError
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


def test_a_subset_must_not_be_larger_than_the_ensemble():
    with pytest.raises(ConfigError, match=r"critic_subset must be at most .* num_critics=2, got 3; give num_critics=3"):
        train("sac", "Pendulum-v1", critic_subset=3)
    with pytest.raises(ConfigError, match=r"critic_subset must be a whole number >= 1"):
        SAC.create_factory(critic_subset=0)
