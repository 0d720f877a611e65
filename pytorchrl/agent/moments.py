"""Merge moments of separate sets of samples by the pairwise formula of Chan, Golub and LeVeque (1979)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from pytorchrl.support.untyped import Numeric

Moments = tuple[Numeric, Numeric, Numeric]
"""(count, mean, M2): number of samples, mean and sum of squared deviations; numbers, or float64 tensors."""


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Return the moments of the union of two disjoint sets of samples; either set may be empty."""
    count_a, mean_a, m2_a = first
    count_b, mean_b, m2_b = second
    count = count_a + count_b
    share = count_b / max(count, 1)
    delta = mean_b - mean_a
    return count, mean_a + delta * share, m2_a + m2_b + delta * delta * (count_a * share)


def joint_moments(parts: Iterable[Moments]) -> Moments:
    """Return the moments of the union of one or more disjoint sets of samples, merged in the order of `parts`."""
    return functools.reduce(merge_moments, parts)


def mean_and_std(parts: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation of the union of several sets; both are 0 without samples.

    Args:
        parts: Moments (count, mean, M2) of each set, merged in this order; M2 is the sum of squared deviations.
    """
    count, mean, squares = functools.reduce(merge_moments, parts, (0, 0.0, 0.0))
    return mean, math.sqrt(squares / max(1, count - 1))
