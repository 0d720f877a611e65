"""Ctrl-C and SIGTERM while training: the first asks for a clean end, the second ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# An update may be waiting for data. After this long it is left; well below the ten seconds that stopping may take.
_GRACE_S = 2.0


class Unblocked(BaseException):
    """Raised in the main thread to leave an update that does not end by itself after a signal."""


class Interrupts:
    """Context manager that notes signals instead of raising; it does nothing outside the main thread.

    Owner: the main thread, where Python runs signal handlers. The timer's thread only sets `_forcing` and sends
    the main thread a signal.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal that came, or None."""
        self.twice = False
        """Whether a second one came: everything is left as it is."""
        self._found: dict[int, Any] = {}
        self._active = threading.current_thread() is threading.main_thread()
        self._starting = self._waiting = True
        self._forcing = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Interrupts:
        self.install()
        return self

    def finish_starting(self) -> None:
        """From here on a first signal lets the running update end; until then there is nothing to wait for or to save."""
        self._starting = False
        self.install()

    def install(self) -> None:
        """Put in the handlers, also again after a library has replaced them; the first found are those put back."""
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
        """From here on no `Unblocked` is raised: what follows a signal has its own deadline."""
        self._waiting = False
        if self._timer is not None:
            self._timer.cancel()

    def raise_received(self) -> NoReturn:
        """Raise what the signal means to Python: `KeyboardInterrupt`, or `SystemExit(143)`."""
        if self.received == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._forcing:
            self._forcing = False
            if self._waiting:
                raise Unblocked
        elif self.received is None and not self._starting:
            self.received = number
            if self._waiting:
                self._timer = threading.Timer(_GRACE_S, self._unblock)
                self._timer.daemon = True
                self._timer.start()
        else:
            self.twice = self.received is not None
            self.received = self.received or number
            found = self._found[number]
            if callable(found):  # that of the command ends the process, whatever it is doing
                found(number, frame)
            self.raise_received()

    def _unblock(self) -> None:
        if self._waiting:
            self._forcing = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
