"""Draw small curves and bars as SVG and HTML, with colors from the page's style sheet. All text is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytorchrl.support.display import escape

Points = Sequence[tuple[float, float]]

# Number of colors in the style sheet, `--c0` to `--c7`.
COLORS = 8


def sparkline(points: Points, low: float, high: float) -> str:
    """Return a small line chart without axes, or an empty string if there are fewer than two points.

    Args:
        points: The points.
        low: The value at the lower end of the chart, so that charts with equal ends can be compared.
        high: The value at the upper end.
    """
    if len(points) < 2:
        return ""
    xs = [x for x, _ in points]
    x0, x_size, y_size = min(xs), max(xs) - min(xs) or 1.0, high - low or 1.0
    drawn = " ".join(f"{2 + 116 * (x - x0) / x_size:.0f},{22 - 20 * (y - low) / y_size:.1f}"
                     for x, y in thinned(points, 60))
    return (f'<svg class="spark" viewBox="0 0 120 24" aria-hidden="true"><polyline class="curve" '
            f'style="stroke:var(--c0)" points="{drawn}"/></svg>')


def histogram(bins: Sequence[tuple[int, int]]) -> str:
    """Return a bar for each bin of lags (0, 1, 2 to 3, 4 to 7, and so on), given as (smallest lag, count)."""
    total = sum(count for _, count in bins)
    if not total:
        return '<p class="none">no data</p>'
    rows = []
    for lag, count in bins:
        label = str(lag) if lag < 2 else f"{lag} to {2 * lag - 1}"
        rows.append((label, count / total, f"{count:,}", False))
    return bars(rows)


def bars(rows: Sequence[tuple[str, float, str, bool]]) -> str:
    """Return a horizontal bar for each row (label, share in [0, 1], text after the bar, whether it is red)."""
    parts = []
    for label, share, figure, is_bad in rows:
        bad = " bad" * is_bad
        parts.append(f'<span class="label{bad}">{escape(label)}</span><span class="track"><span class="bar{bad}" '
                     f'style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></span></span>'
                     f'<span class="figure{bad}">{escape(figure)}</span>')
    return f'<div class="bars">{"".join(parts)}</div>'


def stacked(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Return bars that show how workers spend their time: for each level of the tree, a stacked bar and a legend.

    Args:
        shares: For each level, a mapping from parts of the work to their shares of the workers' time, in [0, 1]. Parts
            with a share below 0.01 are not drawn.
    """
    rows = []
    for level, parts in shares.items():
        found = sorted(((part, share) for part, share in parts.items() if share >= 0.01), key=lambda one: -one[1])
        if not found:
            continue
        cells, legend = [], []
        for number, (part, share) in enumerate(found):
            color = "var(--idle)" if part in ("idle", "wait") else f"var(--c{number % COLORS})"
            text = f"{escape(part)} {share:.0%}"
            cells.append(f'<span style="width:{100 * share:.2f}%;background:{color}"></span>')
            legend.append(f'<span class="key"><i style="background:{color}"></i>{text}</span>')
        rows.append(f'<div class="level"><b>{escape(level)}</b><div class="stack">{"".join(cells)}</div>'
                    f'<div class="legend">{"".join(legend)}</div></div>')
    return "".join(rows) or '<p class="none">no data</p>'


def thinned(points: Points, most: int) -> Points:
    """Reduce a curve to about `most` points: divide it into equal pieces, and keep each piece's minimum and maximum."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        piece = points[start:start + size]
        kept += sorted({min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])})
    return kept
