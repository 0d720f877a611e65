"""Handle Ctrl-C and SIGTERM: let the current update end before the program does.

`undivided` is for a user's own loop of `Scheme.step`: Ctrl-C takes effect between two calls. `Interrupts` is for
`Learner.train`: the first signal requests a clean end, the second one an immediate end.
"""

from __future__ import annotations

import signal
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found] # `signal.getsignal` also looks for an enum member: slow
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, TypeVar

R = TypeVar("R")

GRACE_S = 2.0
"""Seconds from the first signal until an unfinished update is abandoned."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Delay:
    """Handler of SIGINT that delays `KeyboardInterrupt` until the end of a call that must not be interrupted.

    A second signal during the call raises `KeyboardInterrupt` at once. If the user sends no second signal, a timer
    sends it `GRACE_S` seconds after the first. Outside such a call, this handler acts like Python's default handler.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.timer: threading.Timer | None = None  # repeats a delayed signal; None if no signal was delayed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_active or self.timer is not None:
            signal.default_int_handler(number, frame)
        self.timer = threading.Timer(GRACE_S, signal.pthread_kill, (threading.get_ident(), number))
        self.timer.daemon = True
        self.timer.start()


_DELAY = _Delay()


def undivided(call: Callable[[], R]) -> R:
    """Call a function. If Ctrl-C is pressed meanwhile, raise `KeyboardInterrupt` as soon as the function has ended.

    If the function has not ended `GRACE_S` seconds later, or if Ctrl-C is pressed again, `KeyboardInterrupt` is raised
    in the middle of the function. Outside the main thread, which alone receives signals, nothing is delayed. Nothing is
    delayed either if the user or `Learner.train` has replaced Python's default handler of SIGINT.

    The delaying handler of SIGINT stays installed until `interrupt_as_usual` is called, because installing the handler
    for each call would take longer than checking that it is installed.
    """
    if _DELAY.is_active or threading.get_ident() != threading.main_thread().ident:
        return call()
    handler = getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _DELAY)
    elif handler is not _DELAY:
        return call()
    _DELAY.is_active = True
    try:
        return call()
    finally:
        # This line calls no function, so no signal handler can run in the middle of it.
        timer, _DELAY.timer, _DELAY.is_active = _DELAY.timer, None, False
        if timer is not None:
            timer.cancel()
            raise KeyboardInterrupt


def interrupt_as_usual() -> None:
    """If `undivided` has replaced Python's default handler of SIGINT, restore it until the next call of `undivided`."""
    if threading.current_thread() is threading.main_thread() and getsignal(signal.SIGINT) is _DELAY:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Unblocked(BaseException):
    """Exception that is raised in the main thread to abandon an update that does not end by itself after a signal."""


class Interrupts:
    """Context manager that records signals instead of raising exceptions; it does nothing outside the main thread.

    Only the main thread uses this object, because Python runs signal handlers there. There is one exception: the thread
    of `_timer` sets `_forcing`, and then sends a signal to the main thread.

    Args:
        grace_s: Seconds from the first signal until an unfinished update is abandoned.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s, self._received_at = grace_s, 0.0
        self.received: int | None = None
        """The first signal received, or None."""
        self.twice = False
        """Whether a second signal was received, which ends the run without cleaning up."""
        self._found: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._active = threading.current_thread() is threading.main_thread()
        self._starting = self._waiting = True
        self._forcing = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Interrupts:
        self.install()
        return self

    def finish_starting(self) -> None:
        """End the start phase: a first signal after this call ends training once the current update is complete.

        Before this call, a signal ends training immediately, because there is nothing to save.
        """
        self._starting = False
        self.install()

    def install(self) -> None:
        """Install the handlers, or reinstall them after a library replaced them; `__exit__` restores the originals."""
        if self._active:
            for number in _SIGNALS:
                self._found.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None,
    ) -> None:
        self.finish_waiting()
        for number, handler in self._found.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def finish_waiting(self) -> None:
        """Stop raising `Unblocked`, because the operations that follow training have their own deadlines."""
        self._waiting = False
        if self._timer is not None:
            self._timer.cancel()

    @property
    def time_left_s(self) -> float:
        """Remaining seconds of the grace period, at least 0."""
        return max(0.0, self._received_at + self._grace_s - time.monotonic())

    def raise_received(self) -> NoReturn:
        """Raise Python's exception for the signal: `KeyboardInterrupt`, or `SystemExit(143)`."""
        raise self.exception()

    def exception(self, env_steps: int | None = None, log_dir: Path | None = None) -> BaseException:
        """Return Python's exception for the signal: `KeyboardInterrupt`, or `SystemExit(143)`.

        If `env_steps` is given, training has ended cleanly, and the message states the env steps and the directory.
        """
        if self.received == signal.SIGTERM:
            return SystemExit(128 + signal.SIGTERM)
        if env_steps is None:
            return KeyboardInterrupt()
        saved = "nothing is saved without a log_dir" if log_dir is None else f"saved in {log_dir}"
        return KeyboardInterrupt(f"training was interrupted after {env_steps:,} env steps; {saved}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._forcing:
            self._forcing = False
            if self._waiting:
                raise Unblocked
        elif self.received is None and not self._starting:
            self.received, self._received_at = number, time.monotonic()
            if self._waiting:
                self._timer = threading.Timer(self._grace_s, self._unblock)
                self._timer.daemon = True
                self._timer.start()
        else:
            self.twice = self.received is not None
            self.received = self.received or number
            found = self._found[number]
            if callable(found):  # the command line's handler ends the process immediately
                found(number, frame)
            self.raise_received()

    def _unblock(self) -> None:
        if self._waiting:
            self._forcing = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
