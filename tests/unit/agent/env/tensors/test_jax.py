"""Test that functional environments of JAX are stepped as a vector, with exact last observations."""

from __future__ import annotations

import sys
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import ConfigError, VecEnv, train
from pytorchrl.agent.env.tensors.jax import converted_space, is_functional
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import EnvError
from tests.unit.agent.env.tensors import stand_ins

TINY = {"num_envs": 4, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "target_steps": 128, "progress": False,
        "seed": 3, "hidden_sizes": (8,)}
LIMIT = 5


def jax_module():
    return sys.modules["jax"]


class State(NamedTuple):
    obs: object
    reward: object
    done: object
    info: dict


class Params(NamedTuple):
    max_steps_in_episode: int = LIMIT

    def replace(self, **changes):
        return self._replace(**changes)


class Discrete:
    n = 2


class Gymnax:
    """The form of gymnax: the observation counts the steps; the end after `LIMIT` steps is no termination."""

    default_params = Params()

    def action_space(self, params):
        return Discrete()

    def reset(self, key, params):
        start = jax_module().random.uniform(key)
        state = (start, 0)
        return self.obs(state), state

    def step(self, key, state, action, params):
        raise AssertionError("gymnax's step resets by itself, and step_env does not")

    def step_env(self, key, state, action, params):
        state = (state[0] + action, state[1] + 1)
        return self.obs(state), state, action, self.is_terminal(state, params), {}

    def is_terminal(self, state, params):
        return (state[0] > 3) | (state[1] >= params.max_steps_in_episode)

    def obs(self, state):
        return jax_module().numpy.array([state[0], state[1]], dtype="float32")


class Brax:
    """The form of Brax: `done` is a float, and a wrapper may cut episodes off."""

    action_size = 2

    def __init__(self, info=None):
        self.info = info or {}

    def reset(self, rng):
        jax = jax_module()
        return State(jax.random.uniform(rng, (3,)), jax.numpy.zeros(()), jax.numpy.zeros(()), self.info)

    def step(self, state, action):
        obs = state.obs + 1.0
        return state._replace(obs=obs, reward=action.sum(), done=(obs[0] > 3.5).astype("float32"))


def test_functional_environments_are_told_from_others():
    assert is_functional(Gymnax())
    assert is_functional((Gymnax(), Params()))
    assert is_functional(Brax())
    assert not any(map(is_functional, (
        Gymnax, CountingEnv(), stand_ins.FiveResults(), gym.make_vec("CartPole-v1", 2), None, (1, 2), lambda: 0)))


def test_spaces_of_actions_are_converted_or_refused():
    class Box:
        low, high, shape = -2.0, np.array([1.0, 3.0]), (2,)

    assert converted_space(Discrete()) == gym.spaces.Discrete(2)
    assert converted_space(Box()) == gym.spaces.Box(np.float32([-2, -2]), np.float32([1, 3]))
    assert converted_space(gym.spaces.Discrete(3)) == gym.spaces.Discrete(3)
    with pytest.raises(EnvError, match=r"expected a discrete or continuous action space.*wrap the environment in one"):
        converted_space(object())


@pytest.mark.parametrize("made", [Gymnax, lambda: (Gymnax(), Params()), Gymnax(), (Gymnax(), Params())])
def test_resets_keep_the_last_observations_and_time_limits_are_no_terminations(made):
    pytest.importorskip("jax")
    env = VecEnv.create_factory(made, vec_env_size=4)(seed=1)
    first, _ = env.reset()
    starts = first["obs"][:, 0].copy()
    assert len(set(starts.tolist())) == 4
    actions = np.array([0, 0, 1, 1])
    ends = 0
    lengths = np.zeros(4, int)
    for _ in range(12):
        step = env.step(actions)
        lengths += 1
        assert np.array_equal(step.reward, actions)
        for row, index in enumerate(step.final_index.tolist()):
            assert step.terminated[index] == (actions[index] == 1)
            assert step.truncated[index] == (actions[index] == 0)
            assert np.allclose(step.final_obs["obs"][row], [starts[index] + actions[index] * lengths[index],
                                                            lengths[index]])
            assert step.obs["obs"][index, 1] == 0
            assert step.obs["obs"][index, 0] != starts[index]
            starts[index], lengths[index] = step.obs["obs"][index, 0], 0
            ends += 1
        assert np.allclose(step.obs["obs"][:, 1], lengths)
    assert ends == 2 * (12 // LIMIT) + 2 * (12 // 3)


def test_a_seed_determines_all_episodes_and_results_are_not_written_to():
    pytest.importorskip("jax")

    def observations(seed):
        env = VecEnv.create_factory(Gymnax, vec_env_size=3)(seed=seed)
        found = [env.reset()[0]["obs"], *(env.step(np.ones(3, int)).obs["obs"] for _ in range(8))]
        assert all(obs.flags.writeable for obs in found)  # copies, because arrays of JAX cannot be changed
        return np.array(found)

    assert np.array_equal(observations(1), observations(1))
    assert not np.array_equal(observations(1), observations(2))


def test_the_form_of_brax_has_limits_of_its_own_or_of_the_option():
    jax = pytest.importorskip("jax")
    assert torch.isfinite(train("ppo", Brax, **TINY).acting_state["all"]).all()
    env = VecEnv.create_factory(Brax, vec_env_size=2, max_episode_steps=2)(seed=1)
    env.reset()
    ends = [env.step(np.zeros((2, 2), np.float32)) for _ in range(4)]
    assert [step.truncated.tolist() for step in ends] == [[False] * 2, [True] * 2] * 2
    assert not any(step.terminated.any() for step in ends)
    cut = VecEnv.create_factory(lambda: Brax({"truncation": jax.numpy.ones(())}), vec_env_size=2)(seed=1)
    cut.reset()
    steps = [cut.step(np.zeros((2, 2), np.float32)) for _ in range(4)]
    assert any(step.truncated.any() for step in steps)
    assert not any(step.terminated.any() for step in steps)
    with pytest.raises(ConfigError, match="resets itself, so the last observations of its episodes are lost; give"):
        VecEnv.create_factory(lambda: Brax({"first_obs": jax.numpy.ones(())}))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of FourRooms, whose observations are integers
def test_environments_of_gymnax_and_brax_train():
    gymnax = pytest.importorskip("gymnax")
    for name in ("CartPole-v1", "Pendulum-v1", "Catch-bsuite", "FourRooms-misc"):
        assert torch.isfinite(train("ppo", lambda name=name: gymnax.make(name), **TINY).acting_state["all"]).all()
    envs = pytest.importorskip("brax.envs")
    assert torch.isfinite(train("ppo", lambda: envs.get_environment("fast"), **TINY).acting_state["all"]).all()


def test_a_vector_environment_of_jax_trains_if_gymnasium_converts_it():
    pytest.importorskip("jax")
    pytest.importorskip("array_api_compat")
    wrappers = gym.wrappers.vector
    jax_numpy = jax_module().numpy

    def of_jax():
        return wrappers.ArrayConversion(stand_ins.TensorVector(4, device=None), np, jax_numpy)

    options = {name: value for name, value in TINY.items() if name != "num_envs"}
    expected = train("ppo", lambda: stand_ins.TensorVector(4, device=None), **options).acting_state["all"]
    for make in (of_jax, lambda: wrappers.JaxToTorch(of_jax()), lambda: wrappers.JaxToNumpy(of_jax())):
        assert train("ppo", make, **options).acting_state["all"].equal(expected)
