"""Wrappers of single environments that the factory's own options need."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pytorchrl.errors import ConfigError


class FrameStack(gym.Wrapper[np.ndarray, Any, np.ndarray, Any]):
    """The last observations of a Box joined along the channels: the first axis, of (H, W, C) images the last.

    An episode begins with copies of its first observation.

    Raises:
        ConfigError: The observation is no Box.
    """

    def __init__(self, env: gym.Env[Any, Any], num_frames: int) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or not space.shape:
            raise ConfigError(f"frame_stack needs a Box with at least one axis, got {space}; use frame_stack=1")
        self._axis = -1 if len(space.shape) == 3 and space.shape[2] in (1, 3, 4) else 0
        self._frames: deque[np.ndarray] = deque(maxlen=num_frames)
        self.observation_space = spaces.Box(
            np.concatenate([space.low] * num_frames, self._axis),
            np.concatenate([space.high] * num_frames, self._axis), dtype=space.dtype.type)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset, and fill the stack with the first observation."""
        observation, info = self.env.reset(seed=seed, options=options)
        # Copies: an environment may write its next observation into the same memory.
        self._frames.extend([np.array(observation)] * (self._frames.maxlen or 1))
        return np.concatenate(self._frames, self._axis), info

    def step(self, action: Any) -> Any:
        """Step, and return the stack with the newest observation last."""
        observation, *rest = self.env.step(action)
        self._frames.append(np.array(observation))
        return np.concatenate(self._frames, self._axis), *rest
