"""Compute returns and advantages of a rollout by one backward recursion over T steps of E environments."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.recursion import as_float64, as_values, backward_recursion, functions_for

Estimates = tuple[np.ndarray, np.ndarray] | tuple[Tensor, Tensor]
"""Advantages and returns, (T, E) float32 each: arrays or, for a rollout on a device, tensors there."""


def gae(
    rollout: RolloutData, value: Tensor, final_value: Tensor, gamma: float, gae_lambda: float,
    reward: np.ndarray | Tensor | None = None,
) -> Estimates:
    """Return generalized advantage estimates (Schulman et al. 2016, eq. 16), computed in float64.

    A transition bootstraps from its true next observation. This is the transition's entry in `final_obs` if there is
    one, and otherwise row t + 1. (In gymnasium's autoreset mode NEXT_STEP, `final_obs` is not needed, because row t + 1
    is the last observation of the episode.) A termination removes the bootstrap, a time limit keeps it, and both stop
    the recursion. Invalid rows have advantage 0 and stop the recursion.

    Args:
        rollout: T transitions of E environments.
        value: (T + 1, E) V(o_t).
        final_value: (K,) V of `rollout.final_obs`.
        gamma: Discount, in [0, 1].
        gae_lambda: Bias-variance trade-off, in [0, 1].
        reward: (T, E) rewards to use instead of `rollout.reward`.

    Returns:
        Advantages and returns (advantage + value), (T, E) float32 each, not normalized.
    """
    values = as_float64(value)
    delta, goes_on = _errors(rollout, values, final_value, gamma, reward)
    advantage = backward_recursion(delta, (gamma * gae_lambda) * goes_on)
    return _narrow(advantage, advantage + values[:-1])


def continuing_gae(
    rollout: RolloutData, reward: Tensor, value: Tensor, gamma: float, gae_lambda: float,
) -> Estimates:
    """Return generalized advantage estimates as if episodes never ended: Burda et al. 2019 (RND), section 2.3.

    The next value of a valid row is that of the next valid row, even if it belongs to another episode, or that of the
    last row of observations. Invalid rows are skipped: the recursion goes on over them.

    Args:
        rollout: T transitions of E environments.
        reward: (T, E) rewards.
        value: (T + 1, E) values of the observations.
        gamma: Discount, in [0, 1].
        gae_lambda: Bias-variance trade-off, in [0, 1].

    Returns:
        Advantages and returns (advantage + value), (T, E) float32 each; those of invalid rows have no meaning.
    """
    values, valid = as_float64(value), as_values(rollout.valid)
    xp = functions_for(values)
    one, next_value = xp.ones_like(values[1:]), values[1:]
    # Where the row t + 1 is invalid, the next value is that of a later row.
    has_next = xp.concatenate([valid[1:], xp.ones_like(valid[:1])])
    next_value = backward_recursion(xp.where(has_next, next_value, 0.0), xp.where(has_next, 0.0 * one, one))
    delta = xp.where(valid, as_float64(reward) + gamma * next_value - values[:-1], 0.0)
    advantage = backward_recursion(delta, xp.where(valid, gamma * gae_lambda * one, one))
    return _narrow(advantage, advantage + values[:-1])


def vtrace(  # noqa: PLR0913 - the terms of the formula
    rollout: RolloutData, logp: Tensor, value: Tensor, final_value: Tensor, gamma: float, *, rho_bar: float,
    c_bar: float, vtrace_lambda: float, reward: np.ndarray | Tensor | None = None,
) -> Estimates:
    """Return V-trace advantages and targets (Espeholt et al. 2018, eq. 1 and section 4.2), computed in float64.

    With rho = min(rho_bar, pi / mu) and c = vtrace_lambda * min(c_bar, pi / mu), where mu is the policy that acted:
    v_t = V_t + rho_t (r_t + gamma V'_t - V_t) + gamma c_t (v_{t+1} - V_{t+1}), and the advantage is
    rho_t (r_t + gamma v_{t+1} - V_t). Ends of episodes are treated as in `gae`: V' is the value of the true next
    observation, or 0 after a termination. At the end of an episode, the term with c_t is left out, and V'_t replaces
    v_{t+1}.

    Args:
        rollout: T transitions of E environments, with the log-probabilities of mu as `other["logp"]` (T, E).
        logp: (T, E) log-probabilities of the same actions under the learned policy pi.
        value: (T + 1, E) V(o_t).
        final_value: (K,) V of `rollout.final_obs`.
        gamma: Discount, in [0, 1].
        rho_bar: Largest weight of a temporal difference; it determines the policy whose values are learned.
        c_bar: Largest weight of corrections from later steps; it determines the speed of convergence.
        vtrace_lambda: Bias-variance trade-off, in [0, 1].
        reward: (T, E) rewards to use instead of `rollout.reward`.

    Returns:
        Advantages and targets v, (T, E) float32 each. Invalid rows have advantage 0 and target V.
    """
    values = as_float64(value)
    xp = functions_for(values)
    delta, goes_on = _errors(rollout, values, final_value, gamma, reward)
    log_ratio = xp.where(as_values(rollout.valid), as_float64(logp) - as_values(rollout.other["logp"]), 0.0)
    # Clip first, because exp could overflow.
    rho, c = (xp.exp(xp.clip(log_ratio, None, math.log(limit))) for limit in (rho_bar, c_bar))
    correction = backward_recursion(rho * delta, (gamma * vtrace_lambda) * c * goes_on)
    # The advantage is rho times the following: r + gamma V' - V, plus gamma (v_{t+1} - V_{t+1}) within an episode.
    advantage = delta
    advantage[:-1] += gamma * goes_on[:-1] * correction[1:]
    return _narrow(rho * advantage, values[:-1] + correction)


def _errors(
    rollout: RolloutData, values: np.ndarray, final_value: Tensor, gamma: float, reward: np.ndarray | Tensor | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the TD errors (T, E), which are 0 in invalid rows, and 1 where the episode continues after a row, else 0.

    The second array, (T, E), is 1 in valid rows that do not end an episode. Both are float64, because a product of a
    number and flags would be float32 in torch.
    """
    xp, next_value = functions_for(values), values[1:]
    if len(rollout.final_index):
        index = as_values(rollout.final_index)
        next_value = xp.concatenate([next_value])  # a copy
        next_value[index[:, 0], index[:, 1]] = as_float64(final_value)
    terminated, truncated, valid = as_values(rollout.terminated), as_values(rollout.truncated), as_values(rollout.valid)
    delta = (as_values(rollout.reward) if reward is None else reward) - values[:-1]
    delta += gamma * xp.where(terminated, 0.0, next_value)
    return xp.where(valid, delta, 0.0), xp.where(~(terminated | truncated) & valid, xp.ones_like(delta), 0.0)


def _narrow(first: np.ndarray, second: np.ndarray) -> Estimates:
    """Return two results in float32."""
    if functions_for(first) is np:
        return first.astype(np.float32), second.astype(np.float32)
    return cast("Tensor", first).float(), cast("Tensor", second).float()
