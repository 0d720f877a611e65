"""Let one thread pause another thread at a fixed point of its loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pytorchrl.runtime import Runtime

# Interval in seconds at which a waiting thread checks its conditions; an event wakes the thread immediately.
_POLL_INTERVAL_S = 0.1


class PausePoint:
    """A point in a thread's loop at which the thread pauses on request, until it is resumed.

    Args:
        runtime: The runtime, which provides the clock and the events.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()  # guards the next two attributes: self._is_requested or not self._is_paused
        self._is_requested = self._is_paused = False
        self._paused, self._resumed = runtime.make_event(), runtime.make_event()

    def pause_if_requested(self, is_over: Callable[[], bool]) -> None:
        """Pause the calling thread if a pause was requested; return after `resume`, or when `is_over()` is true."""
        while True:
            with self._lock:
                self._is_paused = self._is_requested and not is_over()
                if not self._is_paused:
                    return
            self._paused.set()
            self._resumed.wait(_POLL_INTERVAL_S)
            self._resumed.clear()

    def request(self, is_alive: Callable[[], bool], timeout_s: float) -> bool:
        """Request a pause; return whether the thread paused or ended within `timeout_s` seconds.

        The request stays in effect until `resume`.
        """
        deadline = self._runtime.now() + timeout_s
        while True:
            with self._lock:
                self._is_requested = True
                if self._is_paused:
                    return True
            if not is_alive():
                return True
            if self._runtime.now() >= deadline:
                return False
            self._paused.wait(min(timeout_s, _POLL_INTERVAL_S))
            self._paused.clear()

    def resume(self) -> None:
        """Withdraw the request for a pause, and resume the thread if it is paused."""
        with self._lock:
            self._is_requested = self._is_paused = False
        self._resumed.set()
