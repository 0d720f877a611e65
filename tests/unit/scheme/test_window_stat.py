"""Check the statistics of a window of numbers."""

from __future__ import annotations

import pytest

from pytorchrl.scheme.window_stat import WindowStat


def test_statistics_of_a_window():
    stat = WindowStat("x", 4)
    assert stat.stats() == {"count": 0, "mean": None, "std": None, "quantiles": None}
    for number in range(1, 7):
        stat.push(number)
    stats = stat.stats()
    assert (stats["count"], stats["mean"]) == (6, 4.5)
    assert stats["std"] == pytest.approx(1.11803, abs=1e-5)
    assert stats["quantiles"] == pytest.approx([3, 3.3, 4.5, 5.7, 6])
