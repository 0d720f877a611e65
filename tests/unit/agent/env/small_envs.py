"""Small environments for tests of vector environments."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


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
