"""Where the time goes: what the parts of each level's work are called, and how they are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

PARTS: Mapping[str, tuple[str, ...]] = {
    "collection": ("environment", "inference", "store", "encode", "decode", "send"),
    "gradients": ("wait", "decode", "copy", "grad", "average", "apply", "encode", "send"),
    "update": ("wait", "decode", "apply", "push"),
}
"""Level -> parts of the work of one of its workers; whatever is left of its time is "idle"."""

OPERATIONS = ("wait", "apply", "push", "step", "collect", "receive", "dequeue", "grad", "draw", "fetch", "priorities")
"""Operations whose mean times are metrics named `<operation>_time_ms`. The time of one operation may include others."""

Times = dict[str, tuple[int, float]]
"""Operation -> (number of times it was done, total seconds)."""
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
        booked: Called with a part and its seconds whenever one ends.

    Attributes:
        seconds: Part -> seconds so far, of parts that have ended.
        counts: Part -> how often a block was.
    """

    def __init__(self, now: Callable[[], float], booked: Callable[[str, float], None] | None = None) -> None:
        self.now, self.booked = now, booked
        self.within = 0.0
        """Seconds of the parts that have ended within the running one."""
        self.seconds: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self._taken: Times = {}

    def add(self, part: str, seconds: float) -> None:
        """Some of the time that has just passed was this part's."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.within += seconds

    def count(self, part: str, seconds: float) -> None:
        """Add a block that its caller timed, and count it."""
        self.add(part, seconds)
        self.counts[part] += 1

    def take(self) -> Times:
        """Return count and seconds of each counted part since the last call; a thread other than the timed one may call it."""
        found: Times = {}
        for part, count in tuple(self.counts.items()):
            count_before, seconds_before = self._taken.get(part, (0, 0.0))
            if count > count_before:
                seconds = self.seconds[part]
                found[part], self._taken[part] = (count - count_before, seconds - seconds_before), (count, seconds)
        return found

    def part(self, part: str) -> _Block:
        """Time the block of a `with` statement."""
        return _Block(self, part)


class _Block:
    """A part that is being timed. Written out, for that takes half as long as a generator with `contextmanager`."""

    __slots__ = ("_before", "_part", "_start", "_watch")

    def __init__(self, watch: Stopwatch, part: str) -> None:
        self._watch, self._part = watch, part

    def __enter__(self) -> None:
        watch = self._watch
        self._start, self._before, watch.within = watch.now(), watch.within, 0.0

    def __exit__(self, *error: object) -> None:
        watch, part = self._watch, self._part
        took = watch.now() - self._start
        seconds = max(0.0, took - watch.within)
        watch.seconds[part] = watch.seconds.get(part, 0.0) + seconds
        watch.counts[part] += 1
        watch.within = self._before + took
        if watch.booked is not None:
            watch.booked(part, seconds)
