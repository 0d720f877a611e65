"""The dual of MPO's E-step and the divergences of its M-step: Abdolmaleki et al. 2018 (arXiv:1806.06920).

B = observations, M = actions per observation, with prior probabilities p_j. The weights of the actions are proportional
to p_j exp(q_j / eta), where q_j is the value of an action, and eta the temperature.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def dual(eta: Tensor, q: Tensor, prior: Tensor, constraint: float) -> Tensor:
    """Return the dual of the E-step: eta * constraint + eta * mean_o log sum_j p_j exp(q_j / eta), eq. 9.

    Args:
        eta: Temperature ().
        q: Values (M, B).
        prior: Log-probabilities log p_j, (M, B).
        constraint: Bound of the divergence of the weights p_j exp(q_j / eta) from p_j.
    """
    return eta * (constraint + torch.logsumexp(prior + q / eta, 0).mean())


def best_temperature(q: np.ndarray, prior: np.ndarray, constraint: float) -> float:
    """Return the eta that minimizes `dual`, at which the divergence of the weights equals the constraint.

    The dual is convex, and its derivative is the constraint minus the divergence, which falls as eta rises. If the
    divergence is below the constraint for each eta, as for equal values, the result is tiny. See `dual` for arguments.
    """
    from scipy.optimize import brentq

    def excess(log_eta: float) -> float:
        scaled = q / math.exp(log_eta)
        largest = (prior + scaled).max(0)
        weights = np.exp(prior + scaled - largest)
        total = weights.sum(0)
        return float(((weights / total * scaled).sum(0) - largest - np.log(total)).mean()) - constraint

    # By Hoeffding's lemma, the divergence is at most (span / eta)^2 / 8.
    span = float((q.max(0) - q.min(0)).max())
    high = math.log(max(1.001 * span / math.sqrt(8 * constraint), 1e-8))
    low = high - 25.0
    return math.exp(brentq(excess, low, high, xtol=1e-9) if excess(low) > 0 > excess(high) else low)


def gaussian_divergences(
    old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return how far a Gaussian has moved from an old one, with each dimension by itself (appendix D.3).

    Args:
        old_mean: Means of the old Gaussian, (B, D).
        old_log_std: Log standard deviations of the old Gaussian, (B, D).
        mean: New means, (B, D).
        log_std: New log standard deviations, (B, D).

    Returns:
        KL(old || N(mean, old std)) and KL(old || N(old mean, std)), each (D,), the mean over B observations.
    """
    change = log_std - old_log_std
    of_means = 0.5 * ((mean - old_mean) / old_log_std.exp()).square()
    return of_means.mean(0), (change + 0.5 * (-2 * change).exp() - 0.5).mean(0)


def inverse_softplus(value: float) -> float:
    """Return the number whose softplus, log(1 + exp(x)), is `value` > 0; a large value does not overflow."""
    return value + math.log(-math.expm1(-value))
