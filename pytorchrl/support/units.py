"""Format numbers, durations and shares for display."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def compact(value: float | None) -> str:
    """Return a number with three significant digits and a unit prefix, such as "1.23k"; "-" for None."""
    if value is None:
        return "-"
    for scale, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"


def score(value: float | None) -> str:
    """Return a return or another score with one decimal, or as a whole number from 1,000 on; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share, from 0 to 1, in whole percent."""
    return f"{share:.0%}"


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, with hours if there are any: "1:05", "2:00:00"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
