"""The vector environment of this process against Gymnasium's own."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pytorchrl.agent.env.backends import _InProcess
from pytorchrl.envs.testing import ScriptedEnv


class Informed(ScriptedEnv):
    """With entries of `info` of several kinds, one of them in some steps only."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation, {**info, "episode_number": self._episode}

    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "t": self._t, **({"rare": np.full(2, self._t)} if self._t % 3 == 0 else {})}


class Boxed(Informed):
    """With an action that is seen, and an observation in a dictionary."""

    def __init__(self, *args):
        super().__init__(*args)
        self.action_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (3,), np.float32)})

    def reset(self, **kwargs):
        return {"a": np.zeros(3, np.float32)}, super().reset(**kwargs)[1]

    def step(self, action):
        return {"a": action}, *super().step(action)[1:]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("env", [ScriptedEnv, Informed, Boxed])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_steps_as_gymnasium_does(num_envs, env, mode):
    makers = [lambda index=index: env((0.5 * index, 1.0, -2.0), (index % 2,), (2,)) for index in range(num_envs)]
    mine, theirs = (
        vector(makers, copy=False, autoreset_mode=mode) for vector in (_InProcess, SyncVectorEnv))
    assert_same(mine.reset(seed=1), theirs.reset(seed=1))
    actions = theirs.action_space
    actions.seed(0)
    ends = 0
    for _ in range(20):
        action = actions.sample()
        result = mine.step(action)
        assert_same(result, theirs.step(action))
        ends += int((result[2] | result[3]).sum())
    assert ends > 5


def assert_same(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])
    elif isinstance(mine, (tuple, list)) or (isinstance(mine, np.ndarray) and mine.dtype == object):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(mine, np.ndarray):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    else:
        assert mine == theirs
