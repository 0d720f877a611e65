"""Measure the time that workers spend on each part of their work, and describe windows of numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

PARTS: Mapping[str, tuple[str, ...]] = {
    "collection": ("environment", "inference", "store", "encode", "decode", "send"),
    "gradients": ("wait", "decode", "copy", "grad", "average", "apply", "encode", "send"),
    "update": ("wait", "decode", "apply", "push"),
}
"""The parts of a worker's work on each level; the remaining time of the worker is "idle"."""

OPERATIONS = ("wait", "apply", "push", "step", "collect", "receive", "dequeue", "load", "load_wait", "grad", "draw",
              "fetch", "priorities")
"""Operations whose mean times are metrics named `<operation>_time_ms`. The time of one operation may include the time
of other operations."""

Times = dict[str, tuple[int, float]]
"""The count and the total seconds of each operation."""
Seconds = dict[str, dict[str, float]]
"""The seconds of each part of each level."""
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def add_seconds(total: Seconds, more: Mapping[str, Mapping[str, float]]) -> None:
    """Add `more` to `total`; both contain seconds by level (a key of `PARTS`) and part."""
    for level, parts in more.items():
        own = total.setdefault(level, {})
        for part, seconds in parts.items():
            own[part] = own.get(part, 0.0) + seconds


def with_idle(total: Mapping[str, Mapping[str, float]], worker_seconds: Mapping[str, float]) -> Seconds:
    """Return the seconds of all parts, by level and part as in `PARTS`, and add a part "idle" to each level.

    The idle time of a level is the elapsed time of the level's workers minus the time of the other parts.

    Args:
        total: For each level, the seconds of each part, summed over all workers of the level.
        worker_seconds: For each level, the elapsed seconds, summed over all workers of the level.
    """
    found: Seconds = {}
    for level, parts in PARTS.items():
        own = {part: total.get(level, {}).get(part, 0.0) for part in parts}
        own["idle"] = max(0.0, worker_seconds.get(level, 0.0) - sum(own.values()))
        found[level] = {part: round(seconds, 6) for part, seconds in own.items()}
    return found


class Stopwatch:
    """A stopwatch for the parts of one thread's work. A nested part pauses the outer part, so no time is counted twice.

    Args:
        now: The clock.
        on_part_end: Called with the name and the seconds of each part when the part ends.

    Attributes:
        seconds: For each part, the total seconds of its finished blocks.
        counts: For each part, the number of its finished blocks.
    """

    def __init__(self, now: Callable[[], float], on_part_end: Callable[[str, float], None] | None = None) -> None:
        self.now, self.on_part_end = now, on_part_end
        self.within = 0.0
        """Seconds of finished parts within the running part."""
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._taken: Times = {}

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to the total of `part`, and exclude them from the part that is being timed now, if any."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.within += seconds

    def count(self, part: str, seconds: float) -> None:
        """Add seconds that the caller has measured to the total of `part`, and increase the count of `part` by 1."""
        self.add(part, seconds)
        self.counts[part] = self.counts.get(part, 0) + 1

    def take(self) -> Times:
        """Return, for each part that ended since the last call, how often it ended and how many seconds it took in all.

        Any thread may call this method.
        """
        found: Times = {}
        for part, count in tuple(self.counts.items()):
            count_before, seconds_before = self._taken.get(part, (0, 0.0))
            if count > count_before:
                seconds = self.seconds[part]
                found[part], self._taken[part] = (count - count_before, seconds - seconds_before), (count, seconds)
        return found

    def part(self, part: str) -> _Block:
        """Return a context manager that adds the time of its `with` block to `part`."""
        return _Block(self, part)

    def end(self, part: str, start: float, before: float) -> None:
        """End a block of `part`: add the time since `start`, except the seconds in `within`.

        Args:
            part: Name of the part.
            start: Time at the start of the block.
            before: Value of `within` at the start of the block.
        """
        took = self.now() - start
        seconds = took - self.within if took > self.within else 0.0
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.counts[part] = self.counts.get(part, 0) + 1
        self.within = before + took
        if self.on_part_end is not None:
            self.on_part_end(part, seconds)


class _Block:
    """A context manager that times a part of a thread's work; it is twice as fast as a `contextmanager` generator."""

    __slots__ = ("_before", "_part", "_start", "_watch")

    def __init__(self, watch: Stopwatch, part: str) -> None:
        self._watch, self._part = watch, part

    def __enter__(self) -> None:
        watch = self._watch
        self._start, self._before, watch.within = watch.now(), watch.within, 0.0

    def __exit__(self, *error: object) -> None:
        self._watch.end(self._part, self._start, self._before)


class WindowStat:
    """Mean, population standard deviation and quantiles of the last `n` numbers.

    Args:
        name: Name of the quantity.
        n: Size of the window.
    """

    def __init__(self, name: str, n: int) -> None:
        self.name, self._count = name, 0
        self._window: deque[float] = deque(maxlen=n)

    def push(self, number: float) -> None:
        """Add a number."""
        self._count += 1
        self._window.append(number)

    def stats(self) -> dict[str, int | float | list[float] | None]:
        """Return `count`, `mean`, `std` and `quantiles` (0, 10, 50, 90, 100 %).

        `count` includes all numbers ever added; the other values describe the window, and are None if it is empty.
        """
        if not self._window:
            return {"count": 0, "mean": None, "std": None, "quantiles": None}
        window = np.array(self._window)
        return {"count": self._count, "mean": float(window.mean()), "std": float(window.std()),
                "quantiles": np.quantile(window, _QUANTILES).tolist()}
