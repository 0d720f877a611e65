"""Compare the NumPy implementation of a small policy with the torch implementation."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.actors.memory import GRU
from pytorchrl.agent.algorithms import IMPALA, PPO

VECTOR = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
ACTIONS = {"discrete": gym.spaces.Discrete(3), "box": gym.spaces.Box(-0.5, 0.5, (2, 2), np.float32)}


def make(space=VECTOR, action="discrete", actor=OnPolicyActor, algo=None, **options):
    actor = actor.create_factory(space, ACTIONS[action] if isinstance(action, str) else action, **options)(seed=3)
    return PPO.create_factory(**(algo or {}))(actor=actor, seed=4)


def rows(num=6, seed=0):
    return {"obs": np.random.default_rng(seed).standard_normal((num, 5), np.float32)}


def act(algo, obs, deterministic=False, mask=None):
    return algo.acting_step(obs, {}, np.zeros(len(obs["obs"]), np.bool_), deterministic, mask)


def on_torch(algo):
    other = copy.deepcopy(algo)
    other._small_policy = None
    return other


@pytest.mark.every(5)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (8,), (64, 32)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("num_envs", [1, 6])
def test_actions_equal_those_of_torch(num_envs, action, normalize, hidden, activation, deterministic):
    algo = make(action=action, normalize_obs=normalize, hidden_sizes=hidden, activation=activation)
    assert algo._small_policy is not None
    if normalize:
        algo.actor.obs_moments[0].merge((torch.tensor(9.0), torch.full((5,), 0.3), torch.full((5,), 4.0)))
    with torch.no_grad():  # enlarge the small initial weights, so that actions differ between rows
        algo.actor.policy_head.weight.mul_(100)
        algo.actor.policy_head.bias.add_(0.1)
        if action == "box":
            algo.actor.distribution.log_std.sub_(0.7)
    twin = on_torch(algo)
    for step in range(20):
        obs = rows(num_envs, seed=step)
        if not deterministic:  # give the NumPy policy the noise that the torch policy will sample
            algo._small_policy.noise = noise(twin, action, num_envs)
        mine, other = act(algo, obs, deterministic), act(twin, obs, deterministic)
        assert mine.action.dtype == other.action.dtype
        assert mine.action.shape == other.action.shape == mine.clipped_action.shape
        assert mine.other["dist_params"].shape == other.other["dist_params"].shape
        np.testing.assert_allclose(mine.action, other.action, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mine.clipped_action, other.clipped_action, rtol=1e-5, atol=1e-5)
        assert mine.other.keys() == other.other.keys()
        np.testing.assert_allclose(mine.other["dist_params"], other.other["dist_params"], rtol=1e-5, atol=1e-5)
        assert mine.rhs == {}


MEMORY = {"hidden_sizes": (8,), "recurrent_size": 7}


@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("num_envs", [1, 6])
def test_steps_with_memory_equal_those_of_torch(num_envs, action, net):
    algo = make(action=action, recurrent_net=net, normalize_obs=True, **MEMORY)
    algo.actor.obs_moments[0].merge((torch.tensor(9.0), torch.full((5,), 0.3), torch.full((5,), 4.0)))
    with torch.no_grad():
        algo.actor.policy_head.weight.mul_(100)
        for name, value in algo.actor.named_parameters():
            if name.endswith("bias"):
                value.normal_(generator=torch.Generator().manual_seed(len(value)))
    twin, rng = on_torch(algo), np.random.default_rng(1)
    states = {name: rng.standard_normal(state.shape, np.float32)
              for name, state in algo.actor.initial_states(num_envs).items()}
    for step in range(12):
        obs, done = rows(num_envs, seed=step), rng.random(num_envs) < 0.3
        done[0] = step == 5
        before = {name: state.copy() for name, state in states.items()}
        algo._small_policy.noise = noise(twin, action, num_envs)
        mine, other = algo.acting_step(obs, states, done), twin.acting_step(obs, states, done)
        for name, state in states.items():
            np.testing.assert_array_equal(state, before[name])
        assert mine.rhs.keys() == other.rhs.keys() == {"policy", "value"}
        assert mine.other.keys() == other.other.keys() == {"dist_params", "value"}
        for own, one in ((mine.action, other.action), (mine.clipped_action, other.clipped_action),
                         *((mine.rhs[name], other.rhs[name]) for name in states),
                         *((mine.other[name], other.other[name]) for name in mine.other)):
            assert own.shape == one.shape
            assert own.dtype == one.dtype
            np.testing.assert_allclose(own, one, rtol=1e-5, atol=2e-6)
        states = mine.rhs


def test_a_state_that_is_not_finite_is_cleared_at_the_start_of_an_episode():
    algo, obs = make(recurrent_net="lstm", **MEMORY), rows(2)
    clean = {name: state.numpy() for name, state in algo.actor.initial_states(2).items()}
    broken = {name: np.full_like(state, np.nan) for name, state in clean.items()}
    found, expected = (algo.acting_step(obs, states, np.ones(2, np.bool_), True) for states in (broken, clean))
    for name in clean:
        np.testing.assert_array_equal(found.rhs[name], expected.rhs[name])


def test_the_value_with_memory_is_left_out_for_vtrace():
    actor = OnPolicyActor.create_factory(VECTOR, ACTIONS["discrete"], recurrent_net="gru", **MEMORY)(seed=3)
    algo = IMPALA.create_factory()(actor=actor, seed=4)
    states = {name: state.numpy() for name, state in actor.initial_states(2).items()}
    step = algo.acting_step(rows(2), states, np.ones(2, np.bool_))
    other = on_torch(algo).acting_step(rows(2), states, np.ones(2, np.bool_))
    assert algo._small_policy is not None
    assert step.other.keys() == other.other.keys() == {"dist_params"}
    assert step.rhs.keys() == other.rhs.keys() == {"policy", "value"}


def noise(algo, action, num_envs):
    """Return the noise that the torch policy will sample next: (1, E, 4) for Box actions, otherwise (1, E, 3)."""
    generator = torch.Generator()
    generator.set_state(algo.generator.get_state())
    if action == "box":
        return torch.empty(1, num_envs, 4).normal_(generator=generator)
    return -torch.empty(1, num_envs, 3).exponential_(generator=generator).log()


@pytest.mark.parametrize("num_steps", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("action", ACTIONS)
def test_restored_state_continues_exactly(action, num_steps):
    algo, other = make(action=action), make(action=action)
    for step in range(num_steps):
        act(algo, rows(seed=step))
    state = copy.deepcopy(algo.state_dict())
    expected = [act(algo, rows(seed=step)).action for step in range(70)]
    other.load_state_dict(state)
    np.testing.assert_array_equal([act(other, rows(seed=step)).action for step in range(70)], expected)
    assert len(np.unique(np.array(expected), axis=0)) > 10


@pytest.mark.parametrize("action", ACTIONS)
def test_a_new_number_of_environments_gets_new_noise(action):
    algo, other = make(action=action), make(action=action)
    for each in (algo, other):
        act(each, rows(1))
    other._small_policy.noise = torch.zeros(0)
    same = {"obs": np.repeat(rows(1)["obs"], 6, 0)}
    drawn = act(algo, same).action
    np.testing.assert_array_equal(drawn, act(other, same).action)
    assert len(np.unique(drawn, axis=0)) > 1


def test_new_parameters_take_effect_immediately():
    algo, other = make(), make()
    before = act(algo, rows(), True).other["dist_params"].copy()
    with torch.no_grad():
        other.actor.policy_head.bias.add_(7.0)
    algo.load_acting_state(other.acting_state())
    np.testing.assert_allclose(act(algo, rows(), True).other["dist_params"], before + 7.0, rtol=1e-6)


def test_acting_changes_neither_observations_nor_parameters():
    algo, obs = make(action="box"), rows()
    state, kept = algo.acting_state(), obs["obs"].copy()
    act(algo, obs)
    np.testing.assert_array_equal(obs["obs"], kept)
    assert all(torch.equal(value, state[name]) for name, value in algo.acting_state().items())


def test_many_rows_and_masks_use_torch(monkeypatch):
    algo = make(hidden_sizes=(64, 64))
    used = []
    monkeypatch.setattr(algo.actor, "act", lambda *args, **kwargs: used.append(1) or OnPolicyActor.act(
        algo.actor, *args, **kwargs))
    act(algo, rows(64))
    assert not used
    act(algo, rows(65))  # 65 * 64 * 64 multiplications exceed the limit of 2**18
    assert len(used) == 1
    mask = np.tile([False, True, False], (6, 1))
    assert (act(algo, rows(), mask=mask).action == 1).all()
    assert len(used) == 2


def test_a_large_memory_uses_torch(monkeypatch):
    algo = make(recurrent_net="gru", hidden_sizes=(8,), recurrent_size=128)
    used = []
    monkeypatch.setattr(algo.actor, "act", lambda *args, **kwargs: used.append(1) or OnPolicyActor.act(
        algo.actor, *args, **kwargs))
    for num_envs, expected in ((5, 0), (6, 1)):  # 6 * 3 * 128 * 128 multiplications exceed the limit of 2**18
        states = {name: state.numpy() for name, state in algo.actor.initial_states(num_envs).items()}
        algo.acting_step(rows(num_envs), states, np.zeros(num_envs, np.bool_))
        assert len(used) == expected


class OwnGRU(GRU):
    pass


class OtherMemory(OnPolicyActor):
    """Its values have another memory than its policy."""

    kind, size = OwnGRU, 7

    def build_networks(self, generator):
        super().build_networks(generator)
        self.value.memory = self.kind(8, self.size, generator)
        self.value._modules_in_order = (self.value.extractor, self.value.memory)
        self.value_head = torch.nn.Linear(self.size, 1)


class LargeMemory(OtherMemory):
    kind, size = GRU, 128


def test_a_large_memory_of_the_value_uses_torch(monkeypatch):
    algo = make(actor=LargeMemory, recurrent_net="gru", **MEMORY)
    used = []
    monkeypatch.setattr(algo.actor, "act", lambda *args, **kwargs: used.append(1) or OnPolicyActor.act(
        algo.actor, *args, **kwargs))
    for num_envs, expected in ((5, 0), (6, 1)):
        states = {name: state.numpy() for name, state in algo.actor.initial_states(num_envs).items()}
        algo.acting_step(rows(num_envs), states, np.zeros(num_envs, np.bool_))
        assert len(used) == expected


class OwnValue(OnPolicyActor):
    def value_features(self, obs, rhs, done):
        return super().value_features(obs, rhs, done)


class Greedy(OnPolicyActor):
    def act(self, obs, rhs, done, deterministic=False, mask=None, generator=None):
        return super().act(obs, rhs, done, True, mask, generator)


class Scaled(OnPolicyActor):
    """Multiplies observations by a parameter after it has normalized them."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.scale = torch.nn.Parameter(torch.tensor(-3.0))

    def normalize(self, obs):
        return {"obs": super().normalize(obs)["obs"] * self.scale}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_acting_uses_an_own_method_that_normalizes_observations(num_envs, normalize):
    algo, obs = make(actor=Scaled, normalize_obs=normalize), rows(num_envs)
    if normalize:
        algo.actor.merge_moments({"obs/obs": (torch.tensor(9.0), torch.full((5,), 0.3), torch.full((5,), 4.0))})
    with torch.inference_mode():
        action, _, params, _, _ = algo.actor.act({"obs": torch.from_numpy(obs["obs"])}, {}, None, deterministic=True)
    step = act(algo, obs, deterministic=True)
    np.testing.assert_array_equal(step.action, action)
    np.testing.assert_allclose(step.other["dist_params"], params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("high", [0.1, 0.4, 1 / 3])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_clipped_actions_are_within_float64_bounds(num_envs, high):
    space = gym.spaces.Box(-high, high, (2,), np.float64)
    step = act(make(action=space, log_std_init=4.0), rows(num_envs))
    assert all(space.contains(action.astype(np.float64)) for action in step.clipped_action)


@pytest.mark.parametrize("options", [
    {"actor": OtherMemory, "recurrent_net": "gru", **MEMORY},
    {"actor": OwnValue, "recurrent_net": "gru"}, {"recurrent_net": "gru", "shared_policy_value_network": True},
    {"shared_policy_value_network": True}, {"activation": "silu"}, {"actor": Greedy},
    {"algo": {"mixed_precision": True}}, {"action": gym.spaces.MultiBinary(2)},
    {"space": gym.spaces.Discrete(5)}, {"feature_extractor": lambda space: Own()},
], ids="_".join)
def test_unsupported_actors_have_no_small_policy(options):
    assert make(**options)._small_policy is None


class Own(torch.nn.Linear):
    out_features = 4

    def __init__(self):
        super().__init__(5, 4)


def test_actions_are_sampled_from_the_softmax():
    algo = make(hidden_sizes=())
    with torch.no_grad():
        algo.actor.policy_head.weight.zero_()
        algo.actor.policy_head.bias.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
    drawn = np.concatenate([act(algo, rows(50)).action for _ in range(400)])
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / len(drawn), [0.5, 0.3, 0.2], atol=0.012)
