"""A task that cannot be solved without memory. The id is "pytorchrl/Recall-v0"; no extra is needed."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import Info, ResetResult, StepResult
from pytorchrl.errors import ConfigError


class Recall(gym.Env[np.ndarray, np.int64]):
    """Task in which a cue, shown only in the first observation, must be repeated `delay` steps later.

    Observation: (num_cues + 1,) float32. At the first step, entry c is 1 for cue c; at the last step, the last entry is
    1; all other entries are 0. The action of the last step is the answer: its reward is 1 if the action equals the cue,
    and 0 otherwise. All other actions are ignored, and their rewards are 0. An episode has delay + 1 steps. Without
    memory, no policy has a mean return above 1 / num_cues.

    Args:
        num_cues: Number of cues, and of actions.
        delay: Number of steps from the cue to the answer.
    """

    metadata: Info = {"render_modes": []}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, num_cues: int = 4, delay: int = 8) -> None:
        if num_cues < 2 or delay < 1:
            raise ConfigError(f"num_cues must be >= 2 and delay >= 1, got {num_cues} and {delay}")
        self.observation_space = spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self._num_cues, self._delay, self._cue, self._t = num_cues, delay, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Draw a cue, and return the observation that shows the cue."""
        super().reset(seed=seed)
        self._cue, self._t = int(self.np_random.integers(self._num_cues)), 0
        return self._observation(self._cue), {}

    def step(self, action: np.int64) -> StepResult:
        """Take one step; the action of the last step is the answer."""
        self._t += 1
        is_over = self._t > self._delay
        reward = float(is_over and int(action) == self._cue)
        return self._observation(-1 if self._t == self._delay else None), reward, is_over, False, {}

    def _observation(self, shown: int | None) -> np.ndarray:
        obs = np.zeros(self.observation_space.shape or (), np.float32)
        if shown is not None:
            obs[shown] = 1.0
        return obs
