"""Compute returns and advantages of a rollout by one backward recursion over T steps of E environments."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.recursion import backward_recursion


def gae(
    rollout: RolloutData, value: Tensor, final_value: Tensor, gamma: float, gae_lambda: float,
    reward: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
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
    values = value.numpy().astype(np.float64)
    delta, goes_on = _errors(rollout, values, final_value, gamma, reward)
    advantage = backward_recursion(delta, (gamma * gae_lambda) * goes_on)
    return advantage.astype(np.float32), (advantage + values[:-1]).astype(np.float32)


def vtrace(  # noqa: PLR0913 - the terms of the formula
    rollout: RolloutData, logp: Tensor, value: Tensor, final_value: Tensor, gamma: float, *, rho_bar: float,
    c_bar: float, vtrace_lambda: float, reward: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
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
    values = value.numpy().astype(np.float64)
    delta, goes_on = _errors(rollout, values, final_value, gamma, reward)
    log_ratio = np.where(rollout.valid.numpy(), logp.numpy().astype(np.float64) - rollout.other["logp"].numpy(), 0.0)
    # Clip first, because exp could overflow.
    rho, c = (np.exp(np.minimum(log_ratio, math.log(limit))) for limit in (rho_bar, c_bar))
    correction = backward_recursion(rho * delta, (gamma * vtrace_lambda) * c * goes_on)
    # The advantage is rho times the following: r + gamma V' - V, plus gamma (v_{t+1} - V_{t+1}) within an episode.
    advantage = delta
    advantage[:-1] += gamma * goes_on[:-1] * correction[1:]
    return (rho * advantage).astype(np.float32), (values[:-1] + correction).astype(np.float32)


def _errors(
    rollout: RolloutData, values: np.ndarray, final_value: Tensor, gamma: float, reward: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the TD errors (T, E), which are 0 in invalid rows, and whether the episode continues after each row.

    The second array, (T, E) bool, is true in valid rows that do not end an episode.
    """
    next_value = values[1:].copy()
    if len(rollout.final_index):
        index = rollout.final_index.numpy()
        next_value[index[:, 0], index[:, 1]] = final_value.numpy()
    terminated, truncated, valid = rollout.terminated.numpy(), rollout.truncated.numpy(), rollout.valid.numpy()
    delta = (rollout.reward.numpy() if reward is None else reward) - values[:-1]
    delta += gamma * np.where(terminated, 0.0, next_value)
    delta[~valid] = 0.0
    return delta, ~(terminated | truncated) & valid
