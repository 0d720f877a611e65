"""Tests of the statistics: against loops over scores, by hand, and against stored results of rliable."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from pytorchrl import analysis
from pytorchrl.errors import ConfigError

STORED = json.loads((Path(__file__).parent / "rliable.json").read_text(encoding="utf-8"))
SHAPES = [(1, 1), (2, 1), (3, 1), (5, 4), (8, 3)]


def scores_of(shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, size=shape) / 2.0


def iqm(scores):
    ordered = sorted(scores.ravel().tolist())
    cut = len(ordered) // 4
    kept = ordered[cut:len(ordered) - cut]
    return sum(kept) / len(kept)


def median(scores):
    runs, tasks = scores.shape
    middle = sorted(scores[:, 0] if tasks == 1 else [sum(scores[:, task]) / runs for task in range(tasks)])
    return (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2


def optimality_gap(scores, target=1.0):
    return sum(max(target - score, 0.0) for score in scores.ravel()) / scores.size


def probability(scores, baseline):
    wins = [1.0 if x > y else 0.5 if x == y else 0.0 for task in range(scores.shape[1])
            for x in scores[:, task] for y in baseline[:, task]]
    return sum(wins) / len(wins)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ours", "reference"), [
    (analysis.iqm, iqm), (analysis.median, median), (analysis.mean, np.mean),
    (analysis.optimality_gap, optimality_gap)])
def test_statistics_equal_loops_over_scores(ours, reference, shape):
    scores = scores_of(shape)
    assert float(ours(scores)) == pytest.approx(reference(scores), abs=1e-12)
    many = np.stack([scores, scores_of(shape, 1)])
    assert ours(many).tolist() == pytest.approx([reference(one) for one in many], abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_probability_of_improvement_counts_pairs_and_halves_ties(shape):
    scores, baseline = scores_of(shape), scores_of((4, shape[1]), 1)
    assert float(analysis.probability_of_improvement(scores, baseline)) == pytest.approx(probability(scores, baseline))


def test_a_one_dimensional_array_contains_the_runs_of_one_task():
    scores = [3.0, 1.0, 2.0, 10.0]
    assert float(analysis.iqm(scores)) == 2.5
    assert float(analysis.median(scores)) == 2.5
    assert float(analysis.mean(scores)) == 4.0
    assert float(analysis.optimality_gap(scores, target=3.0)) == 0.75
    assert analysis.performance_profile(scores, [0.0, 2.0, 9.0, 10.0]).tolist() == [1.0, 0.5, 0.25, 0.0]
    assert float(analysis.probability_of_improvement(scores, [2.0])) == 0.625


def test_area_under_a_curve_is_its_mean_over_the_width():
    assert analysis.area_under_curve([0, 10], [0, 4]) == 2.0
    assert analysis.area_under_curve([10, 20, 40], [1, 3, 3]) == pytest.approx((20 + 60) / 30)
    assert analysis.area_under_curve([0, 10, 20], [0, 4, 100], end=10) == 2.0
    assert analysis.area_under_curve([0, 20], [0, 8], end=10) == 2.0


def test_normalized_scores_are_0_and_1_at_the_references():
    assert analysis.normalize([[20, -500], [260, -75]], [(20, 500), (-500, -75)]).tolist() == [[0, 0], [0.5, 1]]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: analysis.iqm([[1.0, 2.0], [3.0]]), "same number of runs for each task"),
    (lambda: analysis.iqm([]), r"at least one of each; got \(0, 1\)"),
    (lambda: analysis.iqm(1.0), r"shape \(runs, tasks\)"),
    (lambda: analysis.mean([1.0, np.nan]), "must be finite, got nan"),
    (lambda: analysis.probability_of_improvement([[1, 2]], [[1]]), "same tasks, got 2 and 1"),
    (lambda: analysis.normalize([[1, 2]], [(0, 1)]), "for each of the 2 tasks"),
    (lambda: analysis.normalize([1], [(1, 0)]), "low < high"),
    (lambda: analysis.area_under_curve([1], [1]), "at least two points"),
    (lambda: analysis.area_under_curve([2, 1], [1, 1]), "x must increase"),
    (lambda: analysis.area_under_curve([0, 1], [1, 1], end=2), "at most 1"),
])
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def statistic_of(name):
    if name.startswith("profile at "):
        return functools.partial(analysis.performance_profile, thresholds=float(name.split()[-1]))
    return getattr(analysis, name)


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: case["name"])
def test_results_equal_those_of_rliable(case):
    """Compare with results that `benchmarks/rliable_check.py` stored.

    Point estimates are equal. The ends of percentile intervals are quantiles of different random resamples. They must
    lie between the quantiles whose tail probabilities differ by four standard errors.
    """
    resamples = STORED["resamples"]
    tail, error = 0.025, 4 * (0.025 * 0.975 * 2 / resamples)**0.5
    assert len(case["rliable"]) == 7
    for name, (value, low, high) in case["rliable"].items():
        arrays = [case["scores"], case["baseline"]] if name == "probability_of_improvement" else [case["scores"]]
        inner, outer = (
            analysis.estimate(statistic_of(name), *arrays, method="percentile", confidence=1 - 2 * of,
                              resamples=resamples) for of in (tail + error, tail - error))
        assert np.squeeze(inner.value) == pytest.approx(value, abs=1e-6), name
        assert outer.low - 1e-9 <= low <= inner.low + 1e-9, name
        assert inner.high - 1e-9 <= high <= outer.high + 1e-9, name
