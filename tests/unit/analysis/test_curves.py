"""Tests of curves on a common grid."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.analysis import estimate, mean, on_grid, smooth, summarize_curves, without_steps
from pytorchrl.errors import ConfigError


def test_curves_are_interpolated_where_all_have_values():
    grid, values = on_grid([([0, 10], [0, 10]), ([2, 4, 8], [0, 2, 2])], points=4)
    assert grid.tolist() == [2, 4, 6, 8]
    assert values.tolist() == [[2, 0], [4, 2], [6, 2], [8, 2]]


def test_curves_that_share_one_position_have_one_point():
    grid, values = on_grid([([0, 5], [0, 1]), ([5, 9], [3, 3])])
    assert (grid.tolist(), values.tolist()) == ([5], [[1, 3]])
    with pytest.raises(ConfigError, match="do not overlap: one begins at 6, and another ends at 5"):
        on_grid([([0, 5], [0, 1]), ([6, 9], [3, 3])])


def test_steps_become_slopes_and_plateaus_stay():
    assert without_steps(([0, 1, 2, 3, 4], [1, 2, 3, 2, 2])) == ([0, 1, 2, 3, 4], [1, 2, 3, 2, 2])
    xs = list(range(101))
    assert without_steps((xs, [x // 5 for x in xs]))[0] == list(range(0, 101, 5))
    assert without_steps((xs, [min(x, 40) if x < 90 else 30 for x in xs])) == (
        [*range(41), 89, 90, 100], [*range(41), 40, 30, 30])
    assert without_steps(([7], [1])) == ([7], [1])
    _, found = summarize_curves([(xs, [x // 5 for x in xs])], points=101)
    assert found.value == pytest.approx([x / 5 for x in xs])


def test_smoothing_is_a_moving_mean_with_a_symmetric_window():
    values = np.random.default_rng(0).normal(size=(40, 2))
    found = smooth(values, 0.25)
    for index in range(40):
        half = min(5, index, 39 - index)
        assert found[index] == pytest.approx(values[index - half:index + half + 1].mean(axis=0))
    assert smooth(values, 0.0) == pytest.approx(values)
    line = np.arange(20.0)
    assert smooth(line, 0.5) == pytest.approx(line)
    with pytest.raises(ConfigError, match="below 1; got 5"):
        smooth(values, 5)


def test_a_band_is_the_interval_at_each_position():
    rng = np.random.default_rng(2)
    curves = [(range(5), rng.normal(size=5)) for _ in range(4)]
    grid, found = summarize_curves(curves, statistic=mean, points=5)
    assert grid.tolist() == [0, 1, 2, 3, 4]
    for index in range(5):
        alone = estimate(mean, [ys[index] for _, ys in curves])
        assert (found.value[index], found.low[index], found.high[index]) == pytest.approx(
            tuple(map(float, (alone.value, alone.low, alone.high))))
