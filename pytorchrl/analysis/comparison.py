"""Compare two sets of runs, and compute the number of seeds that a comparison needs."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import numpy.typing as npt

from pytorchrl.analysis.aggregates import (
    Array,
    Statistic,
    check_scores,
    difference,
    iqm,
    mean,
    probability_of_improvement,
)
from pytorchrl.analysis.bootstrap import Estimate, estimate
from pytorchrl.errors import ConfigError

_MOST_SEEDS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        paired: Whether runs with equal seeds were compared with each other.
        difference: The statistic of the scores minus that of the baseline.
        mean_difference: The mean of the scores minus the mean of the baseline.
        improvement: The probability of improvement over the baseline.
        p_value: p-value of a two-sided t test of equal means: the paired test if `paired`, otherwise Welch's test. Each
            run provides one sample: the mean of the run's scores over the tasks. NaN if `scores` or `baseline` has
            fewer than two runs, or if the samples (if `paired`, their differences) do not vary.
        seeds_needed: The number of seeds with which a t test would detect the measured difference of the means with a
            probability of 80 %. None if `p_value` is NaN, the means are equal, or more than a million seeds are needed.
    """

    paired: bool
    difference: Estimate
    mean_difference: Estimate
    improvement: Estimate
    p_value: float
    seeds_needed: int | None


def compare(
    scores: npt.ArrayLike, baseline: npt.ArrayLike, *, statistic: Statistic = iqm, paired: bool = False,
    confidence: float = 0.95, method: str = "t", resamples: int = 2000, seed: int = 0,
) -> Comparison:
    """Compare the scores of two sets of runs on the same tasks.

    Args:
        scores: Array of shape (runs, tasks).
        baseline: Array of shape (runs of the baseline, tasks).
        statistic: The statistic whose difference is estimated.
        paired: Whether row `i` of both arrays has the same seed. If so, runs are resampled and tested in pairs. Pairing
            makes intervals shorter if equal seeds lead to similar scores.
        confidence: The confidence level of the intervals: the fraction of intervals that would contain the true value
            if the experiment were repeated many times.
        method: "t" or "percentile"; see `estimate`.
        resamples: Number of resamples of the bootstrap.
        seed: Seed of the bootstrap.

    Raises:
        ConfigError: The arrays have different tasks; or `paired` is true, and they have different numbers of runs.
    """
    first, second = check_scores(scores), check_scores(baseline, "baseline")

    def estimated(of: Statistic, *, by_pairs: bool, low: float = -np.inf, high: float = np.inf) -> Estimate:
        return estimate(of, first, second, paired=by_pairs, bounds=(low, high), confidence=confidence, method=method,
                        resamples=resamples, seed=seed)
    compared = estimated(difference(statistic), by_pairs=paired)
    p_value, seeds_needed = _test(first, second, confidence, paired=paired)
    return Comparison(
        paired=paired,
        difference=compared,
        mean_difference=estimated(difference(mean), by_pairs=paired),
        # This probability compares each run with every run of the baseline, so runs are not resampled in pairs.
        improvement=_with_exact_end(estimated(probability_of_improvement, by_pairs=False, low=0.0, high=1.0),
                                    min(len(first), len(second)) * first.shape[1], confidence),
        p_value=p_value, seeds_needed=seeds_needed)


def _with_exact_end(found: Estimate, pairs: int, confidence: float) -> Estimate:
    """Return the estimate of a probability, with an exact interval if the estimated probability is 0 or 1.

    If all runs are better than all runs of the baseline, the probability is 1; if all are worse, it is 0. In both
    cases, all resamples have the same result, so the bootstrap interval has no width. The exact binomial interval
    (Clopper-Pearson) replaces it. This interval assumes independent pairs, so each score may be in only one pair.

    Args:
        found: The probability and its interval.
        pairs: Largest number of pairs (score, baseline score) such that no score is in two pairs.
        confidence: Confidence of the interval.
    """
    reach = 1.0 - ((1.0 - confidence) / 2)**(1.0 / pairs)
    if found.value == 1.0:
        return Estimate(found.value, np.asarray(1.0 - reach), found.value)
    if found.value == 0.0:
        return Estimate(found.value, found.value, np.asarray(reach))
    return found


def required_seeds(
    difference: float, std: float, *, power: float = 0.8, confidence: float = 0.95, paired: bool = False,
) -> int:
    """Return the number of seeds with which a t test detects a difference of two means.

    The power is computed from the noncentral t distribution. Both sets of runs are assumed to have the same standard
    deviation and the same number of seeds.

    Args:
        difference: The difference of the two means that the test should detect, in units of the score.
        std: The standard deviation of the score over seeds; if `paired`, the standard deviation of the difference
            between the scores of two runs with equal seeds.
        power: The probability of detecting the difference.
        confidence: One minus the probability of detecting a difference that does not exist.
        paired: Whether both sets of runs have the same seeds.

    Returns:
        Number of seeds of each of the two sets, at least 2.

    Raises:
        ConfigError: An argument is out of range, or more than a million seeds are needed.
    """
    if not (np.isfinite(difference) and difference) or not (np.isfinite(std) and std > 0):
        raise ConfigError("the difference must be a number other than 0, and std a number above 0; got "
                          f"difference={difference!r} and std={std!r}")
    for name, value in (("power", power), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} must be between 0 and 1, got {value!r}")
    found = _required_seeds(abs(difference) / std, power, confidence, paired=paired)
    if found is None:
        raise ConfigError(f"more than {_MOST_SEEDS:,} seeds are needed to detect a difference of {difference:g} with a "
                          f"standard deviation of {std:g}; choose a larger difference")
    return found


def _required_seeds(effect: float, power: float, confidence: float, *, paired: bool) -> int | None:
    """Return the number of seeds needed to detect a difference of `effect` standard deviations; None if > 1,000,000."""
    low, high = 1, 2  # the power with `low` seeds is too low
    while _power(high, effect, confidence, paired=paired) < power:
        low, high = high, 2 * high
        if high > _MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(middle, effect, confidence, paired=paired) >= power else (middle, high)
    return high


def _power(seeds: int, effect: float, confidence: float, *, paired: bool) -> float:
    """Return the power of a two-sided t test for means that differ by `effect` standard deviations."""
    from scipy import stats
    freedom, shift = (seeds - 1, effect * seeds**0.5) if paired else (2 * seeds - 2, effect * (seeds / 2)**0.5)
    limit = stats.t.isf((1.0 - confidence) / 2, freedom)
    if shift > limit + 30.0:  # the power is 1, but SciPy computes it inaccurately here
        return 1.0
    return float(stats.nct.sf(limit, freedom, shift) + stats.nct.cdf(-limit, freedom, shift))


def _test(scores: Array, baseline: Array, confidence: float, *, paired: bool) -> tuple[float, int | None]:
    """Return the p-value of the t test, and the required number of seeds; see `Comparison`."""
    from scipy import stats
    first, second = scores.mean(axis=1), baseline.mean(axis=1)
    if min(len(first), len(second)) < 2:
        return np.nan, None
    gap = float(first.mean() - second.mean())
    std = float((first - second).std(ddof=1) if paired else ((first.var(ddof=1) + second.var(ddof=1)) / 2)**0.5)
    if std <= 1e-12 * max(np.abs(first).max(), np.abs(second).max()):  # rounding errors are not variation
        return np.nan, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy warns about lost precision if scores are almost equal
        result = stats.ttest_rel(first, second) if paired else stats.ttest_ind(first, second, equal_var=False)
    return float(result.pvalue), _required_seeds(abs(gap) / std, 0.8, confidence, paired=paired) if gap else None
