"""Sample the threads of this process while it trains, to find the share of the time that each kind of work takes.

A timer interrupts the main thread two milliseconds after the end of the previous interrupt. At each interrupt, the call
stack of each thread determines the kind of work that the thread does. The weight of the sample is the time since the
previous interrupt, so a long call into native code counts with its whole duration. The time of the interrupts
themselves, 1 to 3 % of the run, is left out. Unlike a tracing profiler, sampling does not slow functions down, so the
shares need no correction.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType

from pytorchrl.support.work import KINDS, Work, WorkKind

_INTERVAL_S = 0.002
_PACKAGE = __name__.partition(".")[0]
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"
# Files of the standard library with functions in which a thread waits for another thread.
_WAITING = ("threading.py", "queue.py", "selectors.py")


class _Role:
    """Properties of one function that determine the kind of work that it does.

    Attributes:
        is_own: Whether the function belongs to this package.
        is_foreign: Whether the function belongs neither to this package, nor to NumPy or the standard library.
        kind: Kind of work that the function does; None if the function does the same kind of work as its caller.
        calls: See `Work.calls`.
        code: Code object of the function. This reference keeps the object alive, so that its `id` remains unique.
    """

    __slots__ = ("calls", "code", "is_foreign", "is_own", "kind")

    def __init__(self, frame: FrameType) -> None:
        self.code = frame.f_code
        module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        is_generated = file.startswith("<")  # for example, by `dataclass`
        self.is_own = module.partition(".")[0] == _PACKAGE and not is_generated
        work = _work_of(module) if self.is_own else Work()
        self.kind = work.methods.get(frame.f_code.co_name, work.kind)
        self.calls = work.calls
        is_neutral = is_generated or (file.startswith(_STANDARD) and _SITE not in file)
        self.is_foreign = not (self.is_own or is_neutral or f"{_SITE}numpy{os.sep}" in file)


def _work_of(module: str) -> Work:
    """Return the constant `WORK` of a module or, if it has none, of the nearest package around it that has one."""
    while module:
        loaded = sys.modules.get(module)
        if loaded is not None and "WORK" in vars(loaded):
            work: Work = loaded.WORK
            return work
        module = module.rpartition(".")[0]
    return Work()


# By `id` of the code object, because code objects of equal functions are equal, even if their modules differ.
_roles: dict[int, _Role] = {}


def _role_of(frame: FrameType) -> _Role:
    role = _roles.get(id(frame.f_code))
    if role is None:
        role = _roles[id(frame.f_code)] = _Role(frame)
    return role


def kind_of(frame: FrameType | None) -> WorkKind | None:
    """Return the kind of work that a thread does, given its innermost frame.

    Returns:
        A kind of work; or None if the thread waits for another thread, or runs no function of this package. The kinds
        are:

        - "environment": functions of the environments; `VecEnv`, which calls these functions, does work of kind "ours".
        - "network": functions of actors, losses and gradients, and all functions that an actor or a loss calls.
        - "optimizer": clipping gradients, updating parameters, and moving target networks.
        - "storage": storing and copying steps, computing advantages, and sampling batches.
        - "ours": all other work of this package.
    """
    innermost, frames = frame, []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    kind: WorkKind = "ours"
    calls: WorkKind | None = None
    is_own = False
    for each in reversed(frames):
        role = _role_of(each)
        if role.is_own:
            is_own, kind, calls = True, role.kind or kind, role.calls
        elif role.is_foreign and calls is not None:
            kind = calls if kind == "ours" else kind
        if kind == "environment":  # the work of an environment includes everything that it calls
            return kind
    waits = innermost is not None and innermost.f_code.co_filename.startswith(
        _STANDARD) and os.path.basename(innermost.f_code.co_filename) in _WAITING
    return kind if is_own and not waits else None


class WorkSampler:
    """A context manager that samples the work of all threads of this process during the `with` block.

    It uses SIGALRM and the timer of `signal.setitimer`, and restores the handler and the timer afterwards.

    Attributes:
        seconds: Seconds spent on each kind of work, summed over all threads.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._is_sampling = False

    @staticmethod
    def is_supported() -> bool:
        """Return whether sampling is possible here: in the main thread, on a platform with `signal.setitimer`."""
        return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()

    def shares(self) -> dict[str, float]:
        """Return the share of each kind of work, in [0, 1], with a sum of 1; empty if nothing was sampled."""
        total = sum(self.seconds.values())
        return {kind: seconds / total for kind, seconds in self.seconds.items()} if total else {}

    def __enter__(self) -> WorkSampler:
        self._handler = signal.signal(signal.SIGALRM, self._sample)
        signal.siginterrupt(signal.SIGALRM, False)  # restart interrupted system calls of native code
        self._is_sampling = True
        self._start = self._last = time.perf_counter()
        self._timer = signal.setitimer(signal.ITIMER_REAL, _INTERVAL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None,
    ) -> None:
        self._is_sampling = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if self._handler is None else self._handler)
        delay, interval = self._timer
        if delay:
            passed = time.perf_counter() - self._start
            signal.setitimer(signal.ITIMER_REAL, max(_INTERVAL_S, delay - passed), interval)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        passed = time.perf_counter() - self._last
        own = threading.get_ident()
        others = [other for thread, other in sys._current_frames().items() if thread != own]
        for running in (frame, *others):
            kind = kind_of(running)
            if kind is not None:
                self.seconds[kind] += passed
        self._last = time.perf_counter()
        # The timer is started again after each interrupt, because a periodic timer could leave a slow machine no time
        # between interrupts.
        if self._is_sampling:
            signal.setitimer(signal.ITIMER_REAL, _INTERVAL_S)


def table(shares: Mapping[str, float]) -> str:
    """Return a table of the shares of all kinds of work."""
    return "\n".join(["work            share", *(f"{kind:<13}{share:>8.1%}" for kind, share in shares.items())])
