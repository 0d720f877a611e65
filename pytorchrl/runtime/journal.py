"""What decides a run beside its seeds, noted by each worker while it happens, and made to happen again.

Two things depend on timing: the order in which a worker takes the answers of others, and how the two threads of a
gradient worker take turns at its parameters (LeBlanc and Mellor-Crummey 1987, "Debugging parallel programs with instant
replay": noting the order of accesses is enough, what they accessed need not be kept).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from pytorchrl.errors import ReplayError
from pytorchrl.runtime.schedule import Schedule, Signal

Event = tuple[Any, ...]
"""What happened, to whom (an index among those asked), and numbers that must be the same when it happens again."""


class Part(NamedTuple):
    """Some of a journal: what was noted since the last part was taken."""

    events: list[Event]
    turns: list[int]
    """How often one thread read the parameters before each write of the other."""


WorkersPart = tuple[str, int, Part]
"""(worker, incarnation, part of its journal)."""


class Journal:
    """The journal of one worker. This one notes nothing and decides nothing.

    Attributes:
        lock: Guards the worker's parameters; held for a look at them that nothing else depends on.
        is_kept: Whether events are noted or compared, so that it pays to describe them.
    """

    is_kept = False

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def reading(self) -> AbstractContextManager[Any]:
        """The collecting thread's turn at the parameters."""
        return self.lock

    def writing(self) -> AbstractContextManager[Any]:
        """The learning thread's turn at the parameters."""
        return self.lock

    def note(self, *event: Any) -> None:
        """Something happened whose order depends on timing."""

    def upcoming(self) -> Event | None:
        """What has to happen next; None where that is left to timing."""
        return None

    def upcoming_of(self, kind: str, index: int) -> Event | None:
        """The next event of a kind that concerns `index`; None where that is left to timing."""
        return None

    def take(self) -> Part | None:
        """What was noted since the last call; None where nothing is."""
        return None

    def fail(self, error: BaseException) -> None:
        """The collecting thread has ended so; who would wait for its turns for ever is told."""

    def release(self) -> None:
        """The worker is about to stop: what it still does decides nothing, and has to wait for no turn."""


class Recording(Journal):
    """Notes what happens. One thread writes events, two take turns, and the learning one takes what was noted."""

    is_kept = True

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._turns: list[int] = []
        self.reads = self.depth = 0
        self._released = False
        self._read, self._write = _Read(self), _Write(self)

    def reading(self) -> AbstractContextManager[Any]:
        """Count it."""
        return self._read

    def writing(self) -> AbstractContextManager[Any]:
        """Note the reads before it; a write within a write is part of that."""
        return self._write

    def begin_write(self) -> None:
        """Of the outermost write, note the reads since the last."""
        if not self.depth and not self._released:
            self._turns.append(self.reads)
            self.reads = 0
        self.depth += 1

    def note(self, *event: Any) -> None:
        """Keep it, unless the worker is about to stop: what comes then is cut short and used by nobody."""
        if not self._released:
            self._events.append(event)

    def take(self) -> Part:
        """What was noted since the last call."""
        return Part(_take_all(self._events), _take_all(self._turns))

    def release(self) -> None:
        """Note nothing more."""
        self._released = True


class _Read:
    """The collecting thread's turn. There are some in every update: an object costs a fraction of a generator."""

    def __init__(self, journal: Recording) -> None:
        self._journal, self._lock = journal, journal.lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._journal.reads += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Write:
    """The learning thread's turn."""

    def __init__(self, journal: Recording) -> None:
        self._journal, self._lock = journal, journal.lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._journal.begin_write()

    def __exit__(self, *_: object) -> None:
        self._journal.depth -= 1
        self._lock.release()


def _take_all(items: list[Any]) -> list[Any]:
    """What is in a list now, taken out of it; another thread may go on appending."""
    taken = items[:]
    del items[:len(taken)]
    return taken


class Replaying(Journal):
    """Lets only happen what a record says comes next. Beyond its end, and after `release`, anything may.

    Args:
        worker: Whose journal it is, for messages.
        part: All that was noted of it.
        schedule: Of the simulated runtime, where alone a run can be repeated.
    """

    is_kept = True

    def __init__(self, worker: str, part: Part, schedule: Schedule) -> None:
        super().__init__()
        self._worker, self._schedule = worker, schedule
        self._events, self._turns = deque(part.events), deque(part.turns)
        self._num_events = self._num_turns = 0  # so far
        self._reads = self._depth = 0
        self._changed = Signal()
        self._failure: BaseException | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until the writes before it are made."""
        self._wait(lambda: self._reads < self._turns[0], "read")
        with self.lock:
            self._reads += 1
            try:
                yield
            finally:
                self._schedule.notify(self._changed)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait until the reads before it are made."""
        if not self._depth:
            self._wait(lambda: self._reads == self._turns[0], "write")
        with self.lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._end_turn()

    def _end_turn(self) -> None:
        if self._turns:
            self._turns.popleft()
        self._num_turns, self._reads = self._num_turns + 1, 0
        self._schedule.notify(self._changed)

    def _wait(self, is_its_turn: Callable[[], bool], what: str) -> None:
        def may_go_on() -> bool:
            return not self._turns or is_its_turn()

        self._schedule.wait_until(
            lambda: may_go_on() or self._failure is not None, [self._changed], float("inf"),
            f"its turn to {what} the parameters of {self._worker}, after write {self._num_turns} of its record")
        if self._failure is not None and not may_go_on():
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Wake who waits for a turn."""
        self._failure = error
        self._schedule.notify(self._changed)

    def note(self, *event: Any) -> None:
        """Compare what happened with the record.

        Raises:
            ReplayError: It is something else.
        """
        if not self._events:
            return
        recorded = self._events.popleft()
        self._num_events += 1
        if recorded != event:
            raise ReplayError(f"the replayed run differs from its record at event {self._num_events} of {self._worker}: "
                              f"recorded was {_show(recorded)}, now it is {_show(event)}")

    def upcoming(self) -> Event | None:
        """The next event of the record."""
        return self._events[0] if self._events else None

    def upcoming_of(self, kind: str, index: int) -> Event | None:
        """The next event of that kind for that index."""
        return next((event for event in self._events if event[:2] == (kind, index)), None)

    def release(self) -> None:
        """Forget what was still to come."""
        self._events.clear()
        self._turns.clear()
        self._schedule.notify(self._changed)


def _show(event: Event) -> str:
    return " ".join(map(str, event))
