"""Tasks on a virtual clock: one runs at a time, and who is next depends on a seed alone.

A task is a thread that runs only while it holds the baton. Where it would wait it hands the baton to the task whose
turn comes first by virtual time; a seeded generator breaks ties. So nothing happens at the same time, and a debugger,
a print or a slow machine changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from pytorchrl.errors import DeadlockError

# Events kept for reports; the digest is of all.
_NUM_LAST_EVENTS = 200
# A wait without an end lasts until this moment, so that every deadline comes first.
_FAR_AWAY_S = 1e15
# An ended task has this many real seconds to come back from code that does not wait through the schedule.
_UNWIND_TIMEOUT_S = 30.0


class Ended(BaseException):
    """Raised where a task waits that has been ended."""


class Signal:
    """Whom to wake when something changes."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Task, int]] = []


class Task:
    """A logical thread.

    Attributes:
        owner: Whatever it belongs to; the schedule does not look at it.
        thread: The thread that it is.
        finished: Whether it has come to its end; `ended` is notified then.
        since: On the real clock, when it last went on.
    """

    def __init__(self, name: str, owner: Any) -> None:
        self.name, self.owner = name, owner
        self.thread = threading.current_thread()
        self.baton = threading.Lock()  # free while it is handed to this task
        self.baton.acquire()
        self.num_waits = 0    # a wake-up says for which wait it is; one for an earlier wait is void
        self.waits_for = ""   # empty while it could run
        self.killed = self.finished = False
        self.ended = Signal()
        self.since = time.perf_counter()

    def wake(self) -> None:
        """Let it look whether it is its turn; once too often does no harm."""
        if self.baton.locked():
            with contextlib.suppress(RuntimeError):  # somebody else has just done so
                self.baton.release()


class Schedule:
    """Decides which task runs.

    The thread that makes it is the first task, the driver.

    Args:
        seed: Of the choice among tasks whose turn comes at the same moment.

    Attributes:
        now: Virtual seconds since the start.
        current: The task that runs.
        tasks: Those that have not finished, the driver first.
        after_event: Called after every event, for checks of what must always hold; None for none.
        num_events: Number of events so far.
        last_events: The newest of them, oldest first.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self._driver = self.current = Task("driver", None)
        self.tasks: list[Task] = [self._driver]
        self._ties = random.Random(seed)
        self._order = itertools.count()
        # (moment, tie, order, task or None, number of its wait or function to call, whether it ends a wait in vain)
        self._agenda: list[tuple[float, float, int, Task | None, Any, bool | None]] = []
        self._num_fruitless = 0  # waits in a row that ended in vain
        self._interruption: BaseException | None = None  # for the driver, when it goes on
        self._digest = hashlib.blake2b(digest_size=16)
        self.after_event: Callable[[], None] | None = None
        self.num_events = 0
        self.last_events: deque[str] = deque(maxlen=_NUM_LAST_EVENTS)

    # Waiting

    def wait_until(self, ready: Callable[[], bool], signals: Iterable[Signal], timeout_s: float, what: str) -> bool:
        """Let others run until `ready()`.

        Args:
            ready: Looked at whenever one of `signals` is notified.
            signals: What may change it.
            timeout_s: Virtual seconds; 0 looks once, and lets nobody run.
            what: What is waited for, for reports.

        Returns:
            False after `timeout_s` in vain.
        """
        signals = list(signals)
        deadline = self.now + timeout_s
        if timeout_s > 0:
            self._let_others_go_first()
        while not ready():
            if self.now >= deadline:
                return False
            self._park(what, signals, deadline, in_vain=True)
        return True

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._park("time to pass", [], min(self.now + seconds, _FAR_AWAY_S), in_vain=False)

    def notify(self, signal: Signal) -> None:
        """Something changed: who waits for it looks again, from now on."""
        waiting, signal.waiting = signal.waiting, []
        self._num_fruitless = 0
        for task, number in waiting:
            if task.num_waits == number and task.waits_for:
                self._enter(self.now, task, number)

    def later(self, delay: float, function: Callable[[], object]) -> None:
        """Call `function`, which must not wait, after `delay` virtual seconds."""
        self._enter(self.now + delay, None, function)

    def record(self, what: str) -> None:
        """Note an event of the running task."""
        line = f"{self.now:.9f} {self.current.name}: {what}"
        self._digest.update(line.encode() + b"\n")
        self.num_events += 1
        self.last_events.append(line)
        if self.after_event is not None:
            self.after_event()

    @property
    def digest(self) -> str:
        """Hash of all events so far: equal for equal runs."""
        return self._digest.hexdigest()

    # Tasks

    def start(self, task: Task, thread: threading.Thread, body: Callable[[], None]) -> None:
        """Make `thread`, which has not been started, run `body` as a task."""
        def run() -> None:
            while self.current is not task:
                task.baton.acquire()
            task.waits_for, task.since = "", time.perf_counter()
            try:
                if not task.killed:
                    body()
            except Ended:
                pass
            finally:
                self._finish(task)

        task.thread = thread
        thread.run = run  # type: ignore[method-assign]
        self.tasks.append(task)
        task.num_waits, task.waits_for = 1, "its start"
        self._enter(self.now, task, 1)
        thread.start()

    def end(self, task: Task) -> None:
        """Let `Ended` be raised where a task waits, or will wait next; it has a chance to unwind at this moment."""
        task.killed = True
        if task is not self.current:
            task.num_waits += 1
            self._enter(self.now, task, task.num_waits)

    def end_all(self) -> None:
        """End every task but the driver, and wait until they have finished."""
        ending = self.tasks[1:]
        for task in ending:
            if not task.killed:
                self.end(task)
        self.wait_until(lambda: len(self.tasks) == 1, [task.ended for task in ending], math.inf, "the end of all tasks")
        for task in ending:
            task.thread.join(_UNWIND_TIMEOUT_S)

    def join(self, task: Task, timeout_s: float) -> bool:
        """Wait for a task to finish; False after `timeout_s` virtual seconds."""
        if not self.wait_until(lambda: task.finished, [task.ended], timeout_s, f"the end of {task.name}"):
            return False
        task.thread.join(_UNWIND_TIMEOUT_S)
        return not task.thread.is_alive()

    def check_running(self) -> None:
        """Raise `Ended` if the running task has been ended."""
        if self.current.killed:
            raise Ended

    # Turns

    def _enter(self, moment: float, task: Task | None, what: Any, in_vain: bool | None = False) -> None:
        heapq.heappush(self._agenda, (moment, self._ties.random(), next(self._order), task, what, in_vain))

    def _let_others_go_first(self) -> None:
        """Give those whose turn is at this moment too an equal chance."""
        self.check_running()
        if self._agenda and self._agenda[0][0] <= self.now:
            self._park("its turn", [], self.now, in_vain=None)

    def _park(self, what: str, signals: Iterable[Signal], deadline: float, *, in_vain: bool | None) -> None:
        """Hand the baton on; come back when notified or at the deadline."""
        task = self.current
        if threading.current_thread() is not task.thread:
            raise RuntimeError(f"{threading.current_thread().name} waits in the simulated runtime, but {task.name} is "
                               "the task that runs; start threads with Runtime.start_thread")
        self.check_running()
        task.num_waits += 1
        task.waits_for = what
        for signal in signals:
            signal.waiting.append((task, task.num_waits))
        if deadline < math.inf:
            self._enter(deadline, task, task.num_waits, in_vain)
        try:
            chosen = self._choose()
            if chosen is not task:
                self._swap(task, chosen)
        except KeyboardInterrupt:  # wherever it came, whoever had been chosen has a turn again
            for other in self.tasks:
                if other.waits_for:
                    self._enter(self.now, other, other.num_waits)
            raise
        finally:
            task.waits_for, task.since = "", time.perf_counter()
        if task is self._driver and self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            raise interruption
        self.check_running()

    def _swap(self, task: Task, chosen: Task) -> None:
        """Hand the baton to `chosen`, and wait until `task` has it again: `current` says who, `baton` only wakes."""
        self.current = chosen
        while self.current is not task:
            try:
                chosen.wake()
                task.baton.acquire()
            except KeyboardInterrupt as interruption:  # noqa: PERF203 - comes to the driver, who waits for its turn all the same
                self._interruption = interruption

    def _finish(self, task: Task) -> None:
        task.finished = True
        self.tasks.remove(task)
        self.notify(task.ended)
        self.current = self._choose()
        self.current.wake()

    def _choose(self) -> Task:
        """Whose turn is next; the driver's if it is to be interrupted, also by a deadlock."""
        try:
            while self._interruption is None or not self._driver.waits_for:
                task = self._take_next()
                if task is not None:
                    task.num_waits += 1
                    return task
        except DeadlockError as deadlock:
            self._interruption = deadlock
        self._driver.num_waits += 1
        return self._driver

    def _take_next(self) -> Task | None:
        """Move the clock to the next entry of the agenda; its task, or None if it was something else."""
        if not self._agenda:
            raise DeadlockError(self._who_waits())
        moment, _, _, task, what, in_vain = heapq.heappop(self._agenda)
        if task is not None and (task.finished or task.num_waits != what):
            return None
        self.now = max(self.now, moment)
        if in_vain is not None:  # having let others go first says nothing yet
            self._num_fruitless = self._num_fruitless + 1 if in_vain else 0
        if task is None:
            what()
        elif self._num_fruitless > 3 * len(self.tasks) + 3 and self._nobody_works():
            raise DeadlockError(self._who_waits())
        return task

    def _nobody_works(self) -> bool:
        """Whether all that is still to come are waits that end in vain."""
        return all(in_vain or (task is not None and (task.finished or task.num_waits != what))
                   for _, _, _, task, what, in_vain in self._agenda)

    def _who_waits(self) -> str:
        waiting = "; ".join(f"{task.name} waits for {task.waits_for}" for task in self.tasks if task.waits_for)
        return f"deadlock after {self.now:.6f} virtual seconds, nobody can go on: {waiting}"
