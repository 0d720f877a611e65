"""A vector environment of Gymnasium over tensors on a device, in both autoreset modes and with several observations."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
SPACES = {
    "vector": BOX,
    "float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "stack": spaces.Box(0, 255, (4, 40, 40), np.uint8),
    "nested": spaces.Dict({"point": spaces.Dict({"place": BOX}), "time": spaces.Discrete(10, start=3)}),
}


class TensorVector(VectorEnv):
    """Points in a plane; an episode ends far from the origin, or is cut off after `limit` steps.

    Args:
        num_envs: Number of points.
        device: Device of all tensors.
        mode: The autoreset mode.
        kind: Kind of observations, a key of `SPACES`.
        is_discrete: Whether there are three actions, numbered from 1, instead of a push in each direction.
        limit: Number of steps after which an episode is cut off.
        has_final: Whether `step` returns the last observations of episodes, in those steps in which episodes end.
    """

    def __init__(self, num_envs, device="cuda:0", mode="NEXT_STEP", kind="vector", is_discrete=False, limit=5,
                 has_final=True):
        self.num_envs, self.device, self.kind, self.limit = num_envs, torch.device(device), kind, limit
        self.metadata = {"autoreset_mode": AutoresetMode[mode]}
        self.is_next_step, self.has_final = mode == "NEXT_STEP", has_final
        self.single_observation_space = SPACES[kind]
        self.single_action_space = spaces.Discrete(3, start=1) if is_discrete else spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator(self.device)
        self.point = torch.zeros(num_envs, 2, device=self.device)
        self.time = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.done = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.frames = torch.zeros(num_envs, 4, 40, 40, dtype=torch.uint8, device=self.device)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        self.done.zero_()
        self._begin(torch.ones_like(self.done))
        return self._obs(), {}

    def step(self, action):
        again, info = self.done.clone(), {}
        push = torch.stack([action - 2.0, 2.0 - action], 1) if action.dim() == 1 else action
        self.point = self.point + 0.5 * push
        self.time = self.time + 1
        self.frames = torch.cat([self.frames[:, 1:], self._frame()[:, None]], 1)
        if self.is_next_step:
            self._begin(again)
        reward = torch.where(again, 0.0, -self.point.square().sum(1))
        terminated = (self.point.abs().amax(1) > 1.5) & ~again
        truncated = (self.time >= self.limit) & ~terminated & ~again
        done = terminated | truncated
        if self.is_next_step:
            self.done = done
        else:
            if self.has_final and bool(done.any()):
                info = {"final_obs": self._obs(), "final_info": {}}
            self._begin(done)
        return self._obs(), reward, terminated, truncated, info

    def _begin(self, rows):
        new = torch.empty_like(self.point).normal_(generator=self.generator)
        self.point = torch.where(rows[:, None], new, self.point)
        self.time = torch.where(rows, 0, self.time)
        self.frames = torch.where(rows[:, None, None, None], self._frame()[:, None], self.frames)

    def _frame(self):
        grey = (self.point[:, 0] * 20 + 100).clamp(0, 255).to(torch.uint8)
        return grey[:, None, None].expand(-1, 40, 40)

    def _obs(self):
        return {"vector": self.point, "float64": self.point.double() / 3,
                "image": torch.stack([self._frame()] * 3, -1), "stack": self.frames,
                "nested": {"point": {"place": self.point}, "time": self.time + 3}}[self.kind]
