"""The squashed Gaussian, the distribution of tanh(u) for normal u: Haarnoja et al. 2018 (SAC), appendix C.

D = dimensions of an action.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytorchrl.agent.noise import NoiseSource, standard_normal

LOG_STD_BOUNDS = ("clip", "tanh")
"""Methods of bounding log standard deviations; see `bound_log_std`."""

LOG_STD_CLIP = (-20.0, 2.0)
"""Bounds of log standard deviations with the method "clip"."""

_TANH = (-5.0, 2.0)
_LARGEST = 0.999
"""Largest magnitude of a given action for which the density is computed; a learned mean stays within atanh(0.999)."""
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def bound_log_std(outputs: Tensor, bound: str) -> Tensor:
    """Return log standard deviations from a network's outputs: clipped to [-20, 2], or mapped by tanh into [-5, 2]."""
    if bound == "clip":
        return outputs.clamp(*LOG_STD_CLIP)
    low, high = _TANH
    return low + 0.5 * (high - low) * (torch.tanh(outputs) + 1)


def squashed_log_prob(noise: Tensor, u: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-density (...,) of tanh(u), where u = mean + exp(log_std) * noise; all arguments are (..., D).

    The log-density is log N(u) - log(1 - tanh(u)^2), summed over the D dimensions. The logarithm of 1 - tanh(u)^2 is
    computed as 2 (log 2 - |u| - log(1 + exp(-2 |u|))), which is accurate even for large |u|.
    """
    size = u.abs()
    # `log(1 + x)` is faster than `log1p(x)`. Its rounding error, at most 6e-8, is small compared to the other terms.
    log_slope = 2 * (math.log(2) - size - (1 + (-2 * size).exp()).log())
    return -(0.5 * noise.square() + log_std + _HALF_LOG_TWO_PI + log_slope).sum(-1)


def squashed_draw(mean: Tensor, log_std: Tensor, generator: NoiseSource | None) -> tuple[Tensor, Tensor]:
    """Draw u (..., D), differentiable in mean and log_std (..., D); return u and its noise. The action is tanh(u)."""
    noise = standard_normal(mean, generator)
    return mean + log_std.exp() * noise, noise


def squashed_sample(mean: Tensor, log_std: Tensor, generator: NoiseSource | None) -> tuple[Tensor, Tensor]:
    """Draw actions (..., D); return them and their log-densities (...,), both differentiable in mean and log_std."""
    u, noise = squashed_draw(mean, log_std, generator)
    return torch.tanh(u), squashed_log_prob(noise, u, log_std)


def squashed_log_prob_of(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-densities (...,) of given actions in [-1, 1], differentiable in mean and log_std.

    All arguments are (..., D). The density of an action at a bound, where u is infinite, is that of an action at a
    distance of 0.001 from it.
    """
    u = torch.atanh(action.clamp(-_LARGEST, _LARGEST))
    return squashed_log_prob((u - mean) * (-log_std).exp(), u, log_std)
