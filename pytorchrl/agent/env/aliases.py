"""Names for Gymnasium's generic types.

The type parameters are `Any`, because the types of observations and actions depend on an environment's spaces, which
are known only at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

Observation = Any
"""An array or a number, or a dictionary or tuple of observations, as the observation space prescribes."""
Action = Any
"""An action in the form that the action space prescribes."""
EnvKwargs = dict[str, Any]
"""Keyword arguments of an environment's constructor, which determines their types."""
Info = dict[str, Any]
"""The `info` of an environment, with values of any type."""
AnySpace = gym.Space[Any]
AnyEnv = gym.Env[Any, Any]
AnyWrapper = gym.Wrapper[Any, Any, Any, Any]
AnyVectorEnv = VectorEnv[Any, Any, Any]
EnvFn = str | EnvSpec | Callable[..., Any]
"""A Gymnasium id, an EnvSpec, or a function of keyword arguments that builds an environment or a vector environment."""
EnvWrapper = Callable[[AnyEnv], AnyEnv]
ResetResult = tuple[Observation, Info]
"""Observation and info."""
StepResult = tuple[Observation, Any, bool, bool, Info]
"""Observation, reward (a Python or NumPy number), terminated, truncated and info of one environment."""
