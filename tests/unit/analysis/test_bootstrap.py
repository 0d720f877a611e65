"""Tests of confidence intervals: exact cases, reproducibility, and the coverage in small simulations."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy import stats

from pytorchrl.analysis import difference, estimate, iqm, mean, median, performance_profile, probability_of_improvement
from pytorchrl.errors import ConfigError

RNG = np.random.default_rng(3)
SCORES = RNG.normal(size=(6, 4)) * [1.0, 2.0, 0.1, 1.0]
BASELINE = SCORES + RNG.normal(0.2, 0.1, size=SCORES.shape)


def test_the_interval_of_the_mean_of_one_task_is_that_of_the_t_test():
    for runs in (2, 3, 10):
        scores = SCORES.ravel()[:runs]
        low, high = stats.ttest_1samp(scores, 0.0).confidence_interval(0.9)
        found = estimate(mean, scores, confidence=0.9, resamples=20_000)
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.03 * (high - low))


def test_the_interval_of_the_mean_of_several_tasks_uses_satterthwaites_degrees_of_freedom():
    parts = SCORES.var(axis=0, ddof=1) / len(SCORES) / SCORES.shape[1]**2
    freedom = parts.sum()**2 / (parts**2 / (len(SCORES) - 1)).sum()
    half = stats.t.isf(0.025, freedom) * parts.sum()**0.5
    found = estimate(mean, SCORES, resamples=20_000)
    assert (found.low, found.high) == pytest.approx((SCORES.mean() - half, SCORES.mean() + half), abs=0.05 * half)


def test_the_interval_of_a_difference_is_that_of_welchs_test_and_of_the_paired_test():
    first, second = SCORES[:, 0], BASELINE[:4, 0] * 3
    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    found = estimate(difference(mean), first, second, resamples=20_000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03 * (high - low))
    low, high = stats.ttest_rel(SCORES[:, 0], BASELINE[:, 0]).confidence_interval(0.95)
    found = estimate(difference(mean), SCORES[:, 0], BASELINE[:, 0], paired=True, resamples=20_000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03 * (high - low))


def half_width_in_loops(statistic, samples, resamples, tail):
    """Return half the width of the interval `method="t"`, computed with plain loops, run by run."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(sample), size=(resamples, *sample.shape)) for sample in samples]
    drawn = [float(statistic(*(np.stack([sample[rows[:, task], task] for task in range(sample.shape[1])], axis=1)
                               for sample, rows in zip(samples, (all_[b] for all_ in draws), strict=True))))
             for b in range(resamples)]
    centre = sum(drawn) / resamples
    variance = sum((one - centre)**2 for one in drawn) / resamples
    raw = corrected = squares = 0.0
    for sample, rows in zip(samples, draws, strict=True):
        runs = len(sample)
        for task in range(sample.shape[1]):
            part = 0.0
            for run in range(runs):
                times = [sum(row[task] == run for row in resample) for resample in rows]
                mean_times = sum(times) / resamples
                part += (sum((n - mean_times) * (one - centre) for n, one in zip(times, drawn, strict=True))
                         / resamples)**2
            # Noise adds the variance of each of the `runs` covariances, which have runs - 1 degrees of freedom.
            part = max(0.0, part - (runs - 1) * variance / resamples)
            raw += part
            corrected += part * runs / (runs - 1)
            squares += (part * runs / (runs - 1))**2 / (runs - 1)
    return stats.t.isf(tail, corrected**2 / squares) * (variance * corrected / raw)**0.5


def test_intervals_of_few_resamples_equal_those_of_plain_loops():
    """Check two sets of runs of different sizes. With 100 resamples, the noise of the covariances is large."""
    samples = [SCORES[:, :3], 2 * BASELINE[:4, :3]]
    found = estimate(difference(mean), *samples, resamples=100)
    half = half_width_in_loops(difference(mean), samples, 100, 0.025)
    assert float(found.high - found.value) == pytest.approx(half, rel=1e-9)


def test_percentile_intervals_are_quantiles_of_all_possible_resamples():
    """With two runs, a resample has the mean -1, 0 or 1, with probabilities of 1/4, 1/2 and 1/4."""
    ends = {confidence: estimate(mean, [-1.0, 1.0], method="percentile", confidence=confidence, resamples=5000)
            for confidence in (0.4, 0.6)}
    assert (ends[0.4].low, ends[0.4].high) == (0.0, 0.0)
    assert (ends[0.6].low, ends[0.6].high) == (-1.0, 1.0)


def test_runs_are_resampled_within_their_task():
    """Without variation within tasks, there is no variation, although tasks differ."""
    found = estimate(iqm, np.tile([0.0, 5.0, 7.0], (4, 1)))
    assert found.value == found.low == found.high == 4.5
    assert estimate(iqm, np.tile([0.0, 5.0, 7.0], (4, 1)), method="percentile").low == 4.5


@pytest.mark.parametrize("statistic", [iqm, median, mean])
@pytest.mark.parametrize("method", ["t", "percentile"])
def test_intervals_shift_and_scale_with_scores(statistic, method):
    found, moved = (estimate(statistic, scores, method=method) for scores in (SCORES, 10 * SCORES - 3))
    assert (moved.value, moved.low, moved.high) == pytest.approx(
        tuple(10 * end - 3 for end in (found.value, found.low, found.high)))


def test_leading_axes_share_the_resamples():
    points = np.stack([SCORES, 2 * SCORES, SCORES**2])
    found = estimate(iqm, points)
    for index, scores in enumerate(points):
        alone = estimate(iqm, scores)
        assert (found.low[index], found.high[index]) == pytest.approx((float(alone.low), float(alone.high)))


def test_many_resamples_are_computed_in_parts(monkeypatch):
    whole = estimate(probability_of_improvement, SCORES, BASELINE[:3])
    monkeypatch.setattr("pytorchrl.analysis.bootstrap._SCORES_AT_ONCE", 24 * 7)
    in_parts = estimate(probability_of_improvement, SCORES, BASELINE[:3])
    assert (whole.low, whole.high) == (in_parts.low, in_parts.high)


def test_seeds_and_resamples_change_the_interval_and_equal_seeds_do_not():
    ends = [float(estimate(iqm, SCORES, seed=seed, resamples=resamples).low)
            for seed, resamples in ((0, 500), (0, 500), (1, 500), (0, 600))]
    assert ends[0] == ends[1]
    assert len(set(ends)) == 3


def test_ends_are_clipped_to_bounds():
    profile = functools.partial(performance_profile, thresholds=[0.0, 1.0])
    found = estimate(profile, SCORES, bounds=(0.0, 1.0), confidence=0.999)
    assert found.value.shape == found.low.shape == (2,)
    assert found.low.min() >= 0.0
    assert found.high.max() <= 1.0


def test_one_run_has_a_value_and_no_interval():
    found = estimate(mean, [[3.0, 5.0]])
    assert float(found.value) == 4.0
    assert np.isnan([found.low, found.high]).all()
    assert f"{found:.1f}" == "4.0"
    assert f"{estimate(mean, [1.0, 1.0]):.1f}" == "1.0 [1.0, 1.0]"


@pytest.mark.parametrize(("seeds", "tasks"), [(3, 1), (10, 1), (5, 5)])
@pytest.mark.parametrize("statistic", [iqm, mean])
def test_intervals_contain_the_true_value_about_as_often_as_they_say(seeds, tasks, statistic):
    """Check 95 % intervals with 200 groups of runs; the standard error of the coverage is 1.5 %."""
    rng = np.random.default_rng(11)
    groups = rng.normal(0.0, 1.0, size=(200, seeds, tasks))
    found = [estimate(statistic, scores, resamples=500) for scores in groups]
    coverage = np.mean([one.low <= 0.0 <= one.high for one in found])
    assert 0.92 <= coverage <= 0.985


@pytest.mark.parametrize(("changes", "message"), [
    ({"confidence": 95}, "confidence must be between 0 and 1, such as 0.95; got 95"),
    ({"method": "bca"}, "method must be one of t, percentile; got 'bca'"), ({"resamples": 10}, "at least 100"),
    ({"paired": True}, r"got the shapes \[\(5, 4\), \(6, 4\)\]; pass paired=False"),
])
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        estimate(probability_of_improvement, SCORES, BASELINE[:5], **changes)
    with pytest.raises(ConfigError, match="same tasks"):
        estimate(difference(mean), SCORES, BASELINE[:, :2])
