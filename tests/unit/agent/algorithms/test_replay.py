"""Test properties that all replay algorithms share: options, start steps, targets, gradients and states."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms import DDPG, DQN, IQL, SAC, TD3
from pytorchrl.agent.data import DataKind
from pytorchrl.errors import ConfigError, NonFiniteDataError, NonFiniteUpdateError, WeightsError
from tests.unit.agent.algorithms.replay_agents import (
    DISCRETE,
    KINDS,
    OBS,
    ROWS,
    SPACE,
    act,
    equal,
    finish_start,
    leaves,
    make,
    make_batch,
    update,
)


# Options


SHARED = {
    "optimizer": "sgd", "adam_eps": 1e-2, "adam_beta1": 0.5, "rmsprop_eps": 1e-2, "rmsprop_decay": 0.5,
    "weight_decay": 0.5, "momentum": 0.5, "max_grad_norm": 1e-3,
    "gamma": 0.5, "polyak": 0.5, "target_update_interval": 3, "mixed_precision": True,
}
LEARNING = {
    "dqn": {**SHARED, "lr": 1e-2, "double": False, "loss": "mse"},
    "ddpg": {**SHARED, "lr_q": 1e-2, "lr_pi": 1e-2, "critic_subset": 2, "policy_delay": 2,
             "target_networks": False, "bc_alpha": 2.5},
    "td3": {**SHARED, "lr_q": 1e-2, "lr_pi": 1e-2, "policy_delay": 1, "target_noise": 0.5, "noise_clip": 0.01,
            "critic_subset": 1, "target_networks": False, "bc_alpha": 2.5},
    "sac": {**SHARED, "lr_q": 1e-2, "lr_pi": 1e-2, "lr_alpha": 0.1, "initial_alpha": 0.1, "learn_alpha": False,
            "target_entropy": 3.0, "critic_subset": 2, "policy_delay": 2, "target_networks": False},
    "discrete_sac": {"target_entropy_scale": 0.1, "critic_subset": 1, "target_networks": False},
    "iql": {**SHARED, "lr_q": 1e-2, "lr_pi": 1e-2, "lr_v": 1e-2, "expectile": 0.9, "advantage_beta": 0.0,
            "max_weight": 0.1},
}
BASES = {"rmsprop_eps": {"optimizer": "rmsprop"}, "rmsprop_decay": {"optimizer": "rmsprop"},
         "weight_decay": {"optimizer": "adamw"}, "momentum": {"optimizer": "sgd"},
         "max_grad_norm": {"optimizer": "sgd"}, "critic_subset": {"actor": (("num_critics", 3),)},
         "target_networks": {"target_update_interval": 1},
         "double": {"lr": 0.1, "loss": "mse", "target_update_interval": 50}}
ACTING = {
    "dqn": {"start_steps": 0, "initial_epsilon": 0.5, "epsilon_per_worker": True, "test_epsilon": 1.0,
            "final_epsilon": 0.9, "epsilon_steps": 10},
    "ddpg": {"start_steps": 0, "noise": "none", "noise_std": 0.5},
    "td3": {"start_steps": 0, "noise": "ou", "noise_std": 0.5}, "sac": {"start_steps": 0},
    "discrete_sac": {"start_steps": 0}, "iql": {"start_steps": 0},
}
OU = {"ou_theta": 1.0, "ou_sigma": 0.5, "ou_dt": 0.5}
# test_numbers_and_sizes_of_batches and test_compiled_replay.py test these options.
ELSEWHERE = {"update_every", "num_updates", "mini_batch_size", "compile"}


def test_tables_name_every_option():
    for kind, cls in {"dqn": DQN, "ddpg": DDPG, "td3": TD3, "sac": SAC, "iql": IQL}.items():
        named = LEARNING[kind].keys() | ACTING[kind].keys() | ELSEWHERE
        named |= {"target_entropy_scale"} if cls is SAC else set()
        named |= OU.keys() if cls in (DDPG, TD3) else set()
        named |= {"drop_atoms"} if cls in (DDPG, TD3, SAC) else set()  # tested in test_distributional
        assert {field.name for field in dataclasses.fields(cls.Options)} == named


@functools.cache
def plain_run(kind, num_updates, *options):
    """Return an algorithm after some updates; several options have the same one, which they must not change."""
    return update(make(kind, **dict(options)), num_updates)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in LEARNING.items() for name in table])
def test_every_learning_option_changes_training(kind, name):
    base = {"target_update_interval": 2, **BASES.get(name, {})}
    num_updates = 40 if name == "double" else 10  # the target network chooses other actions only after many updates
    plain = plain_run(kind, num_updates, *base.items())
    changed = update(make(kind, **{**base, name: LEARNING[kind][name]}), num_updates)
    first, second = (torch.cat([algorithm.groups[group].data for group in ("q", "pi") if group in algorithm.groups])
                     for algorithm in (plain, changed))
    assert first.isfinite().all()
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("kind", "name"), [
    *((kind, name) for kind, table in ACTING.items() for name in table), *(("ddpg", name) for name in OU)])
def test_every_acting_option_changes_actions(kind, name):
    base = {} if name == "start_steps" else {"start_steps": 0}
    base |= {"noise": "ou"} if name in OU else {}
    value = OU.get(name, ACTING[kind].get(name))
    actions = []
    for options in (base, {**base, name: value}):
        algorithm = make(kind, **options)
        if name in ("final_epsilon", "epsilon_steps"):
            algorithm.follow_schedules(90_000, 10**6)
        actions.append(act(algorithm, 20, deterministic=name == "test_epsilon"))
    assert not np.array_equal(*actions)


def test_numbers_and_sizes_of_batches():
    asked = []
    storage = SimpleNamespace(num_learned_from=0, counters={"inserted": 112},
                              generate_batches=lambda **how: asked.append(how) or iter("ab"))
    algorithm = make("sac", start_steps=100, num_updates=7, mini_batch_size=11, update_every=13)
    assert list(algorithm.batches(storage)) == []
    assert asked == []
    storage.counters["inserted"] = 113
    assert list(algorithm.batches(storage)) == ["a", "b"]
    storage.counters["inserted"] = 125
    assert list(algorithm.batches(storage)) == []
    storage.counters["inserted"] = 100 + 4 * 13
    assert list(algorithm.batches(storage)) == ["a", "b"]
    assert asked == [{"num_mini_batch": 7, "mini_batch_size": 11}, {"num_mini_batch": 21, "mini_batch_size": 11}]


@pytest.mark.parametrize("kind", KINDS)
def test_algorithm_builds_from_defaults_acts_and_learns(kind):
    algorithm = make(kind)
    assert algorithm.learns_from is DataKind.TRANSITIONS
    step = algorithm.acting_step(OBS, {}, ROWS)
    space = algorithm.actor.options.action_space
    assert all(space.contains(row) for row in step.clipped_action)
    assert (step.rhs, step.other) == ({}, {})
    before = leaves(algorithm.state_dict())
    gradients, info = algorithm.compute_gradients(make_batch(algorithm))
    assert [gradient.shape for gradient in gradients] == [group.data.shape for group in algorithm.groups.values()]
    errors = info.pop("errors")
    assert errors.shape == (8,)
    assert errors.device.type == "cpu"
    assert all(isinstance(value, float) and math.isfinite(value) for value in info.values())
    assert sum(not torch.equal(a, b) for a, b in zip(before, leaves(algorithm.state_dict()), strict=True)) <= 1
    assert all(math.isfinite(value) for value in algorithm.apply_gradients(gradients).values())


def test_defaults_match_the_papers():
    dqn, td3, sac = DQN.create_factory().options, TD3.create_factory().options, SAC.create_factory().options
    assert (dqn.update_every, dqn.num_updates, dqn.mini_batch_size, dqn.polyak) == (4, 1, 32, 0.0)
    assert (dqn.target_update_interval, dqn.max_grad_norm, dqn.lr) == (1000, 10.0, 1e-4)
    assert (td3.lr_q, td3.lr_pi, td3.policy_delay, td3.polyak) == (3e-4, 3e-4, 2, 0.995)
    assert (sac.lr_q, sac.lr_pi, sac.lr_alpha, sac.start_steps) == (1e-3, 3e-4, 1e-3, 10_000)


@pytest.mark.parametrize(("cls", "options", "message"), [
    (DQN, {"loss": "hubber"}, "did you mean 'huber'"), (DQN, {"initial_epsilon": 1.5}, "initial_epsilon must be"),
    (DQN, {"duelling": True}, "has no option"), (SAC, {"polyak": 1.0}, "never move"),
    (SAC, {"target_entropy": -1.0, "learn_alpha": False}, "needs learn_alpha"),
    (SAC, {"initial_alpha": 0.0}, "initial_alpha must be a number > 0"),
    (TD3, {"policy_delay": 0}, "policy_delay must be a whole number >= 1"),
    (DDPG, {"ou_sigma": 0.3}, "ou_sigma needs noise='ou'"),
])
def test_wrong_options_are_refused(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls.create_factory(**options)


def test_unsuitable_actors_are_refused():
    on_policy = OnPolicyActor.create_factory(SPACE, DISCRETE)(device="cpu", seed=0)
    with pytest.raises(ConfigError, match=r"DQN cannot train OnPolicyActor; actors for DQN: .*\bQActor\b"):
        DQN.create_factory()(actor=on_policy, seed=0)
    with pytest.raises(ConfigError, match="SAC needs OffPolicyActor with policy='stochastic', got "
                                          "policy='deterministic'"):
        SAC.create_factory()(actor=make("td3").actor, seed=0)
    with pytest.raises(ConfigError, match="TD3 needs OffPolicyActor with policy='deterministic', got "
                                          "policy='stochastic'"):
        TD3.create_factory()(actor=make("sac").actor, seed=0)
    with pytest.raises(ConfigError, match=r"target_entropy_scale=0.5 is for Discrete actions, got Box"):
        make("sac", target_entropy_scale=0.5)


# Acting


@pytest.mark.parametrize("kind", KINDS)
def test_actions_are_uniform_during_the_start_steps_of_all_collectors(kind):
    algorithm = make(kind, start_steps=1000)
    for env_steps in (None, 0, 999):
        if env_steps is not None:
            algorithm.follow_schedules(env_steps, 10**6)
        actions = act(algorithm, 300)
        if actions.dtype == np.int64:
            assert np.abs(np.bincount(actions, minlength=4) / len(actions) - 0.25).max() < 0.05
        else:
            assert np.abs(actions.mean(0)).max() < 0.06
            assert np.abs(actions.var(0) - 1 / 3).max() < 0.03
    greedy = act(algorithm, deterministic=True)
    assert np.array_equal(greedy, act(algorithm, deterministic=True))
    algorithm.follow_schedules(1000, 10**6)
    assert algorithm.parameters["random_actions"] == 0
    collector = make(kind, start_steps=1000)
    collector.load_gradient_state(algorithm.gradient_state())  # the gradient state includes `parameters`
    assert collector.parameters["random_actions"] == 0


@pytest.mark.parametrize("kind", ["dqn", "discrete_sac"])
@pytest.mark.parametrize("start_steps", [0, 10**6])
def test_masked_actions_are_never_taken(kind, start_steps):
    algorithm = make(kind, start_steps=start_steps)
    mask = np.array([[True, False, False, True]] * 6)
    for deterministic in (False, True):
        assert set(act(algorithm, 30, deterministic=deterministic, mask=mask)) <= {0, 3}
    if start_steps == 0:
        assert set(act(algorithm, 30, mask=mask)) == {0, 3}
        mask[2] = False
        with pytest.raises(NonFiniteDataError, match="row"):
            act(algorithm, 5, mask=mask, deterministic=True)


# Learning


class Averaged(torch.nn.Linear):
    """A custom extractor with a buffer, which gradients do not change."""

    out_features = 2

    def __init__(self, space):
        super().__init__(space.shape[0], 2)
        self.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize("polyak", [0.0, 0.9])
def test_target_networks_copy_buffers_at_their_interval(polyak):
    algorithm = make("dqn", actor={"feature_extractor": Averaged}, polyak=polyak, target_update_interval=3)
    (mine,), (target,) = algorithm.actor.q.buffers(), algorithm.targets["q"].buffers()
    for number in range(1, 7):
        mine.fill_(number)
        update(algorithm, first=number)
        assert (float(mine), float(target)) == (number, number - number % 3)


def test_target_networks_follow_polyak_and_interval():
    for polyak, interval in itertools.product((0.0, 0.9), (1, 3)):
        algorithm = make("sac", polyak=polyak, target_update_interval=interval)
        vector = algorithm._target_vectors["q"].data
        expected = vector.clone()
        for number in range(1, 7):
            update(algorithm, first=number)
            if number % interval == 0:
                expected = polyak * expected + (1 - polyak) * algorithm.groups["q"].data
            torch.testing.assert_close(vector, expected)
            assert torch.equal(vector, algorithm.groups["q"].data) == (polyak == 0 and number % interval == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_gradient_changes_nothing(kind):
    algorithm = update(make(kind))
    before = leaves(algorithm.state_dict())
    gradients, _ = algorithm.compute_gradients(make_batch(algorithm))
    gradients = [gradient.clone() for gradient in gradients]
    gradients[-1][0] = math.nan
    state = leaves(algorithm.state_dict())
    with pytest.raises(NonFiniteUpdateError):
        algorithm.apply_gradients(gradients)
    assert equal(leaves(algorithm.state_dict()), state)
    assert algorithm.num_updates_made == 1
    assert len(before) == len(state)


@pytest.mark.parametrize(("kind", "group"), [("sac", "q"), ("sac", "pi"), ("sac", "alpha"), ("td3", "q"),
                                             ("ddpg", "pi")])
def test_learning_rates_affect_only_their_group(kind, group):
    algorithm = make(kind, **({"policy_delay": 1} if kind == "td3" else {}))
    for name in algorithm.groups:
        algorithm.update_algorithm_parameter(f"lr_{name}", 0.1 if name == group else 0.0)
    before = {name: vector.data.clone() for name, vector in algorithm.groups.items()}
    update(algorithm)
    assert {name for name in before if not torch.equal(before[name], algorithm.groups[name].data)} == {group}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_one_group(kind):
    algorithm = make(kind)
    grouped = [id(param) for vector in algorithm.groups.values() for param in vector.params]
    mine = {id(param) for param in algorithm.actor.parameters()}
    mine |= {id(algorithm.log_alpha)} if "sac" in kind else set()
    mine |= set(map(id, algorithm.duals.values())) if "mpo" in kind else set()
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == mine


@pytest.mark.parametrize("kind", KINDS)
def test_slices_give_the_gradient_of_the_whole_batch(kind):
    # The losses of td3, sac, mpo and noisy_dqn sample noise. The noise of slices would differ from that of the batch.
    algorithm = make(kind if kind not in ("td3", "sac", "mpo", "noisy_dqn") else "ddpg")
    whole = make_batch(algorithm)
    halves = [dataclasses.replace(
        whole, obs={"obs": whole.obs["obs"][rows]}, next_obs={"obs": whole.next_obs["obs"][rows]},
        **{name: getattr(whole, name)[rows] for name in ("action", "ret", "discount", "weight", "ids")},
    ) for rows in (slice(0, 4), slice(4, 8))]
    parts = [[gradient.clone() for gradient in algorithm.compute_gradients(half)[0]] for half in halves]
    for first, second, together in zip(*parts, algorithm.compute_gradients(whole)[0], strict=True):
        torch.testing.assert_close((first + second) / 2, together, rtol=1e-4, atol=1e-6)


# States


@pytest.mark.parametrize("kind", KINDS)
def test_receiving_weights_changes_only_the_acting_networks(kind):
    learner, collector = update(make(kind), 3), update(make(kind), 2, first=50)
    state = collector.state_dict()
    kept = {**state, "gradient": {**state["gradient"], "acting": None}}
    before = leaves(kept)
    for _ in range(10):
        collector.load_acting_state(learner.acting_state())
    state = collector.state_dict()
    assert equal(leaves({**state, "gradient": {**state["gradient"], "acting": None}}), before)
    assert equal(leaves(collector.acting_state()), leaves(learner.acting_state()))
    finish_start(learner), finish_start(collector)
    assert np.array_equal(act(collector, deterministic=True), act(learner, deterministic=True))


def test_acting_state_has_only_the_acting_networks():
    assert list(make("dqn").acting_state()) == ["q"]
    assert list(make("sac").acting_state()) == ["pi"]
    assert len(make("td3", actor={"normalize_obs": True}).acting_state()) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_state_is_enough_to_compute_the_same_gradients(kind):
    learner, worker = update(make(kind), 3), make(kind, seed=5)
    worker.load_gradient_state(learner.gradient_state())
    worker.update_generator.set_state(learner.update_generator.get_state())
    for first, second in zip(*(a.compute_gradients(make_batch(a, seed=77))[0] for a in (learner, worker)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_restored_state_continues_exactly(kind):
    options = {"noise": "ou"} if kind in ("ddpg", "td3") else {}
    first = finish_start(update(make(kind, **options), 3))
    act(first, 2)
    second = make(kind, seed=99, **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert np.array_equal(act(first, 5), act(second, 5))
    update(first, 3, first=20), update(second, 3, first=20)
    assert equal(leaves(first.state_dict()), leaves(second.state_dict()))


def test_mismatched_states_are_refused():
    algorithm = make("sac")
    other = make("sac", actor={"num_critics": 3})
    before = leaves(algorithm.acting_state())
    with pytest.raises(WeightsError, match="gradient state"):
        algorithm.load_gradient_state(other.gradient_state())
    with pytest.raises(WeightsError, match="acting state"):
        algorithm.load_acting_state(make("dqn").acting_state())
    assert equal(leaves(algorithm.acting_state()), before)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_run(kind):
    first, second, other = (make(kind, seed=seed) for seed in (1, 1, 2))
    actions = [act(algorithm, 20) for algorithm in (first, second, other)]
    assert np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[1], actions[2])
    assert equal(leaves(update(first, 3).state_dict()), leaves(update(second, 3).state_dict()))


@pytest.mark.parametrize(("kind", "options", "text"), [
    ("dqn", {"epsilon_per_worker": True, "final_epsilon": 0.1}, "final_epsilon needs epsilon_per_worker=False"),
    ("dqn", {"optimizer": "sgd", "adam_eps": 0.1},
     "adam_eps needs optimizer='adam' or 'adamw' or 'radam', got optimizer='sgd'"),
    ("dqn", {"rmsprop_decay": 0.5}, "rmsprop_decay needs optimizer='rmsprop' or 'rmsprop_tf', got optimizer='adam'"),
    ("ddpg", {"noise": "ou", "noise_std": 0.3}, "noise_std needs noise='gaussian', got noise='ou'"),
    ("td3", {"ou_dt": 0.3}, "ou_dt needs noise='ou', got noise='gaussian'"),
    ("sac", {"learn_alpha": False, "lr_alpha": 0.1}, "lr_alpha needs learn_alpha=True"),
])
def test_an_option_without_effect_is_refused(kind, options, text):
    with pytest.raises(ConfigError, match=text):
        make(kind, **options)
