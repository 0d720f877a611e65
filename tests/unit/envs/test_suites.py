import numpy as np
import pytest

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs import atari_factory, box2d_factory, classic_factory, make_factory, mujoco_factory
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
    step = env.step(np.zeros(env._action_shape, env.action_space.dtype))
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
