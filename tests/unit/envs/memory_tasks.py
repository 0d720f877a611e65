"""Tasks that need memory: a recall task with action masks, and a wrapper that hides entries of observations."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from pytorchrl.envs.memory import Recall


class MaskedRecall(Recall):
    """`Recall` in which each step allows two of four actions, which `info["action_mask"]` names.

    The cue and one other action are allowed at the last step. Without memory, no policy has a mean return above 1/2. An
    action that is not allowed raises an error.
    """

    def __init__(self, num_cues=4, delay=6):
        super().__init__(num_cues, delay)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "action_mask": self._draw_mask()}

    def step(self, action):
        assert self.mask[action], "the action is not allowed"
        *result, info = super().step(action)
        return (*result, {**info, "action_mask": self._draw_mask()})

    def _draw_mask(self):
        order = self.np_random.permutation(self._num_cues)
        chosen = [self._cue, next(a for a in order if a != self._cue)] if self._t == self._delay else order[:2]
        self.mask = np.isin(np.arange(self._num_cues), chosen)
        return self.mask


class WithoutVelocity(gym.ObservationWrapper):
    """A wrapper of Pendulum that leaves out the velocity, which only several observations show."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def observation(self, observation):
        return observation[:2]
