"""Wrap single environments to implement options of `VecEnv`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import Action, AnyEnv, AnyWrapper, Info, ResetResult, StepResult
from pytorchrl.agent.env.images import channels_first, has_channels_last
from pytorchrl.errors import ConfigError


class FrameStack(gym.Wrapper[np.ndarray, Action, np.ndarray, Action]):
    """Wrapper that concatenates the newest observations along the channel axis; the space must be a Box.

    K images (H, W, C) become an image (K·C, H, W), oldest first. The channel axis of other observations is the first
    axis, or the last of three axes if it has 1, 3 or 4 entries. At the start of an episode, the stack contains copies
    of the first observation.

    Args:
        env: The environment.
        num_frames: Number of observations to concatenate.

    Raises:
        ConfigError: The observation space is not a Box, or has no axis.
    """

    def __init__(self, env: AnyEnv, num_frames: int) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or not space.shape:
            raise ConfigError(f"frame_stack needs a Box with at least one axis, got {space}; use frame_stack=1")
        self._axis = 0
        # If the channels stayed last, their number would no longer be that of an image.
        self._has_channels_last = has_channels_last(space)
        if self._has_channels_last:
            space = channels_first(space)
        elif len(space.shape) == 3 and space.shape[2] in (1, 3, 4):
            self._axis = -1
        self._frames: deque[np.ndarray] = deque(maxlen=num_frames)
        self.observation_space = spaces.Box(
            np.concatenate([space.low] * num_frames, self._axis),
            np.concatenate([space.high] * num_frames, self._axis), dtype=space.dtype.type)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Reset the environment, and fill the stack with copies of the first observation."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._frames.extend([self._frame(observation)] * (self._frames.maxlen or 1))
        return np.concatenate(self._frames, self._axis), info

    def step(self, action: Action) -> StepResult:
        """Step the environment; return the stack with the newest observation last."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._frames.append(self._frame(observation))
        return np.concatenate(self._frames, self._axis), reward, terminated, truncated, info

    def _frame(self, observation: np.ndarray) -> np.ndarray:
        """Return a copy of an observation, because the environment may reuse the memory for its next observation."""
        return np.array(np.moveaxis(observation, -1, 0) if self._has_channels_last else observation, order="C")


class MaskMethod(AnyWrapper):
    """Wrapper that puts the result of the environment's method `action_masks()` into `info`.

    Args:
        env: An environment with that method, as sb3-contrib's MaskablePPO needs it.
        key: The key in `info`; an entry of the environment with this key is kept.
    """

    def __init__(self, env: AnyEnv, key: str) -> None:
        super().__init__(env)
        self._key, self._masks = key, env.get_wrapper_attr("action_masks")

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Reset the environment, and add its mask to `info`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {self._key: _joined(self._masks()), **info}

    def step(self, action: Action) -> StepResult:
        """Step the environment, and add its mask to `info`."""
        *result, info = self.env.step(action)
        return *result, {self._key: _joined(self._masks()), **info}


def _joined(mask: Iterable[object]) -> np.ndarray:
    """Return the mask of one observation as one array (n,); the masks of several components are joined."""
    if isinstance(mask, np.ndarray) and mask.ndim == 1:
        return mask
    return np.concatenate([np.empty(0, dtype=np.bool_), *(np.atleast_1d(np.asarray(part)) for part in mask)])
