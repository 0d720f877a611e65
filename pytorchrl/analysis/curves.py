"""Summarize the learning curves of several runs by one curve, with a confidence interval at each position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytorchrl.analysis.aggregates import Array, Statistic, iqm
from pytorchrl.analysis.bootstrap import Estimate, estimate
from pytorchrl.errors import ConfigError

# A constant stretch that is longer than this multiple of the median length is a plateau; see `without_steps`.
_PLATEAU = 5.0

Curve = tuple[Sequence[float], Sequence[float]]
"""Positions, such as env steps, in increasing order, and the values at these positions."""


def on_grid(curves: Sequence[Curve], points: int = 200) -> tuple[Array, Array]:
    """Interpolate curves linearly at common positions.

    The positions are evenly spaced where all curves have values; no curve is extrapolated.

    Args:
        curves: The curves.
        points: Number of positions.

    Returns:
        Positions of shape (points,), and values of shape (points, curves). If the curves have
        only one position in common, only this position is returned.

    Raises:
        ConfigError: There is no position at which all curves have values.
    """
    start, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    if start > end:
        raise ConfigError(f"the curves do not overlap: one begins at {start:g}, and another ends at {end:g}; leave out "
                          "the short run")
    grid = np.unique(np.linspace(start, end, points))
    return grid, np.stack([np.interp(grid, xs, ys) for xs, ys in curves], axis=-1)


def without_steps(curve: Curve) -> Curve:
    """Return a curve without records that only repeat the previous value.

    The mean return stays the same until the next episode ends, so a curve of mean returns has stretches of constant
    value. Only the first record of each stretch is kept. If a stretch is longer than five times the median length, its
    last record is kept, too, because such a plateau is real, for example at the highest possible return. The last
    record of the curve is always kept.
    """
    xs, ys = np.asarray(curve[0], dtype=np.float64), np.asarray(curve[1], dtype=np.float64)
    changes = np.flatnonzero(np.diff(ys)) + 1
    first, last = np.append(0, changes), np.append(changes - 1, len(ys) - 1)
    lengths = np.diff(np.append(xs[first], xs[-1]))
    is_long = lengths > _PLATEAU * np.median(lengths)
    is_long[-1] = True
    kept = np.unique(np.concatenate([first, last[is_long]]))
    return xs[kept].tolist(), ys[kept].tolist()


def smooth(values: Array, window: float) -> Array:
    """Return centred moving means of values on a grid.

    Args:
        values: Array of shape (points, ...).
        window: Width of the window as a fraction of all points, from 0 (no smoothing) to below 1. Near both ends
            of the grid, the window is narrower, but still symmetric, so the first and the last value do not change.

    Raises:
        ConfigError: `window` is out of range.
    """
    if not 0 <= window < 1:
        raise ConfigError("the smoothing window must be a fraction of the curve, at least 0 and below 1; got "
                          f"{window!r}")
    count, reach = len(values), int(window * len(values) / 2)
    sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    at = np.arange(count)
    half = np.minimum(reach, np.minimum(at, count - 1 - at))
    sizes = (2 * half + 1).reshape(-1, *(1,) * (values.ndim - 1))
    return np.asarray((sums[at + half + 1] - sums[at - half]) / sizes)


def summarize_curves(
    curves: Sequence[Curve], *, statistic: Statistic = iqm, smoothing: float = 0.0, confidence: float = 0.95,
    points: int = 200,
) -> tuple[Array, Estimate]:
    """Return a statistic of several curves at common positions, with a confidence interval at each position.

    First, `without_steps` removes repeated values from each curve. The curve is then interpolated at the positions, and
    smoothed.

    Args:
        curves: The curves of runs of one task.
        statistic: A statistic such as `iqm`.
        smoothing: Width of the window in which each curve is smoothed; see `smooth`.
        confidence: Confidence level of the interval at each position; it does not hold for the curve as a whole.
        points: Number of positions.

    Returns:
        Positions of shape (points,), and an estimate whose value, low and high have this shape, too.
    """
    grid, values = on_grid([without_steps(curve) for curve in curves], points)
    return grid, estimate(statistic, smooth(values, smoothing)[..., None], confidence=confidence)
