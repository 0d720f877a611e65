"""A module that registers an environment when it is imported."""

import gymnasium as gym

gym.register("Known-v0", "pytorchrl.envs.testing:CountingEnv")
