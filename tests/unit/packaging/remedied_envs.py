"""A module with an environment of several agents, which also registers an environment when it is imported."""

import gymnasium as gym

from pytorchrl.envs.testing import MatchingGame

gym.register("Known-v0", "pytorchrl.envs.testing:CountingEnv")
parallel_env = MatchingGame
