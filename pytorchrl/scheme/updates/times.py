"""Measure steps and updates per second, and the time that each level of the tree spends on each part of its work."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from pytorchrl.scheme.timing import OPERATIONS, Seconds, Stopwatch, add_seconds, with_idle
from pytorchrl.scheme.transport.messages import Report

# The mean time of each kind of operation is computed over this many recent operations.
_TIME_WINDOW = 100
# Number of seconds over which rates are computed.
_RATE_WINDOW_S = 10.0


class Rates:
    """Rates over the ten seconds before the latest update. This class is not thread-safe.

    Args:
        now: The clock.
        names: Names of the totals that `add` receives, in the same order.
    """

    def __init__(self, now: Callable[[], float], names: tuple[str, ...]) -> None:
        self._now, self._names = now, names
        self._totals: deque[tuple[float, tuple[int, ...]]] = deque([(now(), (0,) * len(names))])

    def add(self, totals: tuple[int, ...]) -> None:
        """Record the current totals, in the order of `names`; `metrics` computes rates from the increases."""
        now = self._now()
        self._totals.append((now, totals))
        while len(self._totals) > 2 and self._totals[1][0] <= now - _RATE_WINDOW_S:
            self._totals.popleft()

    def restart(self, totals: tuple[int, ...]) -> None:
        """Discard earlier totals, so that rates are computed from now on."""
        self._totals.clear()
        self.add(totals)

    def metrics(self) -> dict[str, float]:
        """Return the increase of each total per second."""
        (start, before), (end, after) = self._totals[0], self._totals[-1]
        seconds = max(end - start, 1e-9)
        return {f"{name}_per_s": (last - first) / seconds
                for name, first, last in zip(self._names, before, after, strict=True)}


class TreeTimes:
    """Seconds that each level of the tree spent on each part of its work, and mean times of operations.

    This class is not thread-safe: callers must hold a common lock when they call any method other than `timed`.

    Args:
        now: The clock.
        add: Function that is called at the end of each part of the update worker's work, with the name and the seconds
            of the part. The function must acquire the common lock, and call `add_part` with the same arguments.
    """

    def __init__(self, now: Callable[[], float], add: Callable[[str, float], None]) -> None:
        self._now = now
        self._began: float | None = None  # time at which the first update began
        self._until = 0.0  # time at which the latest part of the work ended
        self._watch = Stopwatch(now, add)
        self._seconds: Seconds = {"update": self._watch.seconds}
        self._operations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_TIME_WINDOW))

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Return a context manager that times a part of the update worker's work; see `timing.PARTS`.

        Only the thread that makes updates may call this method.
        """
        if self._began is None:
            self._began = self._now()
        return self._watch.part(part)

    def add_part(self, name: str, seconds: float) -> None:
        """Record that a part of the update worker's work has just ended, and how many seconds it took."""
        self._until = self._now()
        self._operations[name].append(seconds)

    def add_step(self, seconds: float) -> None:
        """Record that a whole update took `seconds`, for the mean time in `metrics`."""
        self._operations["step"].append(seconds)

    def add_seconds(self, seconds: Seconds) -> None:
        """Add `seconds` (level of the tree -> part of the level's work -> seconds) to the totals."""
        add_seconds(self._seconds, seconds)

    def receive(self, report: Report) -> None:
        """Add the times that a gradient worker reported."""
        add_seconds(self._seconds, report.timings)
        for name, (count, seconds) in report.times.items():
            if count == 1:
                self._operations[name].append(seconds)
            else:
                self._operations[name].extend([seconds / count] * min(count, _TIME_WINDOW))

    def seconds(self, num_collectors: int, num_grad_workers: int) -> Seconds:
        """Return the seconds that each level of the tree spent on each part of its work.

        The seconds cover the time from the start of the first update to the end of the latest update.
        """
        elapsed = 0.0 if self._began is None else self._until - self._began
        return with_idle(self._seconds, {"collection": elapsed * num_collectors,
                                         "gradients": elapsed * num_grad_workers, "update": elapsed})

    def metrics(self) -> dict[str, float | None]:
        """Return the mean time of each operation in milliseconds."""
        return {f"{name}_time_ms": 1e3 * statistics.fmean(self._operations[name]) if self._operations[name] else None
                for name in OPERATIONS}
