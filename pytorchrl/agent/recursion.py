"""Compute returns, advantages and discounted sums by a linear recursion over time. T = number of steps.

Formulas over whole rollouts are written once for NumPy and torch: rollouts on the CPU are arrays, because NumPy is
faster there, and rollouts on a device are tensors. Both have the same operators, and `functions_for` returns the module
with the functions of the other operations that the formulas need.
"""

from __future__ import annotations

from types import ModuleType
from typing import cast

import numpy as np
import torch
from torch import Tensor

_FEW = 8
"""Number of columns up to which a loop over Python floats is faster than one NumPy operation per step."""


def functions_for(values: np.ndarray | Tensor) -> ModuleType:
    """Return the module with the functions for arrays (numpy) or for tensors (torch)."""
    return np if isinstance(values, np.ndarray) else torch


def as_values(tensor: Tensor) -> np.ndarray:
    """Return a tensor on the CPU as an array that shares its memory; return another tensor as it is.

    The result has the type of an array, because formulas treat both alike.
    """
    return tensor.numpy() if tensor.is_cpu else cast("np.ndarray", tensor)


def as_float64(tensor: Tensor) -> np.ndarray:
    """Return the result of `as_values` in float64."""
    return tensor.numpy().astype(np.float64) if tensor.is_cpu else cast("np.ndarray", tensor.double())


def backward_recursion(delta: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Compute x[t] = delta[t] + decay[t] * x[t + 1] with x[T] = 0, backward and in place.

    Args:
        delta: (T, ...) float64, overwritten with the result; see `as_values`.
        decay: (T, ...) float64 of the same shape.

    Returns:
        `delta`, which now contains x.
    """
    if functions_for(delta) is np and delta[0].size <= _FEW:
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
