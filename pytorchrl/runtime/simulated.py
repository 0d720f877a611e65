"""Run workers in one process on a virtual clock, so that even asynchronous runs with equal seeds are identical."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError, RankLostError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime.base import Future, FutureByName, Handle, Outcome, R, Runtime, T, W
from pytorchrl.runtime.collective import Collective
from pytorchrl.runtime.costs import DEFAULT_COSTS, Costs, num_bytes
from pytorchrl.runtime.journal import Journal, Replaying, Section
from pytorchrl.runtime.simulation import Ended, Signal, Simulation, Task


class _Actor:
    """Worker whose calls run in a task of its own, one at a time, in the order of their arrival.

    Attributes:
        peak: Largest number of calls, waiting or taken, when the task took a call.
    """

    def __init__(self, name: str, owner: _Actor | None, build: Callable[[], object]) -> None:
        self.name, self.owner, self.build = name, owner, build
        self.worker: object = None
        self.failure: BaseException | None = None
        self.calls: deque[tuple[_Result, str, tuple[object, ...], Mapping[str, object]]] = deque()
        self.peak = 0
        self.early: list[Callable[[], object]] = []  # signals to a worker that is not built yet
        self.unsettled: dict[_Result, None] = {}  # results without an outcome; a dict, because a set has no order
        self.arrived = Signal()
        self.messages: deque[Callable[[], object]] = deque()  # messages in flight to or from this worker, in order
        self.last_arrival = 0.0
        self.dead = False

    def deliver_next(self) -> None:
        """Deliver the oldest message in flight."""
        self.messages.popleft()()


class _Result:
    """Pending result of a call."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.outcome: tuple[object, BaseException | None] | None = None
        self.done = Signal()


class SimulatedQueue(queue.Queue[T]):
    """Queue like `queue.Queue`, with timeouts in virtual seconds.

    Args:
        maxsize: Largest number of items; 0 means unbounded.
        simulation: Simulation that runs other tasks while a task waits.
    """

    def __init__(self, maxsize: int, simulation: Simulation) -> None:
        super().__init__(maxsize)
        self._simulation = simulation
        self._changed = Signal()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add `item`; raise `queue.Full` if the queue stays full for `timeout` virtual seconds (None: wait forever)."""
        if self.maxsize > 0 and not self._wait(lambda: not self.full(), block, timeout, "room in a queue"):
            raise queue.Full
        self._put(item)
        self.unfinished_tasks += 1
        self._note("put")

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove and return the oldest item; raise `queue.Empty` after `timeout` virtual seconds (None: never)."""
        if not self._wait(lambda: not self.empty(), block, timeout, "an item in a queue"):
            raise queue.Empty
        item: T = self._get()
        self._note("get")
        return item

    def task_done(self) -> None:
        """Mark one removed item as done."""
        super().task_done()
        self._simulation.notify(self._changed)

    def join(self) -> None:
        """Wait until `task_done` has been called for every item that was added."""
        self._wait(lambda: not self.unfinished_tasks, True, None, "the last task of a queue")

    def _wait(self, ready: Callable[[], bool], block: bool, timeout: float | None, what: str) -> bool:
        if block and timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        timeout_s = 0.0 if not block else math.inf if timeout is None else timeout
        return self._simulation.wait_until(ready, [self._changed], timeout_s, what)

    def _note(self, operation: str) -> None:
        self._simulation.record(f"{operation}, {self.qsize()} of {self.maxsize}")
        self._simulation.notify(self._changed)


class SimulatedEvent(threading.Event):
    """Event like `threading.Event`, with timeouts in virtual seconds."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation, self._changed = simulation, Signal()

    def set(self) -> None:
        """Set the event and wake all tasks that wait for it."""
        super().set()
        self._simulation.notify(self._changed)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event; return False if it is not set within `timeout` virtual seconds (None: wait forever)."""
        return self._simulation.wait_until(
            self.is_set, [self._changed], math.inf if timeout is None else timeout, "an event")


class SimulatedCollective(Collective):
    """Group of ranks in one process. A call returns once every rank has made the same call."""

    def __init__(self, simulation: Simulation, meeting: _Meeting, rank: int, size: int, timeout_s: float) -> None:
        self.size, self.device = size, torch.device("cpu")
        self._simulation, self._meeting, self._rank, self._timeout_s = simulation, meeting, rank, timeout_s
        self._num_calls, self._left = 0, False

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order; raise `RankLostError` if one is missing after the timeout."""
        meeting, self._num_calls = self._meeting, self._num_calls + 1
        parts = meeting.tensors.setdefault(self._num_calls, {})
        if not self._left:
            parts[self._rank] = tensor.clone()
            self._simulation.notify(meeting.changed)
        found = self._simulation.wait_until(
            lambda: self._left or len(parts) == self.size, [meeting.changed], self._timeout_s, "all ranks")
        # A rank that has left the group raises an error, even if all ranks have answered in the meantime; the other
        # ranks may continue. Ranks in separate processes behave in the same way.
        if self._left or not found:
            missing = sorted(set(range(self.size)) - parts.keys())
            what = ("this rank has left the group" if self._left else
                    f"ranks {missing} did not answer within {self._timeout_s:.1f} s")
            raise RankLostError(f"an exchange among {self.size} gradient workers was aborted: {what}")
        # Every rank has made this call, so no rank needs the tensors of the previous call.
        meeting.tensors.pop(self._num_calls - 1, None)
        return [parts[rank].clone() for rank in range(self.size)]

    @override
    def close(self) -> None:
        self._left = True
        self._simulation.notify(self._meeting.changed)


class _Meeting:
    """The tensors that the ranks of one group exchange, as a mapping: number of the call -> rank -> tensor."""

    def __init__(self) -> None:
        self.tensors: dict[int, dict[int, Tensor]] = {}
        self.changed = Signal()


def _check_costs(costs: Mapping[str, object] | None) -> Mapping[str, object] | None:
    Costs(costs, 0)
    return costs


class SimulatedRuntime(Runtime):
    """Runtime with a virtual clock. Its workers are in this process, and one worker runs at a time.

    Args:
        options: Options of the runtime; None: the defaults.
        seed: Seed of the experiment; it also determines when faults that have a probability occur.
        is_recording: Whether workers record the order of timing-dependent events.
        replay: Map from (worker, incarnation) to the journal of a recorded run, which this run replays. In a replay,
            operations take no virtual time.

    Attributes:
        simulation: Simulation that decides when each worker runs; it also stores the events and their digest.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Runtime.Options):
        """Options of the simulated runtime."""

        schedule_seed: int = option(
            0, low=0, high=2**63 - 1,
            help="Seed of the simulated schedule, which breaks ties between workers and draws `costs`.")
        costs: Mapping[str, object] | None = option(
            None, check=_check_costs,
            help="Virtual seconds of each operation, in the forms that `Costs` describes. None: the defaults of "
            "`Costs`.")

    name = "simulated"
    options: Options

    def __init__(self, options: Options | None = None, *, seed: int = 0, is_recording: bool = False,
                 replay: Mapping[tuple[str, int], Section] | None = None) -> None:
        super().__init__(options, seed=seed, is_recording=is_recording)
        self._replay = replay
        self.simulation = Simulation(self.options.schedule_seed)
        self._costs = Costs(self.options.costs if replay is None else dict.fromkeys(DEFAULT_COSTS, 0.0),
                            self.options.schedule_seed)
        self.moves_bytes = self._costs.has_bytes
        self._actors: list[_Actor] = []
        self._threads: dict[threading.Thread, Task] = {}
        self._meetings: dict[tuple[int, int], _Meeting] = {}  # by port and generation
        self._closed = False

    # Time, threads, queues and events

    def now(self) -> float:
        """Return the virtual seconds since the start."""
        return self.simulation.now

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` virtual seconds."""
        self.simulation.sleep(seconds)

    def make_queue(self, maxsize: int) -> queue.Queue[T]:
        """Return a queue whose timeouts are in virtual seconds; `maxsize=0` means unbounded."""
        return SimulatedQueue(maxsize, self.simulation)

    def make_event(self) -> threading.Event:
        """Return an event whose timeouts are in virtual seconds."""
        return SimulatedEvent(self.simulation)

    def start_thread(self, thread: threading.Thread) -> None:
        """Start a thread as a task of the simulation. If the calling worker ends, the task ends with it."""
        task = self._threads[thread] = Task(thread.name, self._current_actor())
        self.simulation.start(task, thread, thread.run)

    def join_thread(self, thread: threading.Thread, timeout_s: float) -> bool:
        """Wait for a thread to end; return whether it ended within `timeout_s` virtual seconds."""
        task = self._threads.get(thread)
        return True if task is None else self.simulation.join(task, timeout_s)

    def join_ranks(self, address: str, port: int, rank: int, size: int, timeout_s: float,
                   generation: int = 1, device: torch.device | None = None) -> Collective:
        """Join the group of all workers with the same `port` and `generation`; they exchange tensors in host memory."""
        meeting = self._meetings.setdefault((port, generation), _Meeting())
        return SimulatedCollective(self.simulation, meeting, rank, size, timeout_s)

    @override
    def points(self, worker: str, incarnation: int = 0) -> Callable[[str], bool] | None:
        """Return the function that a worker calls when it reaches a named point of its work.

        The function waits for the virtual duration of the operation at this point, and then injects faults.
        """
        inject = super().points(worker, incarnation)

        def point(operation: str) -> bool:
            self.sleep(self._costs.draw(operation, worker, self.simulation.current.since))
            return inject is not None and inject(operation)

        return point

    def journal(self, worker: str, incarnation: int = 0) -> Journal:
        """Return the journal of a worker's events. In a replay, the journal enforces the order of the recorded run."""
        if self._replay is None:
            return super().journal(worker, incarnation)
        return Replaying(worker, self._replay.get((worker, incarnation), Section([], [])), self.simulation)

    # Workers

    def start_actor(self, cls: type[W], params: Mapping[str, object], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` in a separate task; `resources` has no effect."""
        actor = _Actor(name, self._current_actor(), lambda: cls(**params))
        self._actors.append(actor)
        thread = threading.Thread(name=name, daemon=True)
        self.simulation.start(Task(name, actor), thread, lambda: self._serve(actor))
        self.simulation.record(f"start {name}")
        return Handle(self, name, actor)

    def _current_actor(self) -> _Actor | None:
        """Return the worker whose task is running; None for the driver and its threads."""
        owner = self.simulation.current.owner
        return owner if isinstance(owner, _Actor) else None

    def _serve(self, actor: _Actor) -> None:
        self.sleep(self._costs.draw("start", actor.name))
        try:
            actor.worker = actor.build()
        except Ended:
            raise
        except BaseException as error:  # noqa: BLE001 - every call of this worker reports the error
            actor.failure = error
        for signal in actor.early:
            signal()
        while True:
            self.simulation.wait_until(lambda: bool(actor.calls), [actor.arrived], math.inf, "a call")
            actor.peak = max(actor.peak, len(actor.calls))
            result, method, args, kwargs = actor.calls.popleft()
            self.simulation.record(f"begin {method}")
            outcome = self._call(actor, method, args, kwargs)
            self.simulation.record(f"end {method}")
            self._deliver_in_order(actor, partial(self._settle, actor, result, *outcome), outcome[0])

    def _call(self, actor: _Actor, method: str, args: tuple[object, ...],
              kwargs: Mapping[str, object]) -> tuple[object, BaseException | None]:
        if actor.failure is not None:
            return None, actor.failure
        try:
            return getattr(actor.worker, method)(*args, **kwargs), None
        except Ended:
            raise
        except BaseException as error:  # noqa: BLE001 - the caller receives the error as a value
            return None, error

    def _settle(self, actor: _Actor, result: _Result, value: object, error: BaseException | None) -> None:
        actor.unsettled.pop(result, None)
        if result.outcome is None:
            result.outcome = (value, error)
            self.simulation.notify(result.done)

    def _settle_as_lost(self, actor: _Actor, result: _Result) -> None:
        self._settle(actor, result, None, WorkerDiedError(f"{actor.name} has been killed"))

    def _deliver_in_order(self, actor: _Actor, deliver: Callable[[], object], content: object) -> None:
        """Deliver a message to or from a worker after a latency; messages do not overtake each other."""
        # A replay delivers messages immediately. With a latency, a message that arrived in the recorded run could get
        # lost in the replay, because its sender may die before the message arrives.
        if self._replay is not None:
            deliver()
            return
        now = self.simulation.now
        latency_s = self._costs.draw("message", actor.name)
        if self.moves_bytes:
            latency_s += num_bytes(content) * self._costs.draw("byte", actor.name)
        actor.last_arrival = max(actor.last_arrival, now + latency_s)
        actor.messages.append(deliver)  # messages that arrive at the same moment keep their order
        self.simulation.later(actor.last_arrival - now, actor.deliver_next)

    def submit(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Enqueue a method call on a worker."""
        actor: _Actor = handle.native
        result = _Result(f"{handle.name}.{method}")
        self.simulation.record(f"submit {result.call}")
        actor.unsettled[result] = None

        def arrive() -> None:
            if actor.dead:
                self._settle_as_lost(actor, result)
            else:
                actor.calls.append((result, method, args, kwargs))
                self.simulation.notify(actor.arrived)

        self._deliver_in_order(actor, arrive, (args, kwargs))
        return Future(handle.name, result)

    def signal(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Run a short method call as soon as it reaches the worker, even while the worker runs another call."""
        actor: _Actor = handle.native
        result = _Result(f"{handle.name}.{method}")
        self.simulation.record(f"signal {result.call}")

        def call() -> None:
            self._settle(actor, result, *self._call(actor, method, args, kwargs))

        def arrive() -> None:
            if actor.dead:
                self._settle_as_lost(actor, result)
            elif actor.worker is None and actor.failure is None:
                actor.early.append(call)
            else:
                call()

        self.simulation.later(self._costs.draw("message", actor.name), arrive)
        return Future(handle.name, result)

    def wait(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Future[R]]:
        """Wait at most `timeout_s` virtual seconds for an outcome, and return all futures that have one."""
        def ready() -> bool:
            return any(future.native.outcome is not None for future in futures)

        calls = list(dict.fromkeys(future.native.call for future in futures))
        self.simulation.wait_until(ready, [future.native.done for future in futures], timeout_s,
                                   "the result of " + " or ".join(calls[:3] + ["..."] * (len(calls) > 3)))
        return [future for future in futures if future.native.outcome is not None]

    def outcome(self, future: Future[R], timeout_s: float) -> Outcome[R]:
        """Return the outcome of a call, or an error after `timeout_s` virtual seconds."""
        result = future.native
        if not self.simulation.wait_until(lambda: result.outcome is not None, [result.done], timeout_s,
                                          f"the result of {result.call}"):
            return Outcome(future.worker, error=WorkerLostError(
                f"{future.worker} did not answer within {timeout_s:.1f} s"))
        return Outcome(future.worker, *result.outcome)

    def put(self, value: T) -> T:
        """Return the value itself, because all workers share memory."""
        return value

    # Shutdown

    @property
    def running(self) -> list[str]:
        """Names of the workers and threads that have not ended."""
        return [task.name for task in self.simulation.tasks[1:]]

    def kill(self, handle: Handle[W], timeout_s: float = 5.0) -> bool:
        """End a worker, its threads and the workers that it started; return whether all ended within `timeout_s`."""
        self._end_actor(handle.native)
        ending = [task for task in self.simulation.tasks if task.killed and task is not self.simulation.current]
        return self.simulation.wait_until(
            lambda: all(task.finished for task in ending), [task.ended for task in ending], timeout_s,
            f"the end of {handle.name}")

    def die(self, worker: str) -> None:
        """End the calling worker and the workers that it started, as a crash of its process would.

        Raises:
            ConfigError: The worker is part of the driver.
        """
        actor = self._current_actor()
        if actor is None:
            raise ConfigError(f"the option faults kills {worker}, which is part of the driver and cannot be killed "
                              "separately; target a worker outside the driver")
        self._end_actor(actor)
        self.simulation.check_running()

    def _end_actor(self, actor: _Actor) -> None:
        if actor.dead:
            return
        actor.dead = True
        self._actors.remove(actor)
        actor.worker = None  # free its memory and threads, also on GPUs, although its handle keeps `actor`
        self.simulation.record(f"end of {actor.name}")
        for result in list(actor.unsettled):
            self._settle_as_lost(actor, result)
        for task in self.simulation.tasks:
            if task.owner is actor:
                self.simulation.end(task)
        for child in list(self._actors):
            if child.owner is actor:
                self._end_actor(child)

    def close(self) -> None:
        """End every worker and thread; closing again has no effect."""
        if self._closed:
            return
        self._closed = True
        self.simulation.after_event = None
        for actor in list(self._actors):
            self._end_actor(actor)
        self.simulation.end_all()
