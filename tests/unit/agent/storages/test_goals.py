"""Test that replay finds the function of rewards of an environment with goals."""

from __future__ import annotations

import functools
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import VecEnv
from pytorchrl.agent.storages.goals import EnvReward
from pytorchrl.envs.tensors.maze import TorchPointMaze
from pytorchrl.errors import ConfigError

MAZE = "pytorchrl/TorchPointMaze-v0"
GOALS = np.array([[1.0], [2.0]], np.float32), np.array([[1.0], [1.0]], np.float32)


class Near(gym.Env):
    """An environment that only has a function of rewards."""

    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, value):
        self.value, self.is_open = value, True

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return self.value * (np.abs(achieved_goal - desired_goal) < 0.5).all(-1)


def test_the_method_is_found_in_single_and_in_vector_environments_after_pickling():
    single = EnvReward(VecEnv.create_factory(functools.partial(Near, 2.0), vec_env_size=3, backend="async"))
    assert single(*GOALS, {}).tolist() == [2.0, 0.0]
    assert pickle.loads(pickle.dumps(single))(*GOALS, {}).tolist() == [2.0, 0.0]
    for is_dense, found in ((False, [1.0, 0.0]), (True, [0.0, -np.sqrt(2.0)])):
        maze = EnvReward(VecEnv.create_factory(MAZE, {"is_dense": is_dense}, 3))
        pairs = np.repeat(GOALS[0], 2, 1), np.repeat(GOALS[1], 2, 1)
        np.testing.assert_allclose(maze(*pairs, {}).astype(float), found, rtol=1e-6)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_transforms_apply_and_wrappers_come_first(backend):
    class Doubled(gym.Wrapper):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return 2.0 * self.unwrapped.compute_reward(achieved_goal, desired_goal, info)

    envs = VecEnv.create_factory(functools.partial(Near, 3.0), vec_env_size=2, backend=backend,
                                 wrappers=(Doubled,), reward_transform=0.5)
    assert EnvReward(envs)(*GOALS, {}).tolist() == [3.0, 0.0]


def test_an_environment_that_was_given_stays_open():
    env = Near(2.0)
    assert EnvReward(VecEnv.create_factory(env))(*GOALS, {}).tolist() == [2.0, 0.0]
    env.close = lambda: pytest.fail("the environment belongs to the user")
    assert EnvReward(VecEnv.create_factory(env))(*GOALS, {}).tolist() == [2.0, 0.0]


def test_an_environment_without_the_function_is_refused():
    with pytest.raises(ConfigError, match="has no method compute_reward"):
        EnvReward(VecEnv.create_factory("CartPole-v1"))(*GOALS, {})
    with pytest.raises(ConfigError, match="has no method compute_reward"):
        EnvReward(VecEnv.create_factory("CartPole-v1", vec_env_size=4, backend="vector"))(*GOALS, {})


@pytest.mark.parametrize("is_dense", [False, True])
def test_the_functions_of_the_maze_equal_its_steps(is_dense):

    maze = TorchPointMaze(64, is_dense=is_dense, max_episode_steps=30)
    maze.reset(seed=1)
    generator, reached = torch.Generator().manual_seed(1), 0
    for _ in range(60):
        _, reward, terminated, _, extras = maze.step(2.0 * torch.rand(64, 2, generator=generator) - 1.0)
        last = extras["final_obs"]
        for pair in ((last["achieved_goal"], last["desired_goal"]),
                     (last["achieved_goal"].numpy(), last["desired_goal"].numpy())):
            np.testing.assert_allclose(np.asarray(maze.compute_reward(*pair, {}), np.float32), reward, atol=1e-6)
            assert np.array_equal(np.asarray(maze.compute_terminated(*pair, {})), terminated)
        reached += int(terminated.sum())
    assert reached > 10
