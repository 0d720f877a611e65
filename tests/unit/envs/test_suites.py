import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs import atari_factory, box2d_factory, classic_factory, make_factory, mujoco_factory
from pytorchrl.envs.lookup import names_module
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError


@pytest.mark.parametrize(("suite", "env_id", "obs_shape"), [
    (classic_factory, "Acrobot-v1", (6,)), (box2d_factory, "LunarLander-v3", (8,)),
    (mujoco_factory, "HalfCheetah-v5", (17,)),
])
def test_suites_build_and_step(suite, env_id, obs_shape):
    factory = suite(env_id, 2)
    assert factory.observation_space["obs"].shape == obs_shape
    assert factory.observation_space["obs"].dtype == np.float32
    env = factory(seed=0)
    env.reset()
    step = env.step(np.zeros(env.action_shape, env.action_space.dtype))
    assert step.obs["obs"].shape == (2, *obs_shape)
    assert step.obs["obs"].dtype == np.float32
    env.close()


def test_make_factory_picks_the_suite_by_id():
    atari = make_factory("ALE/Pong-v5", 2)
    assert atari.options == atari_factory("ALE/Pong-v5", 2).options
    assert make_factory("CartPole-v1", 3).options == VecEnv.create_factory("CartPole-v1", vec_env_size=3).options
    assert make_factory(CountingEnv, 3, env_kwargs={"offset": 2}).num_envs == 3
    with pytest.raises(ConfigError, match="ALE/Pong-v5"):
        make_factory("ALE/Pongo-v5", 2)
    with pytest.raises(ConfigError, match="CartPole-v1"):
        make_factory("CartPole-v11", 2)


@pytest.mark.parametrize(("name", "is_module"), [
    ("mpe2.simple_spread_v3", True), ("no_such.module", True), ("json", True), ("__main__", True),
    ("CartPole-v1", False), ("CartPole", False), ("ALE/Pong-v5", False), ("module:Env-v0", False),
    ("mpe2.simple-v3", False), ("", False),
])
def test_module_names_are_recognized_as_multi_agent_environments(name, is_module):
    assert names_module(name) is is_module


def test_registered_gymnasium_ids_take_precedence_over_modules():
    gym.register("json", CountingEnv)
    try:
        assert isinstance(make_factory("json", 2).observation_space["obs"], gym.spaces.Space)
    finally:
        del gym.registry["json"]


def test_an_error_for_an_unknown_namespace_suggests_module_names():
    with pytest.raises(ConfigError, match=r"named with dots, 'mpe2\.simple_spread_v3'"):
        make_factory("mpe2/simple_spread_v3", 2)
