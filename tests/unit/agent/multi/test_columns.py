import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.agent.multi.columns import PolicyColumns

OBSERVATIONS = gym.spaces.Box(0, 1, (2,), np.float32)


def columns(action_space, num_agents=2, num_envs=2):
    return PolicyColumns([f"a{index}" for index in range(num_agents)], OBSERVATIONS, action_space, num_envs)


def test_columns_count_environments_first():
    own = columns(gym.spaces.Discrete(2), num_agents=3)
    assert own.num_columns == 6
    assert [own.column(env, f"a{agent}") for env in (0, 1) for agent in (0, 1, 2)] == list(range(6))


@pytest.mark.parametrize(("space", "value", "expected"), [
    (gym.spaces.Discrete(3), np.int64(2), 2), (gym.spaces.Discrete(3, start=5), np.int64(2), 7),
    (gym.spaces.MultiDiscrete([3, 3], start=[1, 2]), np.array([0, 2]), [1, 4]),
    (gym.spaces.Box(0, 1, (), np.float32), np.float32(0.75), 0.75)])  # a number with a fraction stays one
def test_actions_have_the_form_that_the_environment_expects(space, value, expected):
    action = columns(space).as_env_action(value)
    assert np.asarray(action).tolist() == expected
    assert isinstance(action, int) == isinstance(space, gym.spaces.Discrete)
