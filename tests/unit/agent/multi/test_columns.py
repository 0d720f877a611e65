import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.agent.multi.columns import ColumnsStep, PolicyColumns

OBSERVATIONS = gym.spaces.Box(0, 1, (2,), np.float32)


def columns(action_space, num_agents=2, num_envs=2):
    return PolicyColumns([f"a{index}" for index in range(num_agents)], OBSERVATIONS, action_space, num_envs)


def test_columns_have_environments_as_their_first_axis():
    own = columns(gym.spaces.Discrete(2), num_agents=3)
    assert own.num_columns == 6
    assert [own.column(env, f"a{agent}") for env in (0, 1) for agent in (0, 1, 2)] == list(range(6))


@pytest.mark.parametrize(("space", "value", "expected"), [
    (gym.spaces.Discrete(3), np.int64(2), 2), (gym.spaces.Discrete(3, start=5), np.int64(2), 7),
    (gym.spaces.MultiDiscrete([3, 3], start=[1, 2]), np.array([0, 2]), [1, 4]),
    (gym.spaces.Box(0, 1, (), np.float32), np.float32(0.75), 0.75)])  # the action is not rounded
def test_actions_are_converted_to_the_format_of_the_environment(space, value, expected):
    action = columns(space).as_env_action(value)
    assert np.asarray(action).tolist() == expected
    assert isinstance(action, int) == isinstance(space, gym.spaces.Discrete)


def masked(mask):
    space = gym.spaces.Dict({"x": OBSERVATIONS, "action_mask": gym.spaces.MultiBinary(2)})
    own = PolicyColumns(["a"], space, gym.spaces.Discrete(2), 1)
    own.write([0], [{"x": np.full(2, 0.5, np.float32), "action_mask": mask}], [{}], is_first_reset=True)
    return own


def test_an_end_without_observation_keeps_a_copy_of_the_previous_one():
    own = masked([1, 0])
    step = ColumnsStep(own)
    step.add_end(0, None, {})
    own.write([0], [{"x": np.zeros(2, np.float32), "action_mask": [0, 1]}], [{}], is_first_reset=False)
    found = step.step(None)
    assert found.final_obs["x"].tolist() == [[0.5, 0.5]]
    assert found.final_mask.tolist() == [[True, False]]


def test_a_last_observation_that_forbids_all_actions_allows_all():
    own = masked([1, 0])
    step = ColumnsStep(own)
    step.add_end(0, {"x": np.ones(2, np.float32), "action_mask": [0, 0]}, {})
    assert step.step(None).final_mask.tolist() == [[True, True]]
