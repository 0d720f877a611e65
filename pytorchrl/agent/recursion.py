"""Compute returns, advantages and discounted sums by a linear recursion over time. T = number of steps."""

from __future__ import annotations

import numpy as np

_FEW = 8
"""Number of columns up to which a loop over Python floats is faster than one NumPy operation per step."""


def backward_recursion(delta: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Compute x[t] = delta[t] + decay[t] * x[t + 1] with x[T] = 0, backward and in place.

    Args:
        delta: (T, ...) float64; overwritten with the result.
        decay: (T, ...) float64 of the same shape.

    Returns:
        `delta`, which now contains x.
    """
    if delta[0].size <= _FEW:
        for place in np.ndindex(delta.shape[1:]):
            column = (slice(None), *place)
            delta[column] = _recursion(delta[column].tolist(), decay[column].tolist())
        return delta
    rows, decays = list(delta), list(decay)
    for t in range(len(rows) - 2, -1, -1):
        rows[t] += decays[t] * rows[t + 1]
    return delta


def _recursion(delta: list[float], decay: list[float]) -> list[float]:
    for t in range(len(delta) - 2, -1, -1):
        delta[t] += decay[t] * delta[t + 1]
    return delta
