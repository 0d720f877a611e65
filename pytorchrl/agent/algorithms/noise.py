"""Exploration noise for actions in [-1, 1]. E = number of environments, D = size of an action."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOISES = ("gaussian", "ou", "none")
"""Values of the option `noise`."""


class OrnsteinUhlenbeck:
    """Ornstein-Uhlenbeck noise x (Lillicrap et al. 2016, DDPG): x <- x - theta x dt + sigma sqrt(dt) N(0, 1).

    At the start of an episode, x is 0.

    Attributes:
        state: (E, D), the current x of each environment; empty before the first draw.
    """

    def __init__(self, theta: float, sigma: float, dt: float) -> None:
        self._pull, self._push = theta * dt, sigma * math.sqrt(dt)
        self.state = torch.zeros(0)

    def draw(self, num_envs: int, size: int, done: Tensor, generator: torch.Generator) -> Tensor:
        """Return the next noise, (E, D) float32; `done`, (E,) bool, is true where an episode starts."""
        if self.state.shape != (num_envs, size):
            self.state = torch.zeros(num_envs, size, device=done.device)
        start = self.state.masked_fill(done.unsqueeze(-1), 0.0)
        step = torch.empty_like(start).normal_(generator=generator)
        self.state = start * (1 - self._pull) + step * self._push
        return self.state
