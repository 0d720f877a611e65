"""Tests of comparisons of two sets of runs, and of the required number of seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pytorchrl.analysis import compare, iqm, mean, required_seeds
from pytorchrl.errors import ConfigError

RNG = np.random.default_rng(1)
BASELINE = RNG.normal(size=(8, 3))
SCORES = BASELINE + RNG.normal(0.3, 0.1, size=(8, 3))


def test_a_paired_comparison_uses_that_equal_seeds_have_similar_scores():
    alone, paired = compare(SCORES, BASELINE), compare(SCORES, BASELINE, paired=True)
    assert (alone.paired, paired.paired) == (False, True)
    for one in (alone, paired):
        assert float(one.difference.value) == pytest.approx(float(iqm(SCORES) - iqm(BASELINE)))
        assert float(one.mean_difference.value) == pytest.approx(float(mean(SCORES) - mean(BASELINE)))
    widths = [float(one.mean_difference.high - one.mean_difference.low) for one in (alone, paired)]
    assert widths[1] < 0.3 * widths[0]
    assert paired.mean_difference.low > 0.0 > alone.mean_difference.low
    first, second = SCORES.mean(axis=1), BASELINE.mean(axis=1)
    assert alone.p_value == pytest.approx(stats.ttest_ind(first, second, equal_var=False).pvalue)
    assert paired.p_value == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert paired.seeds_needed < alone.seeds_needed


def test_the_statistic_of_the_difference_can_be_chosen():
    found = compare(SCORES**3, BASELINE[:5], statistic=mean)
    assert found.difference == found.mean_difference
    assert found.difference.value != compare(SCORES**3, BASELINE[:5]).difference.value


def test_complete_separation_still_has_an_interval():
    """Check the interval of a probability of 1: all disjoint pairs were better, as often as there are pairs."""
    better = compare([5.0, 6.0, 7.0], [1.0, 2.0, 3.0, 4.0]).improvement
    assert (better.value, better.high) == (1.0, 1.0)
    assert better.low == pytest.approx(stats.binomtest(3, 3).proportion_ci(0.95).low)
    worse = compare([[1.0, 2.0], [1.5, 2.5]], [[4.0, 5.0], [4.5, 5.5]]).improvement
    assert (worse.value, worse.low) == (0.0, 0.0)
    assert worse.high == pytest.approx(stats.binomtest(0, 4).proportion_ci(0.95).high)


def test_runs_without_variation_have_no_p_value():
    for scores, baseline in (([500.0] * 3, [500.0] * 3), ([500.0] * 3, [400.0] * 3), ([1.0], [2.0, 3.0])):
        found = compare(scores, baseline)
        assert np.isnan(found.p_value)
        assert found.seeds_needed is None
    assert compare([500.0] * 3, [500.0] * 3).improvement.value == 0.5
    assert compare([0.1 + 0.2] * 3, [0.3, 0.3, 0.3]).seeds_needed is None  # these differ by rounding errors only


def test_a_tiny_difference_needs_more_seeds_than_can_be_counted():
    assert compare([1.0, 2.0, 3.0], [1.0, 2.0, 3.0 + 1e-5]).seeds_needed is None


@pytest.mark.parametrize(("effect", "paired", "expected"), [
    # Tables of G*Power 3 (two-sided, level 0.05, power 0.8), also in Cohen, "Statistical power analysis", 1988.
    (0.5, False, 64), (0.8, False, 26), (1.0, False, 17), (0.2, False, 394), (0.5, True, 34), (0.2, True, 199),
])
def test_required_seeds_equal_published_tables(effect, paired, expected):
    assert required_seeds(3 * effect, 3, paired=paired) == expected
    assert required_seeds(-3 * effect, 3, paired=paired) == expected


def test_required_seeds_detect_the_difference_with_the_asked_power():
    rng, count = np.random.default_rng(0), required_seeds(1.5, 1.0)
    found = [stats.ttest_ind(rng.normal(1.5, 1, (2000, seeds)), rng.normal(0, 1, (2000, seeds)), axis=1).pvalue < 0.05
             for seeds in (count, count - 1)]
    assert np.mean(found[0]) > 0.78
    assert np.mean(found[1]) < 0.82
    assert required_seeds(1.5, 1.0, power=0.99) > required_seeds(1.5, 1.0, power=0.9) > count
    assert required_seeds(1.5, 1.0, confidence=0.99) > count
    assert required_seeds(1e6, 1.0) == 2


@pytest.mark.parametrize(("arguments", "message"), [
    ({"difference": 0.0}, "a number other than 0"), ({"std": 0.0}, "std a number above 0"),
    ({"std": np.inf}, "std=inf"),
    ({"power": 80}, "power must be between 0 and 1, got 80"), ({"confidence": 0}, "confidence must be between"),
    ({"difference": 1e-6}, "more than 1,000,000 seeds"),
])
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        required_seeds(**{"difference": 1.0, "std": 1.0, **arguments})


def test_paired_arrays_have_the_same_runs():
    with pytest.raises(ConfigError, match="paired samples"):
        compare(SCORES, BASELINE[:5], paired=True)
