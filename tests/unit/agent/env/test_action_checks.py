"""Test that the faster checks of actions have the same results as Gymnasium's, also after a restart."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiDiscrete

from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.action_checks import speed_up_action_check
from pytorchrl.errors import EnvError

ACTIONS = (
    *map(np.int64, range(2, 9)), 3, 7, 3.0, True, np.float64(3), np.int32(6), np.uint64(3), np.array(4), np.array([4]),
    2**70, None, [3, 4, 5], np.array([3, 4, 5]), np.array([3, 4, 6]), np.array([2, 4, 5]), np.array([4, 5]),
    np.array([3, 4, 5], np.uint8), np.array([3, 4, 5], np.uint64), np.array([3.0, 4.0, 5.0]),
    np.array([[3, 4, 5]]),
)


@pytest.mark.parametrize("make", [
    lambda: Discrete(4, start=3), lambda: Discrete(4, start=3, dtype=np.int32), lambda: MultiDiscrete([1, 2, 3]),
    lambda: MultiDiscrete([1, 2, 3], start=[3, 3, 3]), lambda: MultiDiscrete([[2, 7]]),
    lambda: MultiDiscrete([8, 8, 8], dtype=np.int32), lambda: MultiDiscrete([3, 3, 3], start=[3, 3, 3]),
    lambda: MultiDiscrete([3, 4, 5], start=[3, 2, 1])])
def test_results_equal_those_of_gymnasium(make):
    own, quick = make(), make()
    speed_up_action_check(quick)
    copies = (quick, pickle.loads(pickle.dumps(quick)))
    for space in copies:
        assert space == own
        for action in ACTIONS:
            assert space.contains(action) is own.contains(action), action


@pytest.mark.parametrize("num_envs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("step", [0, 1])
def test_each_of_few_and_many_actions_is_checked(num_envs, step):
    first = step * np.arange(num_envs)  # with step 0, all environments have the same bounds
    space = MultiDiscrete(np.full(num_envs, 4), start=first)
    speed_up_action_check(space)
    for action in (first, first + 3):
        assert space.contains(action)
        for at, wrong in ((0, -1), (num_envs - 1, 4), (num_envs // 2, 4), (num_envs // 2, -1)):
            changed = action.copy()
            changed[at] = first[at] + wrong
            assert space.contains(changed) is False


def test_actions_may_be_as_large_as_the_dtype_allows():
    space = MultiDiscrete([28], start=[100], dtype=np.int8)
    speed_up_action_check(space)
    assert space.contains(np.array([127], np.int8))
    assert not space.contains(np.array([99], np.int8))


class Counted(gym.Env):
    """Environment with actions from 3 to 6, which raises an error for other actions, and in its second step."""

    def __init__(self, fails=False):
        self.observation_space, self.action_space = gym.spaces.Box(0, 1, (1,)), Discrete(4, start=3)
        self._fails, self._num_steps = fails, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), "wrong action"
        self._num_steps += 1
        if self._fails and self._num_steps == 2:
            raise RuntimeError("broken")
        return np.zeros(1, np.float32), 0.0, False, False, {}



def test_single_environments_use_the_faster_check():
    env = VecEnv.create_factory(Counted, vec_env_size=2, on_env_error="raise")(seed=0)
    assert "contains" in vars(env.vector.envs[1].unwrapped.action_space)
    env.reset()
    env.step(np.array([0, 3]))  # actions of agents count from 0
    with pytest.raises(EnvError, match="wrong action"):
        env.step(np.array([0, 4]))


def test_restarted_environments_use_the_faster_check():
    env = VecEnv.create_factory(Counted, {"fails": True}, on_env_error="restart")(seed=0)
    first = env.vector.envs[0].unwrapped
    env.reset()
    for _ in range(3):
        env.step(np.array([0]))
    second = env.vector.envs[0].unwrapped
    assert env.num_restarts == 1
    assert second is not first
    assert "contains" in vars(second.action_space)


def test_native_vectors_use_the_faster_check():
    env = VecEnv.create_factory("CartPole-v1", vec_env_size=3, backend="vector")(seed=0)
    assert "contains" in vars(env.vector.unwrapped.action_space)
    env.reset()
    with pytest.raises(EnvError, match="GWorker 0/CWorker 0"):
        env.step(np.array([0, 5, 0]))
