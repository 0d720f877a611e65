"""Small environments for tests of vector environments; processes that import this module do not import torch."""

import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from pytorchrl.envs.testing import CountingEnv


def vector_of(env_fn, mode):
    """Return a function that builds a Gymnasium vector environment with autoreset mode `mode`."""
    return lambda num_envs, **kwargs: SyncVectorEnv([lambda: env_fn(**kwargs)] * num_envs, autoreset_mode=mode)


class WrongDtype(VectorEnv):
    """Vector environment that declares float32, and returns observations of other dtypes; episodes have 3 steps.

    Args:
        num_envs: Number of environments.
        dtypes: Dtypes of the observations of `reset` and of `step`.
        mode: The autoreset mode.
        in_dict: Whether an observation is a dictionary with two leaves; the dtype of the second leaf is correct.
        action_space: Action space of one environment.
    """

    def __init__(self, num_envs, dtypes, mode=AutoresetMode.DISABLED, in_dict=False, action_space=None):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}
        space = spaces.Box(-9, 9, (2,), np.float32)
        self.single_observation_space = spaces.Dict({"a": space, "b": spaces.Discrete(4)}) if in_dict else space
        self.single_action_space = spaces.Discrete(2) if action_space is None else action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._dtypes, self._in_dict, self._count = dtypes, in_dict, 0

    def reset(self, *, seed=None, options=None):
        self._count = 0
        return self._observations(self._dtypes[0]), {}

    def step(self, actions):
        info, mode = {}, self.metadata["autoreset_mode"]
        if self._count == 3 and mode is AutoresetMode.NEXT_STEP:
            ended, observations = np.zeros(self.num_envs, bool), self.reset()[0]
        else:
            self._count += 1
            ended, observations = np.full(self.num_envs, self._count == 3), self._observations(self._dtypes[1])
        if ended.any() and mode is AutoresetMode.SAME_STEP:
            info, observations = {"final_obs": observations}, self.reset()[0]
        return observations, np.ones(self.num_envs), np.zeros(self.num_envs, bool), ended, info

    def _observations(self, dtype):
        counts = np.full((self.num_envs, 2), self._count)
        return {"a": counts.astype(dtype), "b": counts[:, 0]} if self._in_dict else counts.astype(dtype)


class EchoEnv(gym.Env):
    """Environment whose info and observation show the received action."""

    def __init__(self, action_space):
        self.action_space = action_space
        self._mask = np.ones(int(np.sum(getattr(action_space, "nvec", 3))), np.int8)
        self._mask[1] = 0
        self.observation_space = spaces.Dict({
            "value": spaces.Box(-np.inf, np.inf, (2,), np.float64), "action_mask": spaces.MultiBinary(len(self._mask))})

    def observation(self, action):
        value = np.broadcast_to(np.asarray(action, np.float64).ravel(), (2,)).copy()
        return {"value": value, "action_mask": self._mask}

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
