"""Test that each policy learns only from the steps of its agents, and that an absent policy does not change."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from pytorchrl import (
    A2C, APPO, IMPALA, PPO, SAC, OffPolicyActor, OnPolicyActor, ReplayBuffer, VTraceBuffer, linear,
)
from pytorchrl.errors import CheckpointError, ConfigError, NonFiniteUpdateError, WeightsError
from pytorchrl.files.tensors import save

LIVES = ((0, 6), (0, 3), (2, 6))


def states(agent):
    return {policy: algo.state_dict() for policy, algo in agent.algo.algorithms.items()}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def advantages_by_hand(part, column, gamma, gae_lambda):
    """Compute the GAE of one column directly from its definition; invalid steps belong to no episode."""
    finals = {(t, e): value for (t, e), value in zip(
        part.final_index.tolist(), part.other["final_value"].tolist(), strict=True)}
    value, found, following = part.other["value"][:, column].double(), {}, 0.0
    for t in reversed(range(part.num_steps)):
        if not part.valid[t, column]:
            following = 0.0
            continue
        ended = bool(part.terminated[t, column] | part.truncated[t, column])
        nxt = 0.0 if part.terminated[t, column] else finals.get((t, column), float(value[t + 1]))
        delta = float(part.reward[t, column]) + gamma * nxt - float(value[t])
        found[t] = following = delta + (0.0 if ended else gamma * gae_lambda * following)
    return found


@pytest.mark.parametrize("truncate", [False, True])
def test_a_policy_learns_only_from_valid_steps_of_its_agents(make_agent, truncate):
    agent = make_agent(PPO.create_factory(num_epochs=1, num_mini_batch=1, advantage_normalization="none"), size=15,
                       env_kwargs={"lives": LIVES, "truncate": truncate})
    agent.collect()
    rollout = agent.collect()  # the rollout begins within an episode
    assert rollout.num_valid() == 30
    agent.storage.insert_data_slice([rollout])
    agent.storage.before_gradients()
    (batch,) = agent.algo.batches(agent.storage)
    assert batch.last
    assert (batch.num_samples, batch.num_new_samples) == (30, 30)
    assert batch.policies == ("early", "shared")
    for policy, numbers in (("early", (0,)), ("shared", (1, 2))):
        part, own = rollout.parts[policy], batch.parts[policy]
        expected = {}
        for column in range(part.num_envs):
            for t, advantage in advantages_by_hand(part, column, 0.99, 0.95).items():
                expected[tuple(part.obs["obs"][t, column].tolist())] = advantage
        seen = {tuple(obs.tolist()): float(advantage)
                for obs, advantage in zip(own.obs["obs"], own.advantage, strict=True)}
        assert seen.keys() == expected.keys()
        for obs, advantage in seen.items():
            assert advantage == pytest.approx(expected[obs], rel=1e-4)
            begin, end = LIVES[int(obs[3])]
            assert int(obs[3]) in numbers
            assert begin <= obs[2] < end


def test_an_update_equals_separate_updates_of_each_policy(make_agent):
    """Check that each policy's update equals that of a single-policy algorithm with the same batch, bit for bit."""
    agent, alone = make_agent(), make_agent()
    rollout = agent.collect()
    agent.storage.insert_data_slice([rollout])
    agent.storage.before_gradients()
    (batch,) = agent.algo.batches(agent.storage)
    vectors, info = agent.algo.compute_gradients(batch)
    applied = agent.algo.apply_gradients(vectors)
    for index, (policy, algo) in enumerate(alone.algo.algorithms.items()):
        (gradient,), own = algo.compute_gradients(batch.parts[policy])
        assert torch.equal(gradient, vectors[index])
        own = {**own, **algo.apply_gradients()}
        assert {name: value for name, value in {**info, **applied}.items() if name.endswith(policy)} == {
            f"{name}/{policy}": value for name, value in own.items()}
        assert torch.equal(algo.groups["all"].data, agent.algo.groups[f"{policy}/all"].data)
    assert agent.algo.gradient_sizes == [len(vector) for vector in vectors]


def test_an_absent_policy_does_not_change(make_agent):
    agent = make_agent()
    agent.storage.insert_data_slice([agent.collect()])
    agent.storage.before_gradients()
    (batch,) = agent.algo.batches(agent.storage)
    agent.algo.compute_gradients(batch)
    agent.algo.apply_gradients()  # after this update, the state of the optimizers is not empty
    before = states(agent)
    vectors, info = agent.algo.compute_gradients(dataclasses.replace(batch, parts={"shared": batch.parts["shared"]}))
    assert vectors[0] is None
    assert all(name.endswith("/shared") for name in info)
    info = agent.algo.apply_gradients(vectors)
    assert all(name.endswith("/shared") for name in info)
    after = states(agent)
    assert equal(before["early"], after["early"])
    assert not equal(before["shared"], after["shared"])


def test_a_non_finite_gradient_changes_no_policy(make_agent):
    agent = make_agent()
    before = states(agent)
    vectors = [torch.ones(size) for size in agent.algo.gradient_sizes]
    vectors[1][3] = torch.nan
    with pytest.raises(NonFiniteUpdateError, match="gradient of 'shared'"):
        agent.algo.apply_gradients(vectors)
    assert equal(before, states(agent))


def test_policies_have_different_initial_weights_and_generators(make_agent):
    agent = make_agent()
    groups = agent.algo.groups
    assert not torch.equal(groups["early/all"].data, groups["shared/all"].data)
    algorithms = agent.algo.algorithms
    assert algorithms["early"].generator.initial_seed() != algorithms["shared"].generator.initial_seed()


def test_policies_that_do_not_learn_still_act(make_agent):
    agent = make_agent(trainable=["shared"])
    agent.storage.insert_data_slice([agent.collect()])
    agent.storage.before_gradients()
    (batch,) = agent.algo.batches(agent.storage)
    assert set(batch.parts) == {"early", "shared"}
    assert [vector is None for vector in agent.algo.compute_gradients(batch)[0]] == [True, False]
    agent.algo.update_algorithm_parameter("early/trainable", True)
    agent.algo.update_algorithm_parameter("shared/trainable", False)
    assert [vector is None for vector in agent.algo.compute_gradients(batch)[0]] == [False, True]
    with pytest.raises(ConfigError, match="must be True or False"):
        agent.algo.update_algorithm_parameter("shared/trainable", 2)
    for name in ("early/trainable", "trainable"):
        with pytest.raises(ConfigError, match="would leave no trainable policy"):
            agent.algo.update_algorithm_parameter(name, False)
    assert [vector is None for vector in agent.algo.compute_gradients(batch)[0]] == [False, True]


def test_parameters_are_updated_for_one_policy_or_all(make_agent):
    agent = make_agent({"early": PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1.0, 0.0)),
                        "shared": A2C.create_factory(num_epochs=2, num_mini_batch=2, lr=0.5)})
    algo = agent.algo
    assert algo.follow_schedules(5, 10) == {"early/lr": 0.5}
    algo.update_algorithm_parameter("shared/lr", 0.25)
    assert (algo.parameters["early/lr"], algo.parameters["shared/lr"]) == (0.5, 0.25)
    algo.update_algorithm_parameter("entropy_coef", 0.125)
    assert (algo.parameters["early/entropy_coef"], algo.parameters["shared/entropy_coef"]) == (0.125, 0.125)
    algo.update_algorithm_parameter("clip_param", 0.3)  # only PPO has this parameter
    assert algo.parameters["early/clip_param"] == 0.3
    assert set(algo.schedules) == {"early/lr"}
    for name in ("clip_parm", "shared/clip_param", "nobody/lr"):
        with pytest.raises(KeyError, match="no policy has a parameter"):
            algo.update_algorithm_parameter(name, 0.1)
    other = make_agent({"early": PPO.create_factory(num_epochs=2, num_mini_batch=2), "shared": A2C.create_factory(
        num_epochs=2, num_mini_batch=2)}).algo
    other.parameters = algo.parameters
    assert other.parameters == algo.parameters


@pytest.mark.parametrize("first", [1e-3, linear(1e-3, 0.0)])
@pytest.mark.parametrize("value", [0.5, linear(0.5, 0.0), [(0, 0.5), (10, 0.25)]])
def test_a_value_that_one_policy_refuses_changes_no_policy(make_agent, first, value):
    algorithms = {"early": SAC.create_factory(lr_alpha=first), "shared": SAC.create_factory(learn_alpha=False)}
    algo = make_agent(algorithms, functools.partial(OffPolicyActor.create_factory, hidden_sizes=(8,)),
                      ReplayBuffer.create_factory(20, rollout_size=5)).algo
    parameters, schedules = algo.parameters, algo.schedules
    with pytest.raises(ConfigError, match="needs learn_alpha=True"):
        algo.update_algorithm_parameter("lr_alpha", value)
    assert (algo.parameters, algo.schedules) == (parameters, schedules)
    assert algo.algorithms["early"].options.lr_alpha == first
    algo.update_algorithm_parameter("early/lr_alpha", 0.5)  # the other policy does not refuse this update
    assert (algo.parameters["early/lr_alpha"], set(algo.schedules)) == (0.5, set(schedules) - {"early/lr_alpha"})


def test_states_can_be_loaded_by_another_algorithm(make_agent, tmp_path):
    agent, other = make_agent(seed=1), make_agent(seed=2)
    other.algo.load_acting_state(agent.algo.acting_state())
    assert torch.equal(other.algo.groups["shared/all"].data, agent.algo.groups["shared/all"].data)
    other.algo.load_state_dict(agent.algo.state_dict())
    assert equal(other.algo.state_dict(), agent.algo.state_dict())
    state = agent.algo.acting_state()
    del state["shared/all"]
    with pytest.raises(WeightsError, match="acting state"):
        other.algo.load_acting_state(state)
    save(tmp_path / "model.pt", {"format": 1, "version": 0, "acting_state": agent.algo.acting_state()})
    again = make_agent(seed=3, checkpoint=str(tmp_path / "model.pt"))
    assert equal(again.algo.acting_state(), agent.algo.acting_state())
    with pytest.raises(CheckpointError, match="there is no model"):
        make_agent(checkpoint=str(tmp_path / "other.pt"))


def test_a_gradient_state_without_a_limit_of_one_policy_can_be_loaded(make_agent):
    agent, other = make_agent(seed=1), make_agent(seed=2)
    agent.algo.update_algorithm_parameter("shared/max_grad_norm", None)
    agent.algo.update_algorithm_parameter("early/trainable", False)
    other.algo.load_gradient_state(agent.algo.gradient_state())
    assert "shared/max_grad_norm" not in agent.algo.parameters
    assert equal(other.algo.gradient_state(), agent.algo.gradient_state())


@pytest.mark.parametrize("name", ["shared/lr", "shared/trainable"])
def test_a_gradient_state_without_a_required_parameter_is_refused(make_agent, name):
    agent, other = make_agent(seed=1), make_agent(seed=2)
    before, state = other.algo.parameters, agent.algo.gradient_state()
    del state["parameters"][name]
    with pytest.raises(WeightsError, match=f"lacks the parameter {name}"):
        other.algo.load_gradient_state(state)
    assert other.algo.parameters == before


def test_parameters_of_an_unknown_policy_are_refused(make_agent):
    agent, other = make_agent(seed=1), make_agent(seed=2)
    before, state = other.algo.parameters, agent.algo.gradient_state()
    state["parameters"]["nobody/lr"] = 0.5
    with pytest.raises(WeightsError, match="nobody/lr"):
        other.algo.load_gradient_state(state)
    assert other.algo.parameters == before


def test_normalizers_use_the_valid_steps_of_their_policy(make_agent):
    agent = make_agent(actors=functools.partial(
        OnPolicyActor.create_factory, hidden_sizes=(8,), normalize_obs=True, normalize_reward=True), size=12)
    running = {}
    rollout = agent.collect()
    found = agent.algo.moments_of(rollout, running)
    assert set(found) == {f"{policy}/{name}" for policy in ("early", "shared") for name in ("obs/obs", "reward")}
    agent.actor.merge_moments(found)
    shared = rollout.parts["shared"]
    own = agent.actor.actors["shared"]
    seen = shared.obs["obs"][:-1][shared.valid].double()
    assert float(own.obs_moments[0].count) == len(seen) == 2 * 2 * 7
    np.testing.assert_allclose(own.obs_moments[0].mean.numpy(), seen.mean(0).numpy())
    assert float(agent.actor.actors["early"].obs_moments[0].count) == 24
    assert set(running) == {"early", "shared"}
    # The algorithm of a single policy names its moments without a prefix.
    alone = make_agent(actors=functools.partial(OnPolicyActor.create_factory, hidden_sizes=(8,), normalize_reward=True))
    assert set(alone.algo.algorithms["early"].moments_of(rollout.parts["early"], {})) == {"reward"}


@pytest.mark.parametrize("kind", [IMPALA, APPO])
def test_algorithms_that_correct_for_lag_work_with_vtrace_storages(make_agent, kind):
    options = {"kl_coef": 0.5, "num_epochs": 1, "num_mini_batch": 1} if kind is APPO else {}
    agent = make_agent(kind.create_factory(**options), storages=VTraceBuffer.create_factory(8))
    agent.storage.insert_data_slice([agent.collect()])
    agent.storage.before_gradients()
    (batch,) = agent.algo.batches(agent.storage)
    vectors, _ = agent.algo.compute_gradients(batch)
    assert [len(vector) for vector in vectors] == agent.algo.gradient_sizes
    assert all(np.isfinite(value) for value in agent.algo.apply_gradients(vectors).values())
    learning = agent.algo.learning_state()
    assert set(learning) == ({"early/kl_coef", "shared/kl_coef"} if kind is APPO else set())
    agent.algo.load_learning_state(learning)
