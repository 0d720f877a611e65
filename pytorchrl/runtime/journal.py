"""Record what decides a run besides its seeds, and repeat a run from that record.

Two things depend on timing: the order in which a worker takes the answers of others, and the order in which the two
threads of a gradient worker access its parameters. Recording the order of accesses is enough, and the accessed data
need not be kept (LeBlanc and Mellor-Crummey 1987, "Debugging parallel programs with instant replay").
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

from pytorchrl.errors import ReplayError
from pytorchrl.runtime.schedule import Schedule, Signal

T = TypeVar("T")

Event = tuple[Any, ...]  # str first, then numbers and names, which readers unpack by kind
"""(kind of event, index of the worker concerned, numbers that must be equal when the event is repeated ...)."""


class Part(NamedTuple):
    """Section of a journal: the entries since the previous section was taken."""

    events: list[Event]
    turns: list[int]
    """Number of reads of the parameters by one thread before each write of the other."""


WorkersPart = tuple[str, int, Part]
"""(worker, incarnation, section of its journal)."""


class Journal:
    """Journal of one worker. This base class records nothing and enforces no order.

    Attributes:
        lock: Guards the worker's parameters. Hold it alone for accesses whose order affects nothing else.
        is_kept: Whether events are recorded or compared, so that they have to be described.
    """

    is_kept = False

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which the collector thread may read the parameters."""
        return self.lock

    def writing(self) -> AbstractContextManager[object]:
        """Return a context in which the learning thread may write the parameters."""
        return self.lock

    def note(self, *event: Any) -> None:
        """Record an event whose order depends on timing."""

    def upcoming(self) -> Event | None:
        """Return the event that has to happen next; None if timing decides."""
        return None

    def upcoming_of(self, kind: str, index: int) -> Event | None:
        """Return the next event of a kind that concerns `index`; None if timing decides."""
        return None

    def take(self) -> Part | None:
        """Return the entries since the previous call; None if this journal records nothing."""
        return None

    def fail(self, error: BaseException) -> None:
        """Record that the collector thread failed, and wake any thread waiting for its turn."""

    def release(self) -> None:
        """Stop recording and enforcing, because the worker is about to stop and its last steps affect nothing."""


class Recording(Journal):
    """Journal that records.

    One thread adds events, two access the parameters, and the learning thread takes the entries.
    """

    is_kept = True

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._turns: list[int] = []
        self.reads = self.depth = 0
        self._released = False
        self._read, self._write = _Read(self), _Write(self)

    def reading(self) -> AbstractContextManager[object]:
        """Return a context that counts the read."""
        return self._read

    def writing(self) -> AbstractContextManager[object]:
        """Return a context that records the reads before the write; a nested write belongs to the outer one."""
        return self._write

    def begin_write(self) -> None:
        """Record the number of reads since the previous write if this write is not nested."""
        if not self.depth and not self._released:
            self._turns.append(self.reads)
            self.reads = 0
        self.depth += 1

    def note(self, *event: Any) -> None:
        """Record an event, unless the worker is about to stop: later events are incomplete, and nobody uses them."""
        if not self._released:
            self._events.append(event)

    def take(self) -> Part:
        """Return the entries since the previous call."""
        return Part(_take_all(self._events), _take_all(self._turns))

    def release(self) -> None:
        """Stop recording."""
        self._released = True


class _Read:
    """Read by the collector thread. Every update has some, and an object costs a fraction of a generator."""

    def __init__(self, journal: Recording) -> None:
        self._journal, self._lock = journal, journal.lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._journal.reads += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Write:
    """Write by the learning thread."""

    def __init__(self, journal: Recording) -> None:
        self._journal, self._lock = journal, journal.lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._journal.begin_write()

    def __exit__(self, *_: object) -> None:
        self._journal.depth -= 1
        self._lock.release()


def _take_all(items: list[T]) -> list[T]:
    """Remove and return the items of a list, to which another thread may be appending."""
    taken = items[:]
    del items[:len(taken)]
    return taken


class Replaying(Journal):
    """Journal that enforces the order of a record, up to its end or until `release`.

    Args:
        worker: Name of the worker, for error messages.
        part: All recorded entries of the worker.
        schedule: Schedule of the simulated runtime, the only one that can repeat a run.
    """

    is_kept = True

    def __init__(self, worker: str, part: Part, schedule: Schedule) -> None:
        super().__init__()
        self._worker, self._schedule = worker, schedule
        self._events, self._turns = deque(part.events), deque(part.turns)
        self._num_events = self._num_turns = 0  # repeated so far
        self._reads = self._depth = 0
        self._changed = Signal()
        self._failure: BaseException | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until the recorded writes before this read are done, then read."""
        self._wait(lambda: self._reads < self._turns[0], "read")
        with self.lock:
            self._reads += 1
            try:
                yield
            finally:
                self._schedule.notify(self._changed)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait until the recorded reads before this write are done, then write."""
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
        def may_continue() -> bool:
            return not self._turns or is_its_turn()

        self._schedule.wait_until(
            lambda: may_continue() or self._failure is not None, [self._changed], float("inf"),
            f"its turn to {what} the parameters of {self._worker}, after write {self._num_turns} of its record")
        if self._failure is not None and not may_continue():
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Wake any thread waiting for its turn, which raises `error`."""
        self._failure = error
        self._schedule.notify(self._changed)

    def note(self, *event: Any) -> None:
        """Compare an event with the record.

        Raises:
            ReplayError: The event differs from the recorded one.
        """
        if not self._events:
            return
        recorded = self._events.popleft()
        self._num_events += 1
        if recorded != event:
            raise ReplayError(f"the replayed run differs from its record at event {self._num_events} of "
                              f"{self._worker}: "
                              f"recorded was {_show(recorded)}, now it is {_show(event)}")

    def upcoming(self) -> Event | None:
        """Return the next event of the record; None at its end."""
        return self._events[0] if self._events else None

    def upcoming_of(self, kind: str, index: int) -> Event | None:
        """Return the next recorded event of this kind for this index; None if there is none."""
        return next((event for event in self._events if event[:2] == (kind, index)), None)

    def release(self) -> None:
        """Discard the rest of the record."""
        self._events.clear()
        self._turns.clear()
        self._schedule.notify(self._changed)


def _show(event: Event) -> str:
    return " ".join(map(str, event))
