"""Summarize scores of several runs on several tasks by one number.

Scores are arrays of shape (..., runs, tasks). A one-dimensional array contains the runs of one task. Statistics
reduce the last two axes. The leading axes may count resamples, so that one call computes a statistic for all resamples.
All statistics except the median, the mean and the area under a curve are from Agarwal et al., "Deep reinforcement
learning at the edge of the statistical precipice" (NeurIPS 2021).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pytorchrl.errors import ConfigError

Array = npt.NDArray[np.float64]
Statistic = Callable[..., Array]
"""A function of one or more arrays of shape (..., runs, tasks), which reduces the last two axes."""


def check_scores(scores: npt.ArrayLike, name: str = "scores") -> Array:
    """Return scores as a float64 array of shape (..., runs, tasks).

    Raises:
        ConfigError: There are no scores, or the scores are not a rectangular array of finite numbers.
    """
    try:
        array = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be an array of numbers of shape (runs, tasks), with the same number of runs "
                          f"for each task; got {type(scores).__name__}") from None
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim < 2 or 0 in array.shape:
        raise ConfigError(f"{name} must have the shape (runs, tasks), with at least one of each; got {array.shape}")
    if not np.isfinite(array).all():
        raise ConfigError(f"{name} must be finite, got {array[~np.isfinite(array)][0]}; leave out the runs that failed "
                          "only if you report their number")
    return array


def iqm(scores: npt.ArrayLike) -> Array:
    """Return the interquartile mean: the mean of the middle half of all scores.

    Of `N` scores of all runs and tasks, the lowest `N // 4` and the highest `N // 4` are left out.

    Args:
        scores: Array of shape (..., runs, tasks).

    Returns:
        Array of shape (...).
    """
    from scipy import stats
    array = check_scores(scores)
    trimmed = stats.trim_mean(array.reshape(*array.shape[:-2], -1), proportiontocut=0.25, axis=-1)
    return np.asarray(trimmed, dtype=np.float64)


def mean(scores: npt.ArrayLike) -> Array:
    """Return the mean over runs and tasks: scores of shape (..., runs, tasks) give a result of shape (...).

    Examples:
        >>> float(mean([[1.0, 2.0], [3.0, 4.0]]))
        2.5
    """
    return np.asarray(check_scores(scores).mean(axis=(-2, -1)))


def median(scores: npt.ArrayLike) -> Array:
    """Return the median over tasks of the mean over runs; for a single task, return the median over runs.

    A single task is an exception, because the median over one task would be the mean over its runs.

    Args:
        scores: Array of shape (..., runs, tasks).

    Returns:
        Array of shape (...).
    """
    array = check_scores(scores)
    if array.shape[-1] == 1:
        return np.asarray(np.median(array[..., 0], axis=-1))
    return np.asarray(np.median(array.mean(axis=-2), axis=-1))


def optimality_gap(scores: npt.ArrayLike, target: float = 1.0) -> Array:
    """Return the mean amount by which scores fall short of a target; scores above the target count as the target.

    Args:
        scores: Array of shape (..., runs, tasks), usually of normalized scores.
        target: The score that is good enough.

    Returns:
        Array of shape (...), at least 0; smaller is better.
    """
    return np.asarray(target - np.minimum(check_scores(scores), target).mean(axis=(-2, -1)))


def performance_profile(scores: npt.ArrayLike, thresholds: npt.ArrayLike) -> Array:
    """Return the fraction of scores above each threshold.

    Args:
        scores: Array of shape (..., runs, tasks).
        thresholds: Array of shape (thresholds,).

    Returns:
        Array of shape (..., thresholds).
    """
    array = check_scores(scores)
    return np.stack([(array > limit).mean(axis=(-2, -1)) for limit in np.atleast_1d(thresholds)], axis=-1)


def probability_of_improvement(scores: npt.ArrayLike, baseline: npt.ArrayLike) -> Array:
    """Return the probability that a run has a higher score than a run of the baseline, averaged over tasks.

    Each run is compared with each run of the baseline on the same task; a tie counts as one half. For one task, this is
    the Mann-Whitney U statistic divided by the number of pairs.

    Args:
        scores: Array of shape (..., runs, tasks).
        baseline: Array of shape (..., runs of the baseline, tasks).

    Returns:
        Array of shape (...), between 0 and 1.

    Raises:
        ConfigError: The numbers of tasks differ, or an array is not valid.

    Examples:
        >>> float(probability_of_improvement([[2.0], [4.0]], [[1.0], [3.0]]))
        0.75
    """
    first, second = check_scores(scores), check_scores(baseline, "baseline")
    if first.shape[-1] != second.shape[-1]:
        raise ConfigError(f"scores and baseline must have the same tasks, got {first.shape[-1]} and "
                          f"{second.shape[-1]} tasks")
    gaps = np.sign(first[..., :, None, :] - second[..., None, :, :])
    return np.asarray((0.5 + 0.5 * gaps).mean(axis=(-3, -2, -1)))


def difference(statistic: Statistic) -> Statistic:
    """Return a statistic of two arrays of scores: the value for the first array minus the value for the second."""
    return functools.partial(_difference, statistic)


def _difference(statistic: Statistic, scores: Array, baseline: Array) -> Array:
    return statistic(scores) - statistic(baseline)


def area_under_curve(x: npt.ArrayLike, y: npt.ArrayLike, end: float | None = None) -> float:
    """Return the mean of a learning curve: the area under the curve, divided by the width of the curve.

    The curve is linear between its points (trapezoidal rule).

    Args:
        x: Positions, such as env steps; shape (points,), non-decreasing.
        y: Values, such as returns; shape (points,).
        end: Position at which the area ends; None: the last position.

    Raises:
        ConfigError: `x` has fewer than two distinct values or decreases, or `end` is not in (x[0], x[-1]].
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if xs.ndim != 1 or xs.shape != ys.shape or len(xs) < 2 or (np.diff(xs) < 0).any() or xs[0] == xs[-1]:
        raise ConfigError("a curve needs at least two points (x, y), and x must increase; got arrays of shapes "
                          f"{xs.shape} and {ys.shape}")
    end = float(xs[-1]) if end is None else end
    if not xs[0] < end <= xs[-1]:
        raise ConfigError(f"end must be above {xs[0]:g} and at most {xs[-1]:g}, the last position; got {end:g}")
    inside = xs < end
    xs, ys = np.append(xs[inside], end), np.append(ys[inside], np.interp(end, xs, ys))
    return float(np.sum(np.diff(xs) * (ys[1:] + ys[:-1])) / 2 / (xs[-1] - xs[0]))


def normalize(scores: npt.ArrayLike, references: Sequence[tuple[float, float]]) -> Array:
    """Return scores that are rescaled linearly for each task: the low reference becomes 0, and the high reference 1.

    Args:
        scores: Array of shape (..., runs, tasks).
        references: (low, high) for each task, such as the scores of a random policy and of a human.

    Raises:
        ConfigError: The numbers of references and tasks differ, or a low reference is not below the high reference.
    """
    array, bounds = check_scores(scores), np.asarray(references, dtype=np.float64)
    if bounds.shape != (array.shape[-1], 2) or not (bounds[:, 0] < bounds[:, 1]).all():
        raise ConfigError(f"references must be one pair (low, high), with low < high, for each of the "
                          f"{array.shape[-1]} tasks; got {references}")
    return (array - bounds[:, 0]) / (bounds[:, 1] - bounds[:, 0])


STATISTICS: Mapping[str, Statistic] = {"iqm": iqm, "median": median, "mean": mean}
"""Name of a statistic on the command line -> function that computes it."""
