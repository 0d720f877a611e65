"""Running moments, merged by the pairwise formula of Chan, Golub and LeVeque 1979."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Moments = tuple[Tensor, Tensor, Tensor]
"""(count, mean, M2): number of samples, their mean and summed squared deviation from it, float64."""

_CLIP = 10.0
_EPSILON = 1e-8


def moments(samples: Tensor) -> Moments:
    """Moments of `samples` (N, ...) over their first axis; N = 0 gives zeros."""
    samples = samples.double()
    count = torch.tensor(float(samples.shape[0]), dtype=torch.float64)
    mean = samples.sum(0) / max(1, samples.shape[0])
    return count, mean, (samples - mean).square_().sum(0)


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Moments of the union of two disjoint sets of samples."""
    count_a, mean_a, m2_a = first
    count_b, mean_b, m2_b = second
    count = count_a + count_b
    share = count_b / count.clamp_min(1.0)
    delta = mean_b - mean_a
    return count, mean_a + delta * share, m2_a + m2_b + delta.square() * (count_a * share)


class RunningMoments(nn.Module):
    """Mean and variance of everything merged so far; all of it is in buffers, so it travels with the actor's state.

    Nothing moves while acting or learning: only `merge` does. Before the first merge normalising does nothing but clip.
    """

    count: Tensor
    """() float64."""
    mean: Tensor
    """(...) float64."""
    m2: Tensor
    """(...) float64."""
    shift: Tensor
    """(...) float32, the mean; kept beside it because acting cannot afford to derive it."""
    scale: Tensor
    """(...) float32, one over the standard deviation."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def merge(self, other: Moments) -> None:
        """Add samples by their moments, in place."""
        own = (self.count, self.mean, self.m2)
        count, mean, m2 = merge_moments(own, tuple(x.to(self.mean.device) for x in other))  # type: ignore[arg-type]
        if count == 0:
            return
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.m2.copy_(m2)
        self.shift.copy_(mean)
        self.scale.copy_((m2 / count + _EPSILON).rsqrt())

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std within +-10, float32; a new tensor."""
        return ((x - self.shift) * self.scale).clamp_(-_CLIP, _CLIP)
