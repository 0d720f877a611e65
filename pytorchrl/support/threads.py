"""States of objects that run once, methods that threads call in turn, and threads that run in the background."""

from __future__ import annotations

import atexit
import contextlib
import enum
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from pytorchrl.support.terminal import get_logger

if TYPE_CHECKING:
    from typing_extensions import Self

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

# Seconds after which a wait for a background job is logged; writing a checkpoint takes much less.
_LOG_INTERVAL_S = 60.0
# Seconds that the end of the program waits for daemon threads to end; most threads need only a few milliseconds.
_EXIT_TIMEOUT_S = 5.0
# Seconds that the end of the program waits for one thread before it interrupts the next one.
_EXIT_INTERVAL_S = 0.1

logger = get_logger(__name__)


class State(enum.Enum):
    """State of an object that is started once and stopped once: a `Learner`, or a `VecEnv`, which `reset` starts.

    An object goes from NEW to RUNNING, and from there to STOPPED or FAILED. An object may also be stopped or fail
    before it has started.
    """

    NEW = "not started"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    """An error, or a second Ctrl-C, has ended the work in the middle; it cannot be continued."""


def in_turn(lock_name: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that lets only one thread at a time run the decorated methods of an object.

    A running call may call other decorated methods of the same object.

    Args:
        lock_name: Attribute that stores the lock. Only methods with the same `lock_name` wait for each other.
    """
    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            # guards the object. `setdefault` of a dictionary is atomic, so all threads use the same lock.
            with vars(self).get(lock_name) or vars(self).setdefault(lock_name, threading.RLock()):
                return method(self, *args, **kwargs)

        return call

    return decorate


class Stoppable:
    """An object whose work `stop` ends; a `with` block calls `stop` at its end."""

    def stop(self) -> object:
        """End all work; repeated calls change nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class WorkThread(threading.Thread):
    """A daemon thread that runs until `interrupt` is called.

    If a program ends without stopping its workers, Python ends its daemon threads wherever they are. Within a
    computation of PyTorch, this would abort the whole process. Threads that `start_work` has started are therefore
    interrupted when the program ends, and the program waits a few seconds for them.
    """

    def interrupt(self) -> None:
        """Let the thread end soon; this method may be called repeatedly, and from any thread."""
        raise NotImplementedError


_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_work(thread: WorkThread) -> None:
    """Start a thread, and interrupt it at the end of the program if it is still running then."""
    _started.add(thread)
    # `atexit` calls the latest function first. The threads must end before the libraries that they use, such as Ray.
    atexit.unregister(_interrupt_all)
    atexit.register(_interrupt_all)
    thread.start()


def _interrupt_all() -> None:
    """Interrupt all threads, the latest first: a thread that calls workers must not notice that they have ended."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    # A worker that is still being built may start more threads, so the threads are listed again until all have ended.
    while (alive := [thread for thread in threading.enumerate() if thread in _started]) and time.monotonic() < deadline:
        for thread in reversed(alive):
            with contextlib.suppress(Exception):  # nobody is left that could receive the error
                cast("WorkThread", thread).interrupt()
                thread.join(_EXIT_INTERVAL_S)


class Background:
    """A background thread that runs one job at a time. Python does not exit before the job has ended.

    The thread belongs to this object and ends with its job; `wait` raises the job's error. Waiting has no deadline,
    because a job that is given up would lose its result, such as a checkpoint. Instead, a long wait is logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, as `wait` does, and start the next one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the job has ended. If the job raised an error, raise it; later calls do not raise it again."""
        if self._thread is not None:
            self._thread.join(_LOG_INTERVAL_S)
            while self._thread.is_alive():
                logger.warning("still waiting for the thread %r", self._name)
                self._thread.join(_LOG_INTERVAL_S)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the thread that started the job
            self._error = error
