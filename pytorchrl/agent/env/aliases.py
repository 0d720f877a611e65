"""Names for Gymnasium's generic types, and the name of action masks.

The type parameters are not specific, because the types of observations and actions depend on an environment's spaces,
which are known only at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsFloat

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from pytorchrl.support.untyped import EnvValue, Forwarded, UserPart

MASK_LEAF = "action_mask"
"""Name of the observation leaf or `info` entry that contains the action mask; networks do not receive the leaf."""

Observation = EnvValue
"""An array or a number, or a dictionary or tuple of observations, as the observation space prescribes."""
Action = EnvValue
"""An action in the form that the action space prescribes."""
EnvKwargs = dict[str, Forwarded]
"""Keyword arguments of an environment's constructor, which determines their types."""
Info = dict[str, EnvValue]
"""The `info` of an environment, with values of any type."""
AnySpace = gym.Space[EnvValue]
AnyEnv = gym.Env[Observation, Action]
AnyWrapper = gym.Wrapper[Observation, Action, Observation, Action]
AnyVectorEnv = VectorEnv[Observation, Action, EnvValue]
EnvObject = UserPart
"""An object that steps one or several environments; its class need not derive from one of Gymnasium's."""
EnvFn = str | EnvSpec | AnyEnv | Callable[..., UserPart]
"""A Gymnasium id, an EnvSpec, an environment, or a function of keyword arguments that builds an environment or a vector
environment."""
EnvWrapper = Callable[[AnyEnv], AnyEnv]
ResetResult = tuple[Observation, Info]
"""Observation and info."""
StepResult = tuple[Observation, SupportsFloat, bool, bool, Info]
"""Observation, reward (a Python or NumPy number), terminated, truncated and info of one environment."""
