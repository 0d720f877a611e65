"""Tests of the charts: places of points, thinning, and escaping."""

from __future__ import annotations

import re

import pytest

from pytorchrl.monitor.charts import bars, histogram, sparkline, stacked, thinned
from pytorchrl.monitor.style import asset
from pytorchrl.support.display import escape


def test_texts_are_escaped_for_html():
    text = "<a href='x' id=\"y\">&\x1b\u202e"
    assert escape(text) == "&lt;a href=&#x27;x&#x27; id=&quot;y&quot;&gt;&amp;\\x1b\\u202e"


def drawn(svg):
    return [tuple(map(float, pair.split(","))) for pair in re.search('points="([^"]*)"', svg)[1].split()]


def test_sparklines_with_equal_ends_have_one_scale():
    low, high = ([(0, value), (50, value), (100, 2 * value)] for value in (10, 50))
    assert drawn(sparkline(low, 10, 100)) == [(2.0, 22.0), (60.0, 22.0), (118.0, 19.8)]
    assert drawn(sparkline(high, 10, 100)) == [(2.0, 13.1), (60.0, 13.1), (118.0, 2.0)]
    assert sparkline(low[:1], 10, 100) == ""


def test_long_curves_keep_their_extremes():
    line = [(x, 1000.0 if x == 1234 else -1000.0 if x == 4321 else 0.0) for x in range(10_000)]
    points = thinned(line, 400)
    assert len(points) <= 400
    assert (1234, 1000.0) in points
    assert (4321, -1000.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)


@pytest.mark.parametrize("points", [[(1, 0), (1, 0)], [(0, 1e-300), (1, 1e300)]])
def test_curves_of_equal_or_extreme_numbers_are_drawn(points):
    values = [y for _, y in points]
    assert "nan" not in sparkline(points, min(values), max(values))


def test_charts_without_data_say_so():
    assert "no data" in histogram([])
    assert "no data" in stacked({"update": {}})


def test_a_share_stands_on_the_line_of_its_name():
    page = stacked({"update": {"apply": 0.925, "idle": 0.075}})
    assert re.findall('class="key"><i [^>]*></i>([^<]*)<', page) == ["apply 92%", "idle 8%"]
    assert ".key{white-space:nowrap}" in asset("page.css")


def test_bad_bars_are_red():
    page = bars([("consumed", 0.2, "20", False), ("dropped", 0.8, "80", True)])
    assert page.count('class="bar bad"') == page.count('class="bar"') == 1


def test_bins_of_a_histogram_have_their_range():
    text = histogram([(0, 1), (1, 1), (2, 1), (4, 1)])
    assert re.findall('class="label">([^<]*)<', text) == ["0", "1", "2 to 3", "4 to 7"]
    assert re.findall('width:([^%]*)%', text) == ["25.0"] * 4
