"""Do what errors about environments advise, and check that it helps.

Remedies of other errors of environments are executed in the tests of their subject: turn-based games in
`multi/test_turns.py`, masks in `test_acting.py`, restarts, closures and registered ids in `test_first_episodes.py`.
"""

import re
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import pytorchrl
from pytorchrl.agent.env import VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, EnvError, FactoryError

TINY = {"num_envs": 2, "num_steps": 16, "target_steps": 32, "num_epochs": 1, "num_mini_batch": 2, "seed": 1,
        "progress": False}


class Whole(CountingEnv):
    """A `CountingEnv` whose actions are whole numbers in a Box."""

    def __init__(self, dtype=np.int32):
        super().__init__(episode_length=5)
        self.action_space = gym.spaces.Box(-3, 3, (2,), dtype)

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step(0)


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "dqn"])
def test_a_box_of_whole_numbers_trains_in_the_wrapper_that_the_error_names(algorithm):
    with pytest.raises(ConfigError, match="declare whole numbers as Discrete or MultiDiscrete, or round") as caught:
        pytorchrl.train(algorithm, Whole, progress=False)
    code = re.search(r"gymnasium\.wrappers\.TransformAction\(env, .*numpy\.float32\)\)", str(caught.value)).group()
    if algorithm == "ppo":
        wrapper = eval(f"lambda env: {code}", {"gymnasium": gym, "numpy": np})
        pytorchrl.train(algorithm, Whole, wrappers=(wrapper,), **TINY)


class OldEnv:
    """An environment of the package gym, which gymnasium replaced."""


OldEnv.__mro__[0].__module__ = "gym.core"


def test_an_environment_of_another_package_is_named_with_its_package():
    with pytest.raises(FactoryError, match=r"got gym\.core\.OldEnv from OldEnv; the package gym was replaced by "
                                           r"gymnasium: derive the environment from gymnasium\.Env"):
        VecEnv.create_factory(OldEnv)
    with pytest.raises(FactoryError, match=r"got types\.SimpleNamespace from SimpleNamespace$"):
        VecEnv.create_factory(types.SimpleNamespace)


@pytest.mark.parametrize("remedy", [{"backend": "sync"}, pytest.param(
    {"backend": "async"}, marks=pytest.mark.thorough), {"on_env_error": "raise"}], ids=str)
def test_options_of_single_environments_work_with_the_backend_that_the_error_names(remedy):
    for option, value in (("frame_stack", 2), ("wrappers", (gym.wrappers.RecordEpisodeStatistics,)),
                          ("env_timeout_s", 60.0), ("on_env_error", "restart")):
        if ("on_env_error" in remedy) != (option == "on_env_error"):
            continue
        given = {option: value, "vec_env_size": 4}
        with pytest.raises(ConfigError) as caught:
            VecEnv.create_factory("CartPole-v1", backend="vector", **given)
        assert all(f"{value!r}" in str(caught.value) for value in remedy.values())
        VecEnv.create_factory("CartPole-v1", **{**given, **remedy})(seed=1).close()


def test_an_autoreset_mode_that_a_vector_environment_lacks_works_with_the_backend_that_the_error_names():
    def make(num_envs=None):
        return CountingEnv() if num_envs is None else SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode="NextStep")

    with pytest.raises(ConfigError, match=r"takes num_envs|supports only NextStep; use backend='sync'"):
        VecEnv.create_factory(make, vec_env_size=2, autoreset="same_step")
    VecEnv.create_factory(CountingEnv, vec_env_size=2, autoreset="same_step", backend="sync")(seed=1).close()


def test_lives_that_are_missing_can_be_left_out():
    with pytest.raises(EnvError, match="set end_on_life_loss=False"):
        VecEnv.create_factory(CountingEnv, end_on_life_loss=True)
    VecEnv.create_factory(CountingEnv, end_on_life_loss=False)(seed=1).close()


@pytest.mark.parametrize(
    "options", [{"frame_stack": 3}, {"wrappers": (gym.wrappers.RecordEpisodeStatistics,)}], ids=["stack", "wrappers"])
def test_options_of_single_games_of_atari_work_with_the_backend_that_the_error_names(options):
    pytest.importorskip("ale_py")
    from pytorchrl.envs import atari_factory

    with pytest.raises(ConfigError, match=r"need single environments, .* use backend='sync' or 'async'"):
        atari_factory("ALE/Pong-v5", 2, **options)
    factory = atari_factory("ALE/Pong-v5", 2, backend="sync", **options)
    space = factory.observation_space["obs"]
    assert (space.shape, space.dtype) == ((options.get("frame_stack", 4), 84, 84), np.uint8)
    envs = factory(seed=1)
    envs.reset()
    assert envs.step(np.zeros(2, np.int64)).obs["obs"].any()
    envs.close()
