"""Draw curves and bars as SVG, with colors from the page's style sheet. All text is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytorchrl.support.display import escape
from pytorchrl.support.units import compact

Points = Sequence[tuple[float, float]]

# Number of colors in the style sheet, `--c0` to `--c7`.
COLORS = 8
_MOST_POINTS = 400
_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 12, 28


def curves(lines: Sequence[tuple[str, Points]], x_name: str) -> str:
    """Return a chart with one line per (label, points); the color of a line depends only on its position in `lines`."""
    points = [point for _, line in lines for point in line]
    if not points:
        return '<p class="none">no data</p>'
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    if x1 <= x0:
        x0, x1 = x_ticks[0], x_ticks[-1]
    y0, y1 = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return (_LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT),
                _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM))
    parts = []
    for tick in y_ticks:
        _, y = place(x0, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(compact(tick))}</text>')
    for tick in (tick for tick in x_ticks if x0 <= tick <= x1):
        x, _ = place(tick, y0)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(compact(tick))}</text>')
    for number, (label, line) in enumerate(lines):
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in _thinned(line)))
        color = f"var(--c{number % COLORS})"
        if len(line) == 1:
            x, y = place(*line[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{color}"/>')
        parts.append(f'<polyline class="curve" style="stroke:{color}" points="{drawn}"><title>{escape(label)}</title>'
                     "</polyline>")
    return (f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(x_name)}">'
            + "".join(parts) + "</svg>")


def sparkline(points: Points) -> str:
    """Return a small line chart without axes, or an empty string if there are fewer than two points."""
    if len(points) < 2:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x0, x_size, y0, y_size = min(xs), max(xs) - min(xs) or 1.0, min(ys), max(ys) - min(ys) or 1.0
    drawn = " ".join(f"{2 + 116 * (x - x0) / x_size:.1f},{22 - 20 * (y - y0) / y_size:.1f}"
                     for x, y in _thinned(points, 60))
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
        rows.append((label, count / total, f"{count:,}"))
    return bars(rows)


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return a horizontal bar for each row (label, share in [0, 1], text after the bar)."""
    return '<div class="bars">' + "".join(
        f'<span class="label">{escape(label)}</span><span class="track"><span class="bar" '
        f'style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></span></span>'
        f'<span class="figure">{escape(figure)}</span>'
        for label, share, figure in rows) + "</div>"


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
            cells.append(f'<span style="width:{100 * share:.2f}%;background:{color}" title="{text}"></span>')
            legend.append(f'<span class="key"><i style="background:{color}"></i>{text}</span>')
        rows.append(f'<div class="level"><b>{escape(level)}</b><div class="stack">{"".join(cells)}</div>'
                    f'<div class="legend">{"".join(legend)}</div></div>')
    return "".join(rows) or '<p class="none">no data</p>'


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six evenly spaced round numbers, the first at most `low` and the last at least `high`."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, low + (abs(low) or 1.0) / 2
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, last + 1)]


def _thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """Reduce a curve to about `most` points: divide it into equal pieces, and keep each piece's minimum and maximum."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        piece = points[start:start + size]
        kept += sorted({min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])})
    return kept
