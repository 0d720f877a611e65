"""Tests of numbers as text."""

from __future__ import annotations

import pytest

from pytorchrl.support.units import clock, compact, percent, score


@pytest.mark.parametrize(("value", "text"), [
    (None, "-"), (0, "0"), (0.1234, "0.123"), (999, "999"), (999.9, "1k"), (1234, "1.23k"), (5.6e7, "56M"), (2e9, "2G"),
    (-4000, "-4k")])
def test_compact_numbers(value, text):
    assert compact(value) == text


def test_durations_and_shares():
    assert [clock(seconds) for seconds in (0, 65, 7200)] == ["0:00", "1:05", "2:00:00"]
    assert percent(0.256) == "26%"


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (161.0, "161.0"), (-12.345, "-12.3"), (2890.4, "2,890")])
def test_scores(value, text):
    assert score(value) == text
