import re

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs import atari_factory, box2d_factory, classic_factory, make_factory, mujoco_factory
from pytorchrl.envs.lookup import names_module
from pytorchrl.envs.suites import suite_of
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError


@pytest.mark.parametrize(("suite", "env_id", "obs_shape"), [
    (classic_factory, "Acrobot-v1", (6,)), (box2d_factory, "LunarLander-v3", (8,)),
    (mujoco_factory, "HalfCheetah-v5", (17,)),
])
def test_suites_build_and_step_without_output(suite, env_id, obs_shape, capfd):
    factory = suite(env_id, 2)
    assert factory.observation_space["obs"].shape == obs_shape
    assert factory.observation_space["obs"].dtype == np.float32
    env = factory(seed=0)
    env.reset()
    step = env.step(np.zeros(env.action_shape, env.action_space.dtype))
    assert step.obs["obs"].shape == (2, *obs_shape)
    assert step.obs["obs"].dtype == np.float32
    env.close()
    assert "".join(capfd.readouterr()) == ""


def test_warnings_of_mujoco_are_logged_except_those_about_the_files_of_gymnasium(caplog):
    mujoco = pytest.importorskip("mujoco")
    mujoco_factory("Hopper-v5", 1)(seed=0).close()
    for text in ("Nan in QVEL. The simulation is unstable.", "compiler attribute 'settotalmass' is deprecated"):
        mujoco.get_mju_user_warning()(text)
    assert caplog.messages == ["MuJoCo: Nan in QVEL. The simulation is unstable."]


def test_make_factory_picks_the_suite_by_id():
    atari = make_factory("ALE/Pong-v5", 2)
    assert atari.options == atari_factory("ALE/Pong-v5", 2).options
    assert make_factory("CartPole-v1", 3).options == VecEnv.create_factory("CartPole-v1", vec_env_size=3).options
    assert make_factory(CountingEnv, 3, env_kwargs={"offset": 2}).num_envs == 3
    with pytest.raises(ConfigError, match="ALE/Pong-v5"):
        make_factory("ALE/Pongo-v5", 2)
    with pytest.raises(ConfigError, match="CartPole-v1"):
        make_factory("CartPole-v11", 2)


def test_the_ids_of_papers_are_recognized_as_games_of_atari():
    gym.register_envs(pytest.importorskip("ale_py"))
    for name in ("BreakoutNoFrameskip-v4", "ale_py:BreakoutNoFrameskip-v4", "Breakout-v5"):
        factory = make_factory(name, 2)
        assert factory.observation_space["obs"].shape == (4, 84, 84), name
        assert factory.options.reward_transform == "sign"
        assert factory.options.env_kwargs["repeat_action_probability"] == 0.0
    for name in ("PongNoFrameskip-v4", "ALE/Pong-v5", "SpaceInvaders-v5", "SpaceInvadersNoFrameskip-v4"):
        assert suite_of(name).name == "atari", name
    for name in ("CartPole-v0", "CartPole-v1", "Taxi-v4", "Acrobot-v5", "LunarLander-v3", "Hopper-v4", "Ant-v5"):
        assert suite_of(name) is None or suite_of(name).name != "atari", name


@pytest.mark.parametrize(("name", "wanted"), [
    ("Breakout-v0", "'ALE/Breakout-v5' with sticky=True?"), ("Breakout-v4", "'ALE/Breakout-v5'?"),
    ("BreakoutNoFrameskip-v0", "'ALE/Breakout-v5' with sticky=True?"), ("PongDeterministic-v4", "'ALE/Pong-v5'?"),
    ("ale_py:Pong-v4", "'ALE/Pong-v5'?"),
])
def test_old_ids_of_other_atari_environments_are_refused_with_the_id_of_ale(name, wanted):
    gym.register_envs(pytest.importorskip("ale_py"))
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {wanted} To train on it nevertheless")):
        make_factory(name, 2)


@pytest.mark.parametrize(("name", "message"), [
    ("FetchReach-v4", "write 'gymnasium_robotics:FetchReach-v4'; install gymnasium-robotics if it is missing"),
    ("MiniGrid-Empty-5x5-v0", "write 'minigrid:MiniGrid-Empty-5x5-v0'"),
    ("highway-fast-v0", "write 'highway_env:highway-fast-v0'"), ("mo-lunar-lander-v3", "'mo_gymnasium:mo-lunar-lander"),
    ("dm_control/cartpole-swingup-v0", "write 'shimmy:dm_control/"),
    ("CartPoly-v1", "did you mean 'CartPole-v1'.* Is its package imported[?] .*'module:id'"),
])
def test_an_unknown_id_says_how_ids_of_other_packages_are_written(name, message):
    with pytest.raises(ConfigError, match=message):
        make_factory(name, 2)


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
