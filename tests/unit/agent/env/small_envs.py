"""Small environments for tests of vector environments; processes that import this module do not import torch."""

import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from pytorchrl.envs.testing import CountingEnv


def vector_of(env_fn, mode):
    """Return a function that builds a Gymnasium vector environment with autoreset mode `mode`."""
    return lambda num_envs, **kwargs: SyncVectorEnv([lambda: env_fn(**kwargs)] * num_envs, autoreset_mode=mode)


class EchoEnv(gym.Env):
    """Environment whose info and observation show the received action."""

    observation_space = spaces.Dict({
        "value": spaces.Box(-np.inf, np.inf, (2,), np.float64), "action_mask": spaces.MultiBinary(3)})

    def __init__(self, action_space):
        self.action_space = action_space

    def observation(self, action):
        value = np.broadcast_to(np.asarray(action, np.float64).ravel(), (2,)).copy()
        return {"value": value, "action_mask": np.array([1, 0, 1], np.int8)}

    def reset(self, *, seed=None, options=None):
        return self.observation(0.0), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation(action), 0.0, False, False, {}


class SameMemory(gym.Env):
    """Environment that counts steps in an array, and always returns this array; episodes have 3 steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, in_dict=False):
        space = gym.spaces.Box(0, 9, (1,), np.float32)
        self.observation_space = gym.spaces.Dict({"count": space}) if in_dict else space
        self._count = np.zeros(1, np.float32)
        self._observation = {"count": self._count} if in_dict else self._count

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count[0] = 0
        return self._observation, {}

    def step(self, action):
        self._count[0] += 1
        return self._observation, 1.0, False, bool(self._count[0] == 3), {}


class ExitingEnv(CountingEnv):
    """A `CountingEnv` of which one call ends the program; the first environment, which finds the spaces, works."""

    def __init__(self, call, at=0):
        super().__init__(episode_length=5)
        self._call, self._at, self._count = call, at, 0
        self._maybe_exit("constructor")

    def _maybe_exit(self, call):
        if call == self._call:
            self._count += 1
            if self._count > self._at:
                sys.exit(0)

    def reset(self, *, seed=None, options=None):
        self._maybe_exit("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._maybe_exit("step")
        return super().step(action)
