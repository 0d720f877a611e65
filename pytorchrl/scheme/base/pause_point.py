"""How the owner of a thread lets it rest for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pytorchrl.runtime import Runtime

# A waiting thread looks up this often; being told wakes it at once.
_POLL_INTERVAL_S = 0.1


class Parking:
    """A point of a thread's loop at which it rests when it is asked to, until it is let go.

    Args:
        runtime: Owner of clock and events.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._lock = runtime, threading.Lock()
        self._wanted = self._rests = False
        self._arrived, self._let_go = runtime.make_event(), runtime.make_event()

    def rest_if_asked(self, is_over: Callable[[], bool]) -> None:
        """The thread is at its point; it comes back once it is let go, or is to end."""
        while True:
            with self._lock:
                self._rests = self._wanted and not is_over()
                if not self._rests:
                    return
            self._arrived.set()
            self._let_go.wait(_POLL_INTERVAL_S)
            self._let_go.clear()

    def ask(self, is_alive: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the thread rests, or does not run at all, within `timeout_s`; it stays asked if not."""
        deadline = self._runtime.now() + timeout_s
        while True:
            with self._lock:
                self._wanted = True
                if self._rests:
                    return True
            if not is_alive():
                return True
            if self._runtime.now() >= deadline:
                return False
            self._arrived.wait(min(timeout_s, _POLL_INTERVAL_S))
            self._arrived.clear()

    def let_go(self) -> None:
        """Let the thread go on, if it rests."""
        with self._lock:
            self._wanted = self._rests = False
        self._let_go.set()
