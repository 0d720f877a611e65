"""Running moments with which an actor normalizes observations and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.moments import Moments, joint_moments, merge_moments
from pytorchrl.agent.recursion import as_float64, as_values, backward_recursion, functions_for
from pytorchrl.agent.transfers import on_device, on_host

_CLIP = 10.0
_PART_BYTES = 2**25
"""Largest number of bytes, in float64, of the samples whose moments are computed at once."""
_EPSILON = 1e-8
_WIDE = (torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64)
"""Dtypes with numbers that float32 cannot represent exactly."""


def moments(samples: Tensor) -> Moments:
    """Return (count, mean, M2) of `samples` (N, ...) over the first axis, float64 on the CPU; all are 0 if N = 0.

    M2 is the sum of squared deviations from the mean. Many samples are divided into parts of at most `_PART_BYTES`.
    """
    parts = torch.split(samples, max(1, _PART_BYTES // (8 * math.prod(samples.shape[1:]))))
    return joint_moments(map(_moments_of_part, parts))


def _moments_of_part(samples: Tensor) -> Moments:
    samples = samples.double()
    count = torch.tensor(float(samples.shape[0]), dtype=torch.float64)
    mean = samples.sum(0) / max(1, samples.shape[0])
    mean, m2 = on_host(mean, (samples - mean).square_().sum(0))
    return count, mean, m2


def discounted_sums(rollout: RolloutData, gamma: float, running: np.ndarray) -> np.ndarray:
    """Return the discounted sums G_t = gamma * G_{t-1} + r_t; after an episode ends, G is reset to 0.

    The actor divides rewards by the standard deviation of these sums.

    Args:
        rollout: T transitions of E environments.
        gamma: Discount.
        running: (E,) float64, G before the first row (zeros before the first rollout); updated in place to G after the
            last row. For a rollout on a device, it is a tensor there, and so is the result.

    Returns:
        (T, E) float64; where a transition is not valid, the previous G is repeated.
    """
    ended, valid = as_values(rollout.terminated | rollout.truncated), as_values(rollout.valid)
    reward, xp = as_float64(rollout.reward), functions_for(valid)
    # The recursion runs backward in time.
    sums = xp.flip(xp.where(valid, reward, 0.0), (0,))
    decay = xp.flip(xp.where(valid, gamma, xp.ones_like(reward)), (0,))
    sums[-1] += decay[-1] * running
    decay[:-1] = xp.where(xp.flip(ended[:-1], (0,)), 0.0, decay[:-1])
    sums = xp.flip(backward_recursion(sums, decay), (0,))
    running[:] = xp.where(ended[-1], 0.0, sums[-1])
    return sums


class RunningMoments(nn.Module):
    """Mean and variance of all merged samples, stored in buffers, so that they are part of the actor's state.

    Only `merge` changes the moments; acting and learning do not. Before the first merge, `normalize` only clips.
    """

    count: Tensor
    """() float64, number of samples."""
    mean: Tensor
    """(...) float64, mean of the samples."""
    m2: Tensor
    """(...) float64, sum of squared deviations from the mean."""
    shift: Tensor
    """(...) float32, a copy of the mean, because converting the mean at each step would slow down acting."""
    scale: Tensor
    """(...) float32, 1 / standard deviation."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def merge(self, other: Moments) -> None:
        """Merge the moments of new samples in place."""
        count, mean, m2, *(more, their_mean, their_m2) = on_host(self.count, self.mean, self.m2, *other)
        count, mean, m2 = merge_moments((count, mean, m2), (more, their_mean, their_m2))
        if count == 0:
            return
        merged = {self.count: count, self.mean: mean, self.m2: m2, self.shift: mean,
                  self.scale: (m2 / count + _EPSILON).rsqrt()}
        for buffer, value in merged.items():
            buffer.copy_(on_device(value, buffer.device))

    def normalize(self, x: Tensor, limit: float = _CLIP) -> Tensor:
        """Return (x - mean) / std, clipped to [-limit, limit], as a new float32 tensor.

        Dtypes with values that float32 cannot represent exactly (`_WIDE`) are normalized in float64.
        """
        if x.dtype in _WIDE:
            return ((x - self.mean) * self.scale).clamp_(-limit, limit).float()
        if x.dtype is torch.bool:  # torch cannot subtract from a bool tensor
            x = x.float()
        return ((x - self.shift) * self.scale).clamp_(-limit, limit)

    def in_numpy(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that normalizes float32 arrays as `normalize` does, with bit-identical results.

        The arrays have the shape (B, ...), where ... is the shape of the buffers. The function shares memory with the
        buffers on the CPU, so it always uses the current moments.
        """
        shift, scale = self.shift.numpy(), self.scale.numpy()

        def normalize(x: np.ndarray) -> np.ndarray:
            x = x - shift
            x *= scale
            np.maximum(x, -_CLIP, out=x)
            return np.minimum(x, _CLIP, out=x)

        return normalize
