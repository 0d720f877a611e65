"""Record the order of the timing-dependent events in a run, and repeat a run from such a record.

Two orders depend on timing: the order in which a worker processes the answers of other workers, and the order in which
the two threads of a gradient worker access its parameters. Recording these orders is enough; the accessed data need not
be recorded (LeBlanc and Mellor-Crummey 1987, "Debugging parallel programs with instant replay").
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar

from pytorchrl.errors import ReplayError
from pytorchrl.runtime.simulation import Signal, Simulation
from pytorchrl.support.untyped import Json

T = TypeVar("T")

Event = tuple[Json, ...]
"""Kind of the event, index of the worker concerned, and values that must be equal when the event is repeated."""


class Section(NamedTuple):
    """Section of a journal: the entries since the end of the previous section."""

    events: list[Event]
    turns: list[int]
    """For each write of the parameters: the number of reads by the collector thread since the previous write."""


WorkersPart = tuple[str, int, Section]
"""(worker, incarnation, section of its journal)."""


class Journal:
    """Record or enforce the order of one worker's timing-dependent events. This base class does neither.

    Attributes:
        lock: Lock that guards the worker's parameters. Use the lock directly, instead of `reading` or `writing`, for
            accesses whose order does not affect the rest of the run.
        is_kept: False if `note` does nothing; True if `note` records events or compares them with a record.
    """

    is_kept = False

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the parameters: the collector thread reads, the learner thread writes

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which the collector thread may read the parameters."""
        return self.lock

    def writing(self) -> AbstractContextManager[object]:
        """Return a context in which the learner thread may write the parameters."""
        return self.lock

    def note(self, *event: object) -> None:
        """Record the worker's next event, or compare the event with the record."""

    def upcoming(self) -> Event | None:
        """Return the event that must happen next; None if no order is enforced."""
        return None

    def upcoming_of(self, kind: str, index: int) -> Event | None:
        """Return the next event of this kind that concerns the worker `index`; None if no order is enforced."""
        return None

    def take(self) -> Section | None:
        """Return the entries since the previous call; None if this journal records nothing."""
        return None

    def fail(self, error: BaseException) -> None:
        """Raise `error` in any thread that waits for its turn, because the collector thread has failed with `error`."""

    def release(self) -> None:
        """Stop recording or enforcing an order; called when the worker stops, because later events have no effect."""


class Recording(Journal):
    """Journal that records the order of events.

    The learner thread may call `take` while another thread calls `note`; see `_take_all`.
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
        """Return a context manager whose `with` block counts as one read of the parameters."""
        return self._read

    def writing(self) -> AbstractContextManager[object]:
        """Return a context in which the learner thread may write the parameters.

        When the context is entered, the number of reads by the collector thread since the previous write is recorded.
        Nested writes count as one write.
        """
        return self._write

    def begin_write(self) -> None:
        """Begin a write; unless it is nested in another write, record the number of reads since the previous write."""
        if not self.depth and not self._released:
            self._turns.append(self.reads)
            self.reads = 0
        self.depth += 1

    def note(self, *event: object) -> None:
        """Record an event. After `release`, ignore events: the worker is stopping, so they no longer affect the run."""
        if not self._released:
            self._events.append(event)

    def take(self) -> Section:
        """Return the entries since the previous call."""
        return Section(_take_all(self._events), _take_all(self._turns))

    def release(self) -> None:
        """Stop recording."""
        self._released = True


class _Read:
    """Context manager of one read access by the collector thread.

    This is a class, because every update contains reads, and a generator-based context manager would be several times
    slower.
    """

    def __init__(self, journal: Recording) -> None:
        self._journal, self._lock = journal, journal.lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._journal.reads += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Write:
    """Context manager of one write access by the learner thread."""

    def __init__(self, journal: Recording) -> None:
        self._journal, self._lock = journal, journal.lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._journal.begin_write()

    def __exit__(self, *_: object) -> None:
        self._journal.depth -= 1
        self._lock.release()


def _take_all(items: list[T]) -> list[T]:
    """Remove and return the items of a list to which another thread may be appending."""
    taken = items[:]
    del items[:len(taken)]
    return taken


class Replaying(Journal):
    """Journal that enforces the order of a record until the record ends or `release` is called.

    Args:
        worker: Name of the worker, for error messages.
        part: All recorded entries of the worker.
        simulation: Simulation of the simulated runtime; only this runtime can repeat a run.
    """

    is_kept = True

    def __init__(self, worker: str, part: Section, simulation: Simulation) -> None:
        super().__init__()
        self._worker, self._simulation = worker, simulation
        self._events, self._turns = deque(part.events), deque(part.turns)
        self._num_events = self._num_turns = 0  # numbers of recorded events and writes that have been replayed
        self._reads = self._depth = 0
        self._changed = Signal()
        self._failure: BaseException | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait for the writes that precede this read in the record, then run the `with` block."""
        self._wait(lambda: not self._turns or self._reads < self._turns[0], "read")
        with self.lock:
            self._reads += 1
            try:
                yield
            finally:
                self._simulation.notify(self._changed)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait for the reads that precede this write in the record, then run the `with` block.

        A write that is not in the record waits until all recorded events have been repeated, because all of them
        happened before it.
        """
        if not self._depth:
            self._wait(lambda: self._reads == self._turns[0] if self._turns else not self._events, "write")
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
        self._simulation.notify(self._changed)

    def _wait(self, is_its_turn: Callable[[], bool], what: str) -> None:
        self._simulation.wait_until(
            lambda: is_its_turn() or self._failure is not None, [self._changed], float("inf"),
            f"its turn to {what} the parameters of {self._worker}, after write {self._num_turns} of its record")
        if self._failure is not None and not is_its_turn():
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Wake any thread that waits for its turn; that thread raises `error`."""
        self._failure = error
        self._simulation.notify(self._changed)

    def note(self, *event: object) -> None:
        """Compare an event with the record.

        Raises:
            ReplayError: The event differs from the recorded event.
        """
        if not self._events:
            return
        recorded = self._events.popleft()
        self._num_events += 1
        if not self._events:
            self._simulation.notify(self._changed)
        if recorded != event:
            raise ReplayError(f"the replayed run differs from its record at event {self._num_events} of {self._worker}:"
                              f" the record has {_show(recorded)}, the replay has {_show(event)}")

    def upcoming(self) -> Event | None:
        """Return the next event of the record; None at its end."""
        return self._events[0] if self._events else None

    def upcoming_of(self, kind: str, index: int) -> Event | None:
        """Return the next recorded event of this kind that concerns the worker `index`; None if there is none."""
        return next((event for event in self._events if event[:2] == (kind, index)), None)

    def release(self) -> None:
        """Discard the remaining entries of the record."""
        self._events.clear()
        self._turns.clear()
        self._simulation.notify(self._changed)


def _show(event: Event) -> str:
    return " ".join(map(str, event))
