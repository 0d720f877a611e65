"""Workers in one process on a virtual clock: the same seed gives the same run, bit for bit, asynchronous or not.

Every worker and thread of a scheme is a *task*. A task has a thread of its own, but only the one that holds the baton
runs. Where it would wait (for a result, a queue, an event, for time to pass) it hands the baton to the task whose turn
comes first by virtual time; a seeded generator breaks ties. So nothing happens at the same time, and a debugger, a
print or a slow machine changes nothing.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pytorchrl.errors import DeadlockError, WorkerLostError
from pytorchrl.runtime.base import BoundedQueue, Future, Handle, Outcome, Runtime, T, W
from pytorchrl.runtime.costs import Costs

# Events kept for reports; the digest is of all.
_NUM_LAST_EVENTS = 200
# A killed or closing task has this many real seconds to come back from code that does not wait through the runtime.
_UNWIND_TIMEOUT_S = 30.0


class _Killed(BaseException):
    """Unwinds a task whose worker has been killed."""


class _Task:
    """A logical thread. It runs while it holds the baton, and parks where it waits."""

    def __init__(self, name: str, actor: _Actor | None) -> None:
        self.name, self.actor = name, actor
        self.baton = threading.Lock()  # free while it is handed to this task
        self.baton.acquire()
        self.thread = threading.current_thread()
        self.waits = 0          # wake-ups carry the number of the wait that they are for; older ones are void
        self.parked_for = ""    # what it waits for; "" while it could run
        self.is_sleeping = False
        self.killed = self.finished = False
        self.since = time.perf_counter()  # on the real clock, when it last went on
        self.ended = _Signal()


class _Signal:
    """Whom to wake when something changes."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_Task, int]] = []


class _Actor:
    """A worker: calls in order, one at a time, in a task of its own."""

    def __init__(self, name: str, owner: _Actor | None, build: Callable[[], Any]) -> None:
        self.name, self.owner, self.build = name, owner, build
        self.worker: Any = None
        self.failure: BaseException | None = None
        self.calls: deque[tuple[_Result, str, tuple[Any, ...], dict[str, Any]]] = deque()
        self.early: list[Callable[[], object]] = []  # signals to a worker that is not built yet
        self.unsettled: dict[_Result, None] = {}
        self.arrived = _Signal()
        self.next_arrival = 0.0
        self.dead = False


class _Result:
    """What a call will have brought."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.outcome: tuple[Any, BaseException | None] | None = None
        self.done = _Signal()


class SimulatedQueue(BoundedQueue[T]):
    """A bounded queue on the virtual clock."""

    def __init__(self, maxsize: int, runtime: SimulatedRuntime) -> None:
        super().__init__(maxsize)
        self._runtime = runtime
        self._items: deque[T] = deque()
        self._changed = _Signal()

    def put(self, item: T, timeout_s: float) -> bool:
        """Add `item`; False if there was no room within `timeout_s` virtual seconds."""
        sim = self._runtime
        if not sim.wait_until(lambda: len(self._items) < self.maxsize, [self._changed], timeout_s, "room in a queue"):
            return False
        self._items.append(item)
        sim.record("put", f"{len(self._items)} of {self.maxsize}")
        sim.notify(self._changed)
        return True

    def get(self, timeout_s: float) -> T:
        """Take the oldest item, or raise `queue.Empty` after `timeout_s` virtual seconds."""
        sim = self._runtime
        if not sim.wait_until(lambda: bool(self._items), [self._changed], timeout_s, "an item in a queue"):
            raise queue.Empty
        item = self._items.popleft()
        sim.record("get", f"{len(self._items)} left")
        sim.notify(self._changed)
        return item

    def qsize(self) -> int:
        """Number of items in it."""
        return len(self._items)

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._items


class SimulatedEvent(threading.Event):
    """An event on the virtual clock."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        super().__init__()
        self._runtime, self._changed = runtime, _Signal()

    def set(self) -> None:
        """Wake all who wait for it."""
        super().set()
        self._runtime.notify(self._changed)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set within `timeout` virtual seconds."""
        return self._runtime.wait_until(
            self.is_set, [self._changed], math.inf if timeout is None else timeout, "an event")


class SimulatedRuntime(Runtime):
    """Everything in this process, one task at a time, on a virtual clock.

    Args:
        seed: Of the schedule: breaks ties and draws costs.
        costs: What operations take, in virtual seconds; see `Costs`.

    Attributes:
        after_event: Called after every event, for checks of what must always hold; None for none.
        num_events: Number of events so far.
        last_events: The newest of them, oldest first.
    """

    name = "simulated"

    def __init__(self, seed: int = 0, costs: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.seed = seed
        self._costs = Costs(costs, seed)
        self._ties = random.Random(seed)
        self._time = 0.0
        self._order = itertools.count()
        # (time, tie, order, task or None, number of its wait or a function to call, whether that is a deadline)
        self._agenda: list[tuple[float, float, int, _Task | None, Any, bool]] = []
        self._driver = self._current = _Task("driver", None)
        self._tasks: list[_Task] = [self._driver]
        self._actors: list[_Actor] = []
        self._fruitless = 0  # deadlines in a row after which nothing had changed
        self._interruption: BaseException | None = None
        self._closed = False
        self._digest = hashlib.blake2b(digest_size=16)
        self.after_event: Callable[[], None] | None = None
        self.num_events = 0
        self.last_events: deque[str] = deque(maxlen=_NUM_LAST_EVENTS)

    # The schedule

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._time

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._park("time to pass", [], self._time + seconds, sleeping=True)

    def points(self, worker: str) -> Callable[[str], bool] | None:
        """At each point the worker's clock moves on by what it did."""
        def point(operation: str) -> bool:
            self.sleep(self._costs.draw(operation, worker, self._current.since))
            return False

        return point

    def make_queue(self, maxsize: int) -> BoundedQueue[Any]:
        """A bounded queue on the virtual clock."""
        return SimulatedQueue(maxsize, self)

    def make_event(self) -> threading.Event:
        """An event on the virtual clock."""
        return SimulatedEvent(self)

    def wait_until(self, ready: Callable[[], bool], signals: Iterable[_Signal], timeout_s: float, what: str) -> bool:
        """Wait until `ready()`, looking again whenever one of `signals` is notified; False after `timeout_s`."""
        signals = list(signals)
        deadline = self._time + timeout_s
        if timeout_s > 0:
            self._yield()
        while not ready():
            if self._time >= deadline:
                return False
            self._park(what, signals, deadline)
        return True

    def notify(self, signal: _Signal) -> None:
        """Something changed: those who wait for it look again, from now on."""
        waiting, signal.waiting = signal.waiting, []
        self._fruitless = 0
        for task, number in waiting:
            if task.waits == number and task.parked_for:
                self._enter(self._time, task, number)

    def record(self, kind: str, detail: str = "") -> None:
        """Note an event of the running task."""
        line = f"{self._time:.9f} {self._current.name}: {kind} {detail}".rstrip()
        self._digest.update(line.encode() + b"\n")
        self.num_events += 1
        self.last_events.append(line)
        if self.after_event is not None:
            self.after_event()

    @property
    def digest(self) -> str:
        """Hash of all events so far: equal for equal runs."""
        return self._digest.hexdigest()

    def _enter(self, moment: float, task: _Task | None, what: Any, is_deadline: bool = False) -> None:
        heapq.heappush(self._agenda, (moment, self._ties.random(), next(self._order), task, what, is_deadline))

    def _later(self, delay: float, function: Callable[[], object]) -> None:
        self._enter(self._time + delay, None, function)

    def _yield(self) -> None:
        """Give others whose turn is now a chance to go first."""
        if self._agenda and self._agenda[0][0] <= self._time:
            self._park("its turn", [], self._time, sleeping=True)
        elif self._current.killed:
            raise _Killed

    def _park(self, what: str, signals: Iterable[_Signal], deadline: float, *, sleeping: bool = False) -> None:
        """Hand the baton on; come back when notified or at the deadline."""
        task = self._current
        if threading.current_thread() is not task.thread:
            raise RuntimeError(f"{threading.current_thread().name} waits on the simulated runtime, but it is not the "
                               f"thread that runs now ({task.name}); start threads with Runtime.start_thread")
        if task.killed:
            raise _Killed
        task.waits += 1
        task.parked_for, task.is_sleeping = what, sleeping
        for signal in signals:
            signal.waiting.append((task, task.waits))
        if deadline < math.inf:
            self._enter(deadline, task, task.waits, is_deadline=not sleeping)
        self._switch(task)
        task.parked_for, task.is_sleeping = "", False
        task.since = time.perf_counter()
        if task is self._driver and self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            raise interruption
        if task.killed:
            raise _Killed

    def _switch(self, task: _Task) -> None:
        try:
            chosen = self._choose()
        except DeadlockError as error:
            chosen = self._driver
            self._interruption = error
        if chosen is task:
            return
        self._current = chosen
        chosen.baton.release()
        while True:
            try:
                task.baton.acquire()
                return
            except KeyboardInterrupt as interruption:  # noqa: PERF203 - comes to the driver, who waits for its turn all the same
                self._interruption = interruption

    def _choose(self) -> _Task:
        """The task whose turn is next; functions that are due are called on the way."""
        while True:
            if self._interruption is not None and self._driver.parked_for:
                self._driver.waits += 1
                return self._driver
            if not self._agenda:
                raise DeadlockError(self._who_waits())
            moment, _, _, task, what, is_deadline = heapq.heappop(self._agenda)
            if task is not None and (task.finished or task.waits != what):
                continue
            self._time = max(self._time, moment)
            if task is None:
                self._fruitless = 0
                what()
                continue
            if is_deadline:
                self._fruitless += 1
                if self._fruitless > 3 * len(self._tasks) + 3 and self._nobody_works():
                    raise DeadlockError(self._who_waits())
            else:
                self._fruitless = 0
            task.waits += 1
            return task

    def _nobody_works(self) -> bool:
        """Whether all that is to come are deadlines of waits."""
        return all(is_deadline or (task is not None and (task.finished or task.waits != what))
                   for _, _, _, task, what, is_deadline in self._agenda)

    def _who_waits(self) -> str:
        waiting = "; ".join(f"{task.name} waits for {task.parked_for}" for task in self._tasks if task.parked_for)
        return f"deadlock at {self._time:.6f} virtual seconds, nobody can go on: {waiting}"

    # Tasks

    def _start_task(self, task: _Task, thread: threading.Thread, body: Callable[[], None]) -> None:
        def run() -> None:
            task.baton.acquire()
            task.parked_for = ""
            try:
                if not task.killed:
                    body()
            except _Killed:
                pass
            finally:
                self._finish(task)

        task.thread = thread
        thread.run = run  # type: ignore[method-assign]
        self._tasks.append(task)
        task.waits += 1
        task.parked_for = "its start"
        self._enter(self._time, task, task.waits)
        thread.start()

    def _finish(self, task: _Task) -> None:
        """The running task ends: hand the baton on for good."""
        task.finished = True
        self._tasks.remove(task)
        self.notify(task.ended)
        try:
            chosen = self._choose()
        except DeadlockError as error:
            self._interruption = error
            chosen = self._driver
        self._current = chosen
        chosen.baton.release()

    def start_thread(self, thread: threading.Thread) -> None:
        """Start a thread as a task; it ends with the worker that started it."""
        task = _Task(thread.name, self._current.actor)
        thread.task = task  # type: ignore[attr-defined]
        self._start_task(task, thread, thread.run)

    def join_thread(self, thread: threading.Thread, timeout_s: float) -> bool:
        """Wait for a thread to end; False if it is still alive after `timeout_s` virtual seconds."""
        task: _Task | None = getattr(thread, "task", None)
        if task is None:
            return not thread.is_alive()
        if not self.wait_until(lambda: task.finished, [task.ended], timeout_s, f"the end of {task.name}"):
            return False
        thread.join(_UNWIND_TIMEOUT_S)
        return not thread.is_alive()

    # Actors

    def start_actor(self, cls: type[W], params: Mapping[str, Any], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` as a task of its own; resources are unlimited."""
        actor = _Actor(name, self._current.actor, lambda: cls(**params))
        self._actors.append(actor)
        task = _Task(name, actor)
        self._start_task(task, threading.Thread(name=name, daemon=True), lambda: self._serve(actor))
        self.record("start", name)
        return Handle(self, name, actor)

    def _serve(self, actor: _Actor) -> None:
        self.sleep(self._costs.draw("start", actor.name))
        try:
            actor.worker = actor.build()
        except _Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - every call of this worker reports it
            actor.failure = error
        for signal in actor.early:
            signal()
        while True:
            self.wait_until(lambda: bool(actor.calls), [actor.arrived], math.inf, "a call")
            result, method, args, kwargs = actor.calls.popleft()
            self.record("begin", method)
            outcome = self._make_call(actor, method, args, kwargs)
            self.record("end", method)
            self._send(actor, partial(self._settle, actor, result, *outcome))

    def _make_call(self, actor: _Actor, method: str, args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
        if actor.failure is not None:
            return None, actor.failure
        try:
            return getattr(actor.worker, method)(*args, **kwargs), None
        except _Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - the caller gets it as a value
            return None, error

    def _settle(self, actor: _Actor, result: _Result, value: Any, error: BaseException | None) -> None:
        actor.unsettled.pop(result, None)
        if result.outcome is None:
            result.outcome = (value, error)
            self.notify(result.done)

    def _send(self, actor: _Actor, deliver: Callable[[], object]) -> None:
        """Deliver after the latency of a message, in the order in which messages were sent."""
        actor.next_arrival = max(actor.next_arrival, self._time + self._costs.draw("message", actor.name))
        self._later(actor.next_arrival - self._time, deliver)

    def submit(self, handle: Handle[W], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Queue a method call on a worker."""
        actor: _Actor = handle.native
        result = _Result(f"{handle.name}.{method}")
        self.record("submit", result.call)
        actor.unsettled[result] = None

        def arrive() -> None:
            if actor.dead:
                self._settle(actor, result, None, WorkerLostError(f"{actor.name} has been killed"))
            else:
                actor.calls.append((result, method, args, kwargs))
                self.notify(actor.arrived)

        self._send(actor, arrive)
        return Future(handle.name, result)

    def signal(self, handle: Handle[W], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Make a short call beside the running one, after the latency of a message."""
        actor: _Actor = handle.native
        result = _Result(f"{handle.name}.{method}")
        self.record("signal", result.call)

        def call() -> None:
            self._settle(actor, result, *self._make_call(actor, method, args, kwargs))

        def arrive() -> None:
            if actor.dead:
                self._settle(actor, result, None, WorkerLostError(f"{actor.name} has been killed"))
            elif actor.worker is None and actor.failure is None:
                actor.early.append(call)
            else:
                call()

        self._later(self._costs.draw("message", actor.name), arrive)
        return Future(handle.name, result)

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> list[Future[Any]]:
        """All futures that have an outcome, once one has."""
        def ready() -> bool:
            return any(future.native.outcome is not None for future in futures)

        names = ", ".join(sorted({future.native.call for future in futures})[:4])
        self.wait_until(ready, [future.native.done for future in futures], timeout_s,
                        f"one of {len(futures)} results ({names})")
        return [future for future in futures if future.native.outcome is not None]

    def outcome(self, future: Future[Any], timeout_s: float) -> Outcome[Any]:
        """How a call ended."""
        result: _Result = future.native
        if not self.wait_until(lambda: result.outcome is not None, [result.done], timeout_s, f"the result of {result.call}"):
            return Outcome(future.worker, error=WorkerLostError(
                f"{future.worker} gave no answer within {timeout_s:.1f} s"))
        assert result.outcome is not None
        return Outcome(future.worker, *result.outcome)

    def put(self, value: Any) -> Any:
        """Shared memory needs no store."""
        return value

    # Ends

    def kill(self, handle: Handle[Any], timeout_s: float = 5.0) -> bool:
        """End a worker, its threads and the workers that it started, wherever they are."""
        self._end_actor(handle.native)
        if self._current.killed:
            raise _Killed
        return True

    def _end_actor(self, actor: _Actor) -> None:
        if actor.dead:
            return
        actor.dead = True
        self.record("killed", actor.name)
        for result in list(actor.unsettled):
            self._settle(actor, result, None, WorkerLostError(f"{actor.name} has been killed"))
        for task in self._tasks:
            if task.actor is actor:
                self._end_task(task)
        self._actors.remove(actor)
        for child in list(self._actors):
            if child.owner is actor:
                self._end_actor(child)

    def _end_task(self, task: _Task) -> None:
        task.killed = True
        if task is not self._current:
            task.waits += 1
            self._enter(self._time, task, task.waits)

    @property
    def running(self) -> list[str]:
        """Names of the tasks that have not ended, workers and threads, but for the driver."""
        return [task.name for task in self._tasks if task is not self._driver]

    def close(self) -> None:
        """End every task. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.after_event = None
        for actor in list(self._actors):
            if not actor.dead:
                self._end_actor(actor)
        threads = [task.thread for task in self._tasks if task is not self._driver]
        for task in self._tasks:
            if task is not self._driver and not task.killed:
                self._end_task(task)
        self.wait_until(lambda: len(self._tasks) == 1, [task.ended for task in self._tasks], math.inf, "the end of all")
        for thread in threads:
            thread.join(_UNWIND_TIMEOUT_S)
