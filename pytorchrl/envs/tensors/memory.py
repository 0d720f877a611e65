"""The task `Recall` in torch; see `pytorchrl.envs.memory`."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from pytorchrl.envs.tensors.base import TensorEnv


class TorchRecall(TensorEnv):
    """Repeat a cue, shown only in the first observation, `delay` steps later. State: the cue, the number of steps.

    Observations and rewards are those of `pytorchrl.envs.memory.Recall`.

    Args:
        num_envs: Number of environments.
        num_cues: Number of cues, and of actions.
        delay: Number of steps from the cue to the answer.
        device: Device of all tensors.
        max_episode_steps: Number of steps after which an episode is truncated; None: episodes are not truncated.
        compiled: See `TensorEnv`.
    """

    num_draws = 1

    def __init__(
        self, num_envs: int = 1, *, num_cues: int = 4, delay: int = 8, device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        compiled: bool = False,
    ) -> None:
        self._num_cues, self._delay = num_cues, delay
        self._entries = torch.arange(num_cues + 1, device=device)
        self.single_observation_space = spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.single_action_space = spaces.Discrete(num_cues)
        super().__init__(num_envs, device=device, max_episode_steps=max_episode_steps, compiled=compiled)

    @override
    def start(self, draws: Tensor) -> Tensor:
        return torch.cat(((draws * self._num_cues).floor(), torch.zeros_like(draws)), 1)

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cue, t = state.unbind(1)
        t = t + 1.0
        is_over = t > self._delay
        return torch.stack((cue, t), 1), (is_over & (actions == cue)).to(state.dtype), is_over

    @override
    def observe(self, state: Tensor) -> Tensor:
        cue, t = state.unbind(1)
        shown = torch.where(t == 0.0, cue, torch.where(t == self._delay, float(self._num_cues), -1.0))
        return (self._entries == shown.unsqueeze(1)).to(state.dtype)
