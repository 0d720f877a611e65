"""Handle Ctrl-C and SIGTERM during training: the first signal requests a clean end, the second an immediate end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from pytorchrl.support.signals import GRACE_S as GRACE_S  # `Learner` uses the same number
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    def seconds_left(self) -> float:
        """Remaining seconds of the grace period, at least 0."""
        return max(0.0, self._received_at + self._grace_s - time.monotonic())

    def raise_received(self, env_steps: int | None = None, log_dir: Path | None = None) -> NoReturn:
        """Raise Python's exception for the signal: `KeyboardInterrupt`, or `SystemExit(143)`.

        If `env_steps` is given, training has ended cleanly, and the message states the env steps and the directory.
        """
        if self.received == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if env_steps is None:
            raise KeyboardInterrupt
        saved = "nothing is saved without a log_dir" if log_dir is None else f"saved in {log_dir}"
        raise KeyboardInterrupt(f"training was interrupted after {env_steps:,} env steps; {saved}")

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


def checkpoint_within(seconds_left: float, save: Callable[[float], None]) -> None:
    """Write the checkpoint after a signal. A failure is logged and not raised, because the process must end.

    Args:
        seconds_left: Time limit in seconds. If it is 0, because the grace period has passed or the update has failed,
            no checkpoint is written.
        save: Function that writes a checkpoint; its argument is the time limit in seconds.
    """
    try:
        if not seconds_left:
            raise TimeoutError("the last update did not end within grace_s")
        save(seconds_left)
    except Exception as error:  # noqa: BLE001 - a worker may fail in any way
        logger.warning("no checkpoint was written after the signal: %s", error)


def call_after_failure(name: str, action: Callable[[], object]) -> None:
    """Call a function after a run has failed. If the function fails, too, log its error instead of raising it.

    Args:
        name: Subject of the log message, such as "saving the model".
        action: The function.
    """
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the first error is raised; this one is logged
        logger.warning("%s after a failure also failed: %s", name, error)
