"""A task whose observations, rewards and flags are tensors on a device, and which reads none of them on the host."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces


class TensorTask:
    """Points in a plane are pushed towards the origin; an episode ends far from it, or is cut off after a few steps.

    Args:
        num_envs: Number of points.
        device: Device of all tensors.
        is_discrete: Whether there are three actions, numbered from 1, instead of a push in each direction.
        limit: Number of steps after which an episode is cut off.
        has_final: Whether `step` returns the last observations of episodes.
    """

    def __init__(self, num_envs, device="cuda:0", is_discrete=False, limit=7, has_final=True):
        self.has_final = has_final
        self.num_envs, self.device, self.limit = num_envs, torch.device(device), limit
        self.single_observation_space = spaces.Dict({
            "point": spaces.Box(-np.inf, np.inf, (2,), np.float32), "time": spaces.Box(0, np.inf, (1,), np.float32)})
        self.single_action_space = spaces.Discrete(3, start=1) if is_discrete else spaces.Box(-1, 1, (2,), np.float32)
        self.generator = torch.Generator(self.device)
        self.point = torch.zeros(num_envs, 2, device=self.device)
        self.time = torch.zeros(num_envs, 1, device=self.device)

    def reset(self, seed=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        self.time.zero_()
        self.point.normal_(generator=self.generator)
        return self._obs()

    def step(self, action):
        push = torch.stack([action - 2.0, 2.0 - action], 1) if action.dim() == 1 else action
        self.point += 0.5 * push
        self.time += 1
        reward = -self.point.square().sum(1)
        terminated = self.point.abs().amax(1) > 1.5
        truncated = (self.time[:, 0] >= self.limit) & ~terminated
        final = {name: leaf.clone() for name, leaf in self._obs().items()}
        ended = (terminated | truncated).unsqueeze(1)
        new = torch.empty_like(self.point).normal_(generator=self.generator)
        self.point.copy_(torch.where(ended, new, self.point))
        self.time.copy_(torch.where(ended, 0.0, self.time))
        return self._obs(), reward, terminated, truncated, {"final_obs": final} if self.has_final else {}

    def _obs(self):
        return {"point": self.point, "time": self.time}  # overwritten in the next step, as in many simulators
