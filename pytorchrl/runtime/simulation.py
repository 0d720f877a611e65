"""Run tasks on a virtual clock, one at a time, in an order that depends only on a seed.

A task is a thread, and only one task runs at a time. When the running task has to wait, the task that is due first in
virtual time runs next; a seeded generator breaks ties. Therefore, neither a debugger nor a print statement nor a slow
machine changes the order.
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

from pytorchrl.errors import CallOrderError, DeadlockError

# Number of events kept for reports; the digest covers all events.
_NUM_LAST_EVENTS = 200
# An infinite sleep lasts until this moment, which is later than any deadline.
_FAR_AWAY_S = 1e15
# Real (not virtual) seconds to wait until the thread of a finished task has exited.
_UNWIND_TIMEOUT_S = 30.0


class Ended(BaseException):
    """Exception that is raised in a waiting task to end the task."""


class Signal:
    """A condition variable for tasks: `Simulation.notify` wakes the tasks that wait for it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Task, int]] = []


class Task:
    """Thread that runs only when the simulation chooses it.

    Attributes:
        owner: Worker to which the task belongs, or None; the simulation does not use it.
        thread: Thread of the task.
        finished: Whether the task has finished; when it finishes, the signal `ended` is notified.
        since: `time.perf_counter()` when the task last resumed.
    """

    def __init__(self, name: str, owner: object) -> None:
        self.name, self.owner = name, owner
        self.thread = threading.current_thread()
        self.baton = threading.Lock()  # guards no data: it is released to wake the task's thread; see `wake`
        self.baton.acquire()
        self.num_waits = 0  # changes when a wait begins or ends; a wake-up with an earlier number is ignored
        self.waits_for = ""  # description of the current wait; empty while the task can run
        self.killed = self.finished = False
        self.ended = Signal()
        self.since = time.perf_counter()

    def wake(self) -> None:
        """Wake the task's thread, which then checks whether the task may run; unnecessary calls are harmless."""
        if self.baton.locked():
            with contextlib.suppress(RuntimeError):  # another thread has just released the lock
                self.baton.release()


Entry = tuple[Task, int] | Callable[[], object]


class Simulation:
    """Scheduler that decides which task runs. The thread that creates a simulation is its first task, the driver.

    Args:
        seed: Seed of the random choice among tasks that are due at the same moment.

    Attributes:
        now: Virtual seconds since the start.
        current: The running task.
        tasks: The tasks that have not finished; the first is the driver.
        after_event: Function to call after every event, for checks of invariants; None: no call.
        num_events: Number of events so far.
        last_events: The newest events, in the order in which they occurred.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self._driver = self.current = Task("driver", None)
        self.tasks: list[Task] = [self._driver]
        self._ties = random.Random(seed)
        self._order = itertools.count()
        # Heap of (moment, random number that breaks ties, order of insertion, entry, is_timeout). `entry` is a
        # function to call, or a pair (task, number), which resumes the task if `task.num_waits` still equals the
        # number. `is_timeout` is True for the timeout of a wait, None for a task that waits only to let other tasks go
        # first, and False in all other cases.
        self._agenda: list[tuple[float, float, int, Entry, bool | None]] = []
        self._num_fruitless = 0  # number of consecutive waits that timed out
        self._interruption: BaseException | None = None  # raised in the driver when the driver resumes
        self._digest = hashlib.blake2b(digest_size=16)
        self.after_event: Callable[[], None] | None = None
        self.num_events = 0
        self.last_events: deque[str] = deque(maxlen=_NUM_LAST_EVENTS)

    # Waiting

    def wait_until(self, ready: Callable[[], bool], signals: Iterable[Signal], timeout_s: float, what: str) -> bool:
        """Let other tasks run until `ready()` is true.

        Args:
            ready: Function that returns whether the wait is over; called whenever one of `signals` is notified.
            signals: Signals of the changes on which `ready` depends.
            timeout_s: Timeout in virtual seconds; with 0, `ready` is called once and no other task runs.
            what: Description of the wait, for reports.

        Returns:
            Whether `ready()` became true within `timeout_s`.
        """
        signals = list(signals)
        deadline = self.now + timeout_s
        if timeout_s > 0:
            self._let_others_go_first()
        while not ready():
            if self.now >= deadline:
                return False
            self._park(what, signals, deadline, is_timeout=True)
        return True

    def sleep(self, seconds: float) -> None:
        """Let other tasks run for `seconds` virtual seconds."""
        self._park("time to pass", [], min(self.now + seconds, _FAR_AWAY_S), is_timeout=False)

    def notify(self, signal: Signal) -> None:
        """Let each task that waits for `signal` resume at the current virtual time, to check its condition again."""
        waiting, signal.waiting = signal.waiting, []
        self._num_fruitless = 0
        for task, number in waiting:
            if task.num_waits == number and task.waits_for:
                self._enter(self.now, (task, number))

    def later(self, delay: float, function: Callable[[], object]) -> None:
        """Call `function`, which must not wait, after `delay` virtual seconds."""
        self._enter(self.now + delay, function)

    def record(self, what: str) -> None:
        """Record an event of the running task."""
        line = f"{self.now:.9f} {self.current.name}: {what}"
        self._digest.update(line.encode() + b"\n")
        self.num_events += 1
        self.last_events.append(line)
        if self.after_event is not None:
            self.after_event()

    @property
    def digest(self) -> str:
        """Hash of all events so far; equal runs have equal hashes."""
        return self._digest.hexdigest()

    # Tasks

    def start(self, task: Task, thread: threading.Thread, body: Callable[[], None]) -> None:
        """Start `thread` as the thread of `task`; `body` is called when the simulation first chooses the task.

        The thread must not have been started before.
        """
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
        self._enter(self.now, (task, 1))
        thread.start()

    def end(self, task: Task) -> None:
        """End a task by raising `Ended` in it: now if the task is waiting, at its next wait if the task is running."""
        task.killed = True
        if task is not self.current:
            task.num_waits += 1
            self._enter(self.now, (task, task.num_waits))

    def end_all(self) -> None:
        """End all tasks except the driver, and wait until they have finished."""
        ending = self.tasks[1:]
        for task in ending:
            if not task.killed:
                self.end(task)
        self.wait_until(lambda: len(self.tasks) == 1, [task.ended for task in ending], math.inf, "the end of all tasks")
        for task in ending:
            task.thread.join(_UNWIND_TIMEOUT_S)

    def join(self, task: Task, timeout_s: float) -> bool:
        """Wait for a task to finish; return whether it finished within `timeout_s` virtual seconds."""
        if not self.wait_until(lambda: task.finished, [task.ended], timeout_s, f"the end of {task.name}"):
            return False
        task.thread.join(_UNWIND_TIMEOUT_S)
        return not task.thread.is_alive()

    def check_running(self) -> None:
        """Raise `Ended` if the running task has been ended."""
        if self.current.killed:
            raise Ended

    # Turns

    def _enter(self, moment: float, entry: Entry, is_timeout: bool | None = False) -> None:
        heapq.heappush(self._agenda, (moment, self._ties.random(), next(self._order), entry, is_timeout))

    def _let_others_go_first(self) -> None:
        """Give other tasks that are due at this moment an equal chance to run first."""
        self.check_running()
        if self._agenda and self._agenda[0][0] <= self.now:
            self._park("its turn", [], self.now, is_timeout=None)

    def _park(self, what: str, signals: Iterable[Signal], deadline: float, *, is_timeout: bool | None) -> None:
        """Let other tasks run until one of `signals` is notified, or until the deadline.

        Args:
            what: Description of the wait, for reports.
            signals: The signals that end the wait.
            deadline: Virtual time at which the wait ends at the latest.
            is_timeout: True if the deadline is a timeout, False if the task sleeps until the deadline, None if the task
                only lets other tasks go first.
        """
        task = self.current
        if threading.current_thread() is not task.thread:
            raise CallOrderError(f"{threading.current_thread().name} waits in the simulated runtime, but {task.name} "
                                 "is the task that runs; start threads with Runtime.start_thread")
        self.check_running()
        task.num_waits += 1
        task.waits_for = what
        for signal in signals:
            signal.waiting.append((task, task.num_waits))
        if deadline < math.inf:
            self._enter(deadline, (task, task.num_waits), is_timeout)
        try:
            chosen = self._choose()
            if chosen is not task:
                self._swap(task, chosen)
        except KeyboardInterrupt:  # `_choose` may have removed an entry, so make every waiting task due
            for other in self.tasks:
                if other.waits_for:
                    self._enter(self.now, (other, other.num_waits))
            raise
        finally:
            task.waits_for, task.since = "", time.perf_counter()
        if task is self._driver and self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            raise interruption
        self.check_running()

    def _swap(self, task: Task, chosen: Task) -> None:
        """Let the task `chosen` run, and wait until `task` may run again.

        The attribute `current` decides which task may run. The lock `Task.baton` only wakes a thread, which then checks
        `current`.
        """
        self.current = chosen
        while self.current is not task:
            try:
                chosen.wake()
                task.baton.acquire()
            except KeyboardInterrupt as interruption:  # noqa: PERF203 - raised when the driver resumes
                self._interruption = interruption

    def _finish(self, task: Task) -> None:
        task.finished = True
        self.tasks.remove(task)
        self.notify(task.ended)
        self.current = self._choose()
        self.current.wake()

    def _choose(self) -> Task:
        """Return the task that runs next: the task that is due first or, if an exception is pending, the driver.

        The driver then raises the exception: `DeadlockError` if no task can continue, `KeyboardInterrupt` after Ctrl-C.
        """
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
        """Remove the earliest entry from the agenda. Unless the entry is obsolete, advance the clock to its moment.

        Returns:
            The task that the entry resumes. If the entry is a function, the function is called, and None is returned.
            If the entry is obsolete, None is returned.
        """
        if not self._agenda:
            raise DeadlockError(self._describe_waits())
        moment, _, _, entry, is_timeout = heapq.heappop(self._agenda)
        if _is_void(entry):
            return None
        self.now = max(self.now, moment)
        if is_timeout is not None:  # a wait only to let other tasks go first does not change the count
            self._num_fruitless = self._num_fruitless + 1 if is_timeout else 0
        if not isinstance(entry, tuple):
            entry()
            return None
        if self._num_fruitless > 3 * len(self.tasks) + 3 and self._nobody_works():
            raise DeadlockError(self._describe_waits())
        return entry[0]

    def _nobody_works(self) -> bool:
        """Return whether only timeouts are left in the agenda, so that no task has work to do."""
        return all(is_timeout or _is_void(entry) for _, _, _, entry, is_timeout in self._agenda)

    def _describe_waits(self) -> str:
        waiting = "; ".join(f"{task.name} waits for {task.waits_for}" for task in self.tasks if task.waits_for)
        return f"deadlock after {self.now:.6f} virtual seconds, no task can continue: {waiting}"


def _is_void(entry: Entry) -> bool:
    """Return whether an entry is obsolete, because its task has finished or its wait is over."""
    return isinstance(entry, tuple) and (entry[0].finished or entry[0].num_waits != entry[1])
