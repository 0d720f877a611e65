"""The seam between workers and the place where they run.

Workers are plain classes that talk to each other through this interface only, so the same scheme runs on Ray, or on
threads of one process. Every wait of the package is here and has a deadline; clocks, queues and threads come from here
too, so that a runtime can own time.
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
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.runtime.collective import Collective, GlooCollective
from pytorchrl.runtime.faults import FaultPlan
from pytorchrl.runtime.journal import Journal, Recording

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

DEFAULT_RESOURCES: Mapping[str, float] = MappingProxyType(
    {"memory": 5368709120, "num_cpus": 1, "num_gpus": 0.2, "object_store_memory": 2147483648})
"""What one remote worker asks for unless the user says otherwise; shrunk to what the cluster has."""
CPU_RESOURCES: Mapping[str, float] = MappingProxyType(
    {name: amount for name, amount in DEFAULT_RESOURCES.items() if name != "num_gpus"})
"""The same of one that computes on the CPU."""


def is_default(resources: Mapping[str, float]) -> bool:
    """Whether nobody has asked for these in particular."""
    return dict(resources) in (dict(DEFAULT_RESOURCES), dict(CPU_RESOURCES))


@dataclass(eq=False)
class Future(Generic[R]):
    """The result of a call that another worker is making."""

    worker: str
    """Name of the worker that makes it."""
    native: Any = field(repr=False)
    """The runtime's own object."""


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """How a call ended. A dead or hung worker is a value here, never a surprise elsewhere."""

    worker: str
    value: R | None = None
    error: BaseException | None = None

    def unwrap(self) -> R:
        """The value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Handle(Generic[W]):
    """A worker that runs elsewhere: one call at a time, in order of submission."""

    def __init__(self, runtime: Runtime, name: str, native: Any) -> None:
        self.runtime, self.name, self.native = runtime, name, native

    def submit(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call behind those already submitted."""
        return self.runtime.submit(self, method.__name__, args, kwargs)

    def signal(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Make a short call at once, beside the one that is running. It must only set flags."""
        return self.runtime.signal(self, method.__name__, args, kwargs)

    def __repr__(self) -> str:
        return f"Handle({self.name})"


class Runtime(ABC):
    """Place where workers run. Threads, queues, events and the clock default to those of this process.

    Args:
        options: Options of the runtime; None: their defaults.
        seed: Seed of the experiment, from which the draws of faults with a probability derive.
        is_recording: Whether workers record what depends on timing.

    Attributes:
        name: Name of the runtime, a key of `RUNTIMES`.
        options: Options of the runtime.
        faults: Failures to inject into workers; None: none.
        is_recording: Whether workers record what depends on timing.
        announce: Called with a line of text at each event of a slow start: processes take seconds to minutes to start.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of every runtime."""

        faults: str | None = option(
            None, help="Failures to inject, such as \"kill col.3 @ step 400; delay col.* 2s p=0.01\"; the syntax is that of `FaultPlan`.")

        def __post_init__(self) -> None:
            """Check that `faults` can be parsed."""
            super().__post_init__()
            if self.faults is not None:
                FaultPlan(self.faults, 0)

    name: ClassVar[str]

    def __init__(self, options: Options | None = None, *, seed: int = 0, is_recording: bool = False) -> None:
        self.options = type(self).Options() if options is None else options
        self.faults = None if self.options.faults is None else FaultPlan(self.options.faults, seed)
        self.is_recording = is_recording
        self.announce: Callable[[str], None] | None = None

    @abstractmethod
    def start_actor(self, cls: type[W], params: Mapping[str, Any], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` as a worker of its own. Its constructor's error shows in its first call."""

    @abstractmethod
    def submit(self, handle: Handle[W], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Queue a method call on a worker."""

    @abstractmethod
    def signal(self, handle: Handle[W], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Make a short method call beside the running one."""

    @abstractmethod
    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> list[Future[Any]]:
        """Wait until at least one future has an outcome; return *all* that have, in the order given, or []."""

    @abstractmethod
    def outcome(self, future: Future[R], timeout_s: float) -> Outcome[R]:
        """How a call ended; after `timeout_s` seconds without an end the error is a `WorkerLostError` (hung)."""

    @abstractmethod
    def put(self, value: T) -> Any:
        """Store a value once for many readers; pass the result as an argument in its place."""

    @abstractmethod
    def kill(self, handle: Handle[Any], timeout_s: float = 5.0) -> bool:
        """End a worker at once, without its consent; True if it is gone within `timeout_s`."""

    @abstractmethod
    def close(self) -> None:
        """End every worker that this runtime started, and what it started for itself. Idempotent."""

    def fit_resources(self, requests: Sequence[tuple[str, int, Mapping[str, float]]]) -> list[dict[str, float]]:
        """What each kind of worker will ask for: (name, count, resources) each. Raises if that cannot be had."""
        return [dict(resources) for _, _, resources in requests]

    def lacks_room(self, handle: Handle[Any]) -> str:
        """What a worker that has not come up asks for, and what there is, if that is why; else empty."""
        return ""

    def in_process(self) -> Runtime:
        """A runtime whose workers are threads of this process."""
        return self

    def own_gpus(self) -> list[int] | None:
        """The GPUs that the calling worker was given, as torch counts them in its process; None: all that torch sees."""
        return None

    def get(self, future: Future[R], timeout_s: float) -> R:
        """The value of a call, or raise its error."""
        return self.outcome(future, timeout_s).unwrap()

    def get_all(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Outcome[R]]:
        """The outcomes of all calls, in the order given, within one deadline for all."""
        deadline = self.now() + timeout_s
        return [self.outcome(future, max(0.0, deadline - self.now())) for future in futures]

    def get_started(self, kind: str, futures: Sequence[Future[R]], timeout_s: float) -> list[Outcome[R]]:
        """Return the outcomes of the first calls to workers of one kind; runtimes with slow workers announce the progress."""
        return self.get_all(futures, timeout_s)

    def start_thread(self, thread: threading.Thread) -> None:
        """Start a thread of this process."""
        thread.start()

    def join_thread(self, thread: threading.Thread, timeout_s: float) -> bool:
        """Wait for a thread to end; False if it is still alive after `timeout_s` seconds."""
        if thread.ident is not None:
            thread.join(timeout_s)
        return not thread.is_alive()

    def make_queue(self, maxsize: int) -> queue.Queue[Any]:
        """Return a first-in first-out queue between threads of this process; `maxsize=0` means unbounded."""
        return queue.Queue(maxsize)

    def make_event(self) -> threading.Event:
        """An event between threads of this process."""
        return threading.Event()

    def join_ranks(self, address: str, port: int, rank: int, size: int, timeout_s: float, generation: int = 1) -> Collective:
        """Become one of `size` workers that exchange tensors among themselves; see `GlooCollective`."""
        return GlooCollective(address, port, rank, size, timeout_s, self.is_recording, generation)

    def points(self, worker: str, incarnation: int = 0) -> Callable[[str], bool] | None:
        """What a worker has to call where its work has come to a named point.

        Points are "step" (of its environments), "grad" (computed) and "update" (about to be applied).

        Args:
            worker: Its name.
            incarnation: How often its place in the tree was filled before.

        Returns:
            A function of the point's name, true if the result at hand is to be spoilt; None where nothing is ever to
            happen at any point, so that it costs nothing.
        """
        return None if self.faults is None else self.faults.points(worker, incarnation, self)

    def journal(self, worker: str, incarnation: int = 0) -> Journal:
        """Where a worker notes what depends on timing, or is told what to do."""
        return Recording() if self.is_recording else Journal()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(min(seconds, threading.TIMEOUT_MAX))

    def die(self, worker: str) -> None:
        """End the calling worker at once, as a crash would: its whole process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def now(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()
