"""Where the time goes: what the parts of each level's work are called, and how they are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PARTS: Mapping[str, tuple[str, ...]] = {
    "collection": ("environment", "inference", "store", "encode", "decode", "send"),
    "gradients": ("wait", "decode", "copy", "grad", "average", "apply", "encode", "send"),
    "update": ("wait", "decode", "apply", "push"),
}
"""Level -> parts of the work of one of its workers; whatever is left of its time is "idle"."""

Seconds = dict[str, dict[str, float]]
"""Level -> part -> seconds."""


def add_seconds(total: Seconds, more: Mapping[str, Mapping[str, float]]) -> None:
    """Add `more` to `total`."""
    for level, parts in more.items():
        own = total.setdefault(level, {})
        for part, seconds in parts.items():
            own[part] = own.get(part, 0.0) + seconds


def with_idle(total: Mapping[str, Mapping[str, float]], worker_seconds: Mapping[str, float]) -> Seconds:
    """Every part of every level, and what is left of the time of its workers.

    Args:
        total: Seconds that parts took, over all workers of a level.
        worker_seconds: Seconds that a level's workers had, together.
    """
    found: Seconds = {}
    for level, parts in PARTS.items():
        own = {part: total.get(level, {}).get(part, 0.0) for part in parts}
        own["idle"] = max(0.0, worker_seconds.get(level, 0.0) - sum(own.values()))
        found[level] = {part: round(seconds, 6) for part, seconds in own.items()}
    return found


class Stopwatch:
    """Seconds by part of the work of one thread. A part within another interrupts it, so nothing counts twice.

    Args:
        now: The clock.

    Attributes:
        seconds: Part -> seconds so far, of parts that have ended.
        counts: Part -> how often a block was.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._within = 0.0  # seconds of the parts within the running one
        self.seconds: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def add(self, part: str, seconds: float) -> None:
        """Some of the time that has just passed was this part's."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self._within += seconds

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Time a block."""
        start, before, self._within = self._now(), self._within, 0.0
        try:
            yield
        finally:
            took = self._now() - start
            self.add(part, max(0.0, took - self._within))
            self.counts[part] += 1
            self._within = before + took
