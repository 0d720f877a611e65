"""Tests of the charts: places of points, thinning, and escaping."""

from __future__ import annotations

import re

import pytest

from pytorchrl.monitor.charts import curves, escape, histogram, sparkline, stacked


def test_texts_are_escaped_for_html():
    text = "<a href='x' id=\"y\">&\x1b\u202e"
    assert escape(text) == "&lt;a href=&#x27;x&#x27; id=&quot;y&quot;&gt;&amp;\\x1b\\u202e"


def drawn(svg):
    return [tuple(map(float, pair.split(","))) for pair in re.search('points="([^"]*)"', svg)[1].split()]


def test_a_curve_fills_its_axes():
    points = drawn(curves([("a", [(0, 0), (50, 5), (100, 10)])], "x"))
    assert points == [(56.0, 212.0), (298.0, 112.0), (540.0, 12.0)]


def test_long_curves_keep_their_extremes():
    line = [(x, 1000.0 if x == 1234 else -1000.0 if x == 4321 else 0.0) for x in range(10_000)]
    points = drawn(curves([("a", line)], "x"))
    assert len(points) <= 400
    assert [y for _, y in points].count(12.0) == [y for _, y in points].count(212.0) == 1


@pytest.mark.parametrize("points", [[(1, 1)], [(1, 0), (1, 0)], [(0, 1e-300), (1, 1e300)], [(5, -3)]])
def test_curves_of_equal_or_extreme_numbers_are_drawn(points):
    assert "nan" not in curves([("a", points)], "x") + sparkline(points)


def test_charts_without_data_say_so():
    assert "no data" in curves([("a", [])], "x")
    assert "no data" in histogram([])
    assert "no data" in stacked({"update": {}})


def test_bins_of_a_histogram_have_their_range():
    text = histogram([(0, 1), (1, 1), (2, 1), (4, 1)])
    assert re.findall('class="label">([^<]*)<', text) == ["0", "1", "2 to 3", "4 to 7"]
    assert re.findall('width:([^%]*)%', text) == ["25.0"] * 4
