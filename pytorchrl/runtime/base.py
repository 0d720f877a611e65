"""Define the interface between workers and their runtime.

Workers are plain classes that talk to each other through this interface only, so the same scheme runs on Ray, on
threads of one process or in a simulation. Every wait of the package goes through this interface and has a deadline.
A runtime also provides the clock, queues and threads, so that a simulation can replace real time.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

import torch

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import WorkerError
from pytorchrl.runtime.collective import Collective, join_ranks, propose_address
from pytorchrl.runtime.faults import FaultPlan
from pytorchrl.runtime.journal import Journal, Recording
from pytorchrl.support.threads import WorkThread, start_work
from pytorchrl.support.tracebacks import as_error
from pytorchrl.support.untyped import Answer, NativeHandle

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)

DEFAULT_RESOURCES: Mapping[str, float] = MappingProxyType(
    {"memory": 5368709120, "num_cpus": 1, "num_gpus": 0.2, "object_store_memory": 2147483648})
"""Resources that a remote worker requests by default; reduced if the cluster has less. Memory is in bytes."""
CPU_RESOURCES: Mapping[str, float] = MappingProxyType(
    {name: amount for name, amount in DEFAULT_RESOURCES.items() if name != "num_gpus"})
"""Resources that a remote worker requests by default if it computes on the CPU."""


def is_default(resources: Mapping[str, float]) -> bool:
    """Return whether a worker requests default resources, which a runtime may reduce if the machines have less."""
    return dict(resources) in (dict(DEFAULT_RESOURCES), dict(CPU_RESOURCES))


@dataclass(eq=False)
class Future(Generic[R]):
    """The pending result of a call to another worker."""

    worker: str
    """Name of the called worker."""
    native: NativeHandle = field(repr=False)
    """The object by which the runtime identifies the call."""


FutureByName: TypeAlias = Future[Answer]
"""Future of a call whose method is given by name, so the result has no static type."""


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The value or the error of a finished call. If the worker has died or hangs, the outcome is an error."""

    worker: str
    value: R | None = None
    error: BaseException | None = None

    def unwrap(self) -> R:
        """Return the value, or raise the error; `SystemExit` and `KeyboardInterrupt` become a `WorkerError`."""
        if self.error is not None:
            error = as_error(self.error, self.worker)
            if isinstance(error, KeyboardInterrupt):
                raise WorkerError(f"{self.worker} raised {error!r}, which would end this program; code in a worker may "
                                  "raise only subclasses of Exception") from error
            raise error
        return self.value  # type: ignore[return-value]


class Handle(Generic[W_co]):
    """A reference to a worker, which runs its calls one at a time in order of submission."""

    def __init__(self, runtime: Runtime, name: str, native: NativeHandle) -> None:
        self.runtime, self.name, self.native = runtime, name, native

    def submit(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Enqueue a call, which runs after all calls that were submitted before it."""
        return self.runtime.submit(self, method.__name__, args, kwargs)

    def signal(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a short call immediately, even while the worker runs another call. The method may only set flags."""
        return self.runtime.signal(self, method.__name__, args, kwargs)

    def __repr__(self) -> str:
        return f"Handle({self.name})"


def _check_faults(faults: str | None) -> str | None:
    if faults is not None:
        FaultPlan(faults, 0)
    return faults


class Runtime(ABC):
    """Base class of runtimes. By default, threads, queues, events and the clock are those of this process.

    Args:
        options: Options of the runtime; None: the defaults.
        seed: Seed of the experiment; it also determines when random faults occur.
        is_recording: Whether workers record the order of timing-dependent events.

    Attributes:
        name: Name of the runtime, a key of `RUNTIMES`.
        options: Options of the runtime.
        faults: Failures to inject into workers; None injects nothing.
        is_recording: Whether workers record the order of timing-dependent events.
        announce: Function that receives a line of text at each stage while Ray or worker processes start; None: nothing
            is announced.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of every runtime."""

        faults: str | None = option(
            None, check=_check_faults,
            help="Failures to inject, such as \"kill col.3 @ step 400; delay col.* 2s p=0.01\"; see `FaultPlan` "
            "for the syntax.")

    name: ClassVar[str]
    moves_bytes: bool = True
    """Whether sending an array takes time that depends on its size. If not, compressing it cannot save time."""

    def __init__(self, options: Options | None = None, *, seed: int = 0, is_recording: bool = False) -> None:
        self.options = type(self).Options() if options is None else options
        self.faults = None if self.options.faults is None else FaultPlan(self.options.faults, seed)
        self.is_recording = is_recording
        self.announce: Callable[[str], None] | None = None

    @abstractmethod
    def start_actor(self, cls: type[W], params: Mapping[str, object], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` as a worker; an error of the constructor is the outcome of the worker's first call."""

    @abstractmethod
    def submit(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Enqueue a method call on a worker."""

    @abstractmethod
    def signal(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Run a short method call even while the worker runs another call; see `Handle.signal`."""

    @abstractmethod
    def wait(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Future[R]]:
        """Wait until any future has an outcome, and return *all* futures that have one, in the given order.

        The list is empty if no future has an outcome within `timeout_s` seconds.
        """

    @abstractmethod
    def outcome(self, future: Future[R], timeout_s: float) -> Outcome[R]:
        """Return the outcome of a call; after `timeout_s` seconds, return an outcome with a `WorkerLostError`.

        A timeout does not change the call, which stays pending, so a later call of this method may return its value. A
        caller that gives the worker up discards the future and kills the worker; the value is then dropped.
        """

    @abstractmethod
    def put(self, value: T) -> T:
        """Store a value once for many readers; pass the returned object to calls in place of the value."""

    @abstractmethod
    def kill(self, handle: Handle[W], timeout_s: float = 5.0) -> bool:
        """Kill a worker; return whether it ended within `timeout_s` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers, threads and processes that this runtime started; closing again has no effect."""

    def fit_resources(self, requests: Sequence[tuple[str, int, Mapping[str, float]]]) -> list[dict[str, float]]:
        """Return, for each kind of worker, the resources to request for one worker.

        A runtime may reduce default resources, so that all workers fit on the machines.

        Args:
            requests: (name, number of workers, resources of one worker) for each kind of worker.

        Raises:
            InsufficientResourcesError: The machines do not have the requested resources.
        """
        return [dict(resources) for _, _, resources in requests]

    def lacks_room(self, handle: Handle[W]) -> str:
        """Return why a worker cannot start for lack of resources; return "" if resources do not prevent its start.

        The text names the requested and the free resources.
        """
        return ""

    def in_process(self) -> Runtime:
        """Return a runtime whose workers are threads of this process."""
        return self

    def own_gpus(self) -> list[int] | None:
        """Return the torch indices of the GPUs assigned to the calling worker; None means all GPUs."""
        return None

    def get(self, future: Future[R], timeout_s: float) -> R:
        """Return the value of a call, or raise its error."""
        return self.outcome(future, timeout_s).unwrap()

    def get_all(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Outcome[R]]:
        """Return the outcomes of all calls, in the given order; all calls share one deadline."""
        deadline = self.now() + timeout_s
        return [self.outcome(future, max(0.0, deadline - self.now())) for future in futures]

    def get_started(self, kind: str, futures: Sequence[Future[R]], timeout_s: float) -> list[Outcome[R]]:
        """Wait until new workers have answered their first calls, and return the outcomes of these calls.

        A runtime whose workers start slowly announces how many of them have started.

        Args:
            kind: Name of this kind of worker in the announcements.
            futures: The first call to each worker.
            timeout_s: Seconds to wait for all calls together.
        """
        return self.get_all(futures, timeout_s)

    def start_thread(self, thread: WorkThread) -> None:
        """Start a thread of this process, which is interrupted at the end of the program."""
        start_work(thread)

    def join_thread(self, thread: threading.Thread, timeout_s: float) -> bool:
        """Wait for a thread to end; return False if the thread is still alive after `timeout_s` seconds."""
        if thread.ident is not None:
            thread.join(timeout_s)
        return not thread.is_alive()

    def make_queue(self, maxsize: int) -> queue.Queue[T]:
        """Return a first-in, first-out queue for threads of this process; `maxsize=0` means unbounded."""
        return queue.Queue(maxsize)

    def make_event(self) -> threading.Event:
        """Return an event for threads of this process."""
        return threading.Event()

    def join_ranks(self, address: str, port: int, rank: int, size: int, timeout_s: float,
                   generation: int = 1, device: torch.device | None = None) -> Collective:
        """Join a group of `size` workers that exchange tensors; see `collective.join_ranks`."""
        return join_ranks(address, port, rank, size, timeout_s, self.is_recording, generation,
                          device or torch.device("cpu"))

    def meeting_place(self) -> tuple[str, int]:
        """Return an address at which all workers reach the calling worker, and a TCP port that is currently free."""
        return propose_address(is_local=True)

    def points(self, worker: str, incarnation: int = 0) -> Callable[[str], bool] | None:
        """Return a function that the worker calls at each named point of its work, and that injects faults there.

        Points of collection and gradient workers are "step" (the environments took a step), "grad" (a gradient was
        computed) and "update" (an update is about to be applied); replay shards have "add", "sample" and "priorities".

        Args:
            worker: Name of the worker.
            incarnation: Number of earlier workers at the same place in the tree.

        Returns:
            A function that takes the name of a point, and returns whether the worker must corrupt its current result;
            None if nothing happens at any point.
        """
        return None if self.faults is None else self.faults.points(worker, incarnation, self)

    def journal(self, worker: str, incarnation: int = 0) -> Journal:
        """Return the journal with which a worker records the order of events, or repeats a recorded order."""
        return Recording() if self.is_recording else Journal()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` seconds."""
        time.sleep(min(seconds, threading.TIMEOUT_MAX))

    def die(self, worker: str) -> None:
        """Kill the process of the calling worker, as a crash would."""
        os.kill(os.getpid(), signal.SIGKILL)

    now: Callable[[], float] = staticmethod(time.monotonic)
    """Return the time of a monotonic clock in seconds."""
