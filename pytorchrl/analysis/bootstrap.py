"""Estimate confidence intervals of statistics of scores by a stratified bootstrap: runs are resampled within tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pytorchrl.analysis.aggregates import Array, Statistic, check_scores
from pytorchrl.errors import ConfigError

METHODS = ("t", "percentile")
Indices = npt.NDArray[np.intp]
# At most about this many resampled scores are in memory at the same time.
_SCORES_AT_ONCE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic with its confidence interval; `value`, `low` and `high` have the shape of the statistic.

    Attributes:
        value: The statistic of the scores.
        low: Lower end of the interval; NaN if there are fewer than two runs, because one run shows no variation.
        high: Upper end of the interval; NaN in the same case.
    """

    value: Array
    low: Array
    high: Array

    def __format__(self, spec: str) -> str:
        value, low, high = (format(float(number), spec or ".3g") for number in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]" if np.isfinite(self.low) else value

    def as_dict(self) -> dict[str, float]:
        """Return the value and both ends of the interval as floats; the statistic must be a single number."""
        return {"value": float(self.value), "low": float(self.low), "high": float(self.high)}


def estimate(
    statistic: Statistic, *samples: npt.ArrayLike, confidence: float = 0.95, method: str = "t", paired: bool = False,
    bounds: tuple[float, float] = (-np.inf, np.inf), resamples: int = 2000, seed: int = 0,
) -> Estimate:
    """Return a statistic of scores and its confidence interval.

    A resample draws, for each task, as many runs as the task has, with replacement and independently of other tasks.
    The statistic is computed for all resamples.

    - `method="percentile"`: The interval lies between two quantiles of the resampled statistics. With few runs, this
      interval is too short, for two reasons: with n runs, the variance of the resampled statistics is too small by the
      factor (n - 1) / n, and the quantiles ignore that this variance is itself an estimate.
    - `method="t"`: The interval is the statistic plus and minus the standard error times a quantile of Student's t
      distribution. The squared standard error is the variance of the resampled statistics, multiplied by n / (n - 1).
      The degrees of freedom follow from the contribution of each task to this variance (Satterthwaite's formula). A
      task's contribution is a sum over its runs. Each run adds the squared covariance between the resampled statistic
      and the number of times that the run was drawn (the infinitesimal jackknife; Efron, "Estimation and accuracy after
      model selection", 2014). For the mean of one task, the result is the interval of the t test.

    Args:
        statistic: A function that reduces the last two axes of its arguments, such as `iqm`.
        samples: One or more arrays of shape (..., runs, tasks), the arguments of the statistic. Leading axes contain
            other scores of the same runs, such as points of a learning curve. Only one array may have leading axes.
        confidence: Probability that the interval contains the true value, in (0, 1).
        method: "t" or "percentile".
        paired: Whether each resample draws the same run indices from all arrays. Use True if run `i` has the same
            seed in all arrays. The arrays must then have the same number of runs.
        bounds: The smallest and largest possible value of the statistic; the ends of the interval are clipped to them.
        resamples: Number of resamples.
        seed: Seed of the resampling.

    Raises:
        ConfigError: An argument is wrong.
    """
    arrays = [check_scores(sample) for sample in samples]
    _check(arrays, confidence, method, paired, resamples)
    value = statistic(*arrays)
    if min(array.shape[-2] for array in arrays) < 2:
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    draws = _draws(arrays, resamples, np.random.default_rng(seed), paired=paired)
    drawn = _statistics(statistic, arrays, draws)
    tail = (1.0 - confidence) / 2
    if method == "percentile":
        low, high = np.quantile(drawn, [tail, 1.0 - tail], axis=0)
    else:
        half = _half_width(drawn, draws[:1] if paired else draws, tail)
        low, high = value - half, value + half
    return Estimate(value, np.asarray(np.clip(low, *bounds)), np.asarray(np.clip(high, *bounds)))


def _check(arrays: Sequence[Array], confidence: float, method: str, paired: bool, resamples: int) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be between 0 and 1, such as 0.95; got {confidence!r}")
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if resamples < 100:
        raise ConfigError(f"resamples must be at least 100, better 2000; got {resamples!r}")
    shapes = {array.shape[-2:] for array in arrays}
    if paired and len(shapes) > 1:
        raise ConfigError(f"paired samples must have the same runs and tasks, got the shapes {sorted(shapes)}; "
                          "pass paired=False")
    if len({tasks for _, tasks in shapes}) > 1:
        raise ConfigError(f"samples must have the same tasks, got the shapes (runs, tasks) {sorted(shapes)}")


def _draws(arrays: Sequence[Array], resamples: int, rng: np.random.Generator, *, paired: bool) -> list[Indices]:
    """Return, for each array, the indices of the drawn runs; shape (resamples, runs, tasks)."""
    shapes = [array.shape[-2:] for array in arrays]
    if paired:
        return [rng.integers(shapes[0][0], size=(resamples, *shapes[0]), dtype=np.intp)] * len(arrays)
    return [rng.integers(shape[0], size=(resamples, *shape), dtype=np.intp) for shape in shapes]


def _statistics(statistic: Statistic, arrays: Sequence[Array], draws: Sequence[Indices]) -> Array:
    """Return the statistic of each resample; shape (resamples, ...)."""
    step = max(1, _SCORES_AT_ONCE // max(array.size for array in arrays))
    found = []
    for start in range(0, len(draws[0]), step):
        taken = []
        for array, indices in zip(arrays, draws, strict=True):
            chunk = indices[start:start + step]
            chunk = chunk.reshape(len(chunk), *(1,) * (array.ndim - 2), *chunk.shape[1:])
            taken.append(np.take_along_axis(array[None], chunk, axis=-2))
        found.append(statistic(*taken))
    return np.concatenate(found)


def _half_width(drawn: Array, draws: Sequence[Indices], tail: float) -> Array:
    """Return half the width of the t interval.

    Args:
        drawn: The statistic of each resample; shape (resamples, ...).
        draws: Indices of the drawn runs, (resamples, runs, tasks): one entry for each array of scores, or a single
            entry for all arrays if they are paired.
        tail: The probability of each of the two tails.
    """
    from scipy import stats
    count = len(drawn)
    centred = (drawn - drawn.mean(axis=0)).reshape(count, -1)
    variance = (centred**2).mean(axis=0)
    raw, corrected, squares = 0.0, 0.0, 0.0
    for indices in draws:
        runs = indices.shape[1]
        parts = np.zeros((indices.shape[2], centred.shape[1]))  # the contribution of each task to the variance
        for run in range(runs):
            times = (indices == run).sum(axis=1, dtype=np.float64)
            parts += ((times - times.mean(axis=0)).T @ centred / count)**2
        # The number of resamples is finite, so the covariances are noisy, and their squares are too large on average.
        # Subtract this bias.
        parts = np.maximum(parts - (runs - 1) * variance / count, 0.0)
        scaled = parts * runs / (runs - 1)
        raw = raw + parts.sum(axis=0)
        corrected = corrected + scaled.sum(axis=0)
        squares = squares + (scaled**2 / (runs - 1)).sum(axis=0)
    few = min(indices.shape[1] for indices in draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(raw > 0, corrected / raw, few / (few - 1))
        freedom = np.where(squares > 0, corrected**2 / squares, few - 1)
    half = stats.t.isf(tail, freedom) * np.sqrt(variance * factor)
    return np.asarray(half).reshape(drawn.shape[1:])
