"""Limit the time that a user's code may take in the learner thread."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from pytorchrl.support.terminal import Lines, get_logger
from pytorchrl.support.tracebacks import stack_of

logger = get_logger(__name__)


@contextlib.contextmanager
def time_limit(timeout_s: float | None, name: str) -> Iterator[None]:
    """Interrupt the code in the `with` block if it takes too long: log its stack, and raise an error in it.

    Only the main thread can be interrupted. In another thread, and in native code that does not return to Python, the
    error is raised when the block ends.

    Args:
        timeout_s: Longest time in seconds; None: no limit.
        name: Name of the code, for the log.

    Raises:
        TimeoutError: The code took longer; the message contains the stack at that time.
    """
    if timeout_s is None:
        yield
        return
    thread = threading.current_thread()
    lock = threading.Lock()  # guards `has_ended` and `text`: the alarm is raised only before the code has ended
    is_main, has_ended, text = thread is threading.main_thread(), False, ""

    def expire() -> None:
        nonlocal text
        with lock:
            if not has_ended:
                text = f"it has not returned within {timeout_s:g} s; it is in\n{stack_of(thread)}"
                logger.warning("%s hangs: %s", name, Lines(text))
                if is_main:
                    signal.pthread_kill(thread.ident or 0, signal.SIGALRM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if text:
            raise TimeoutError(text)
        if callable(found):  # the alarm is not from `expire`, so call the earlier handler
            found(number, frame)

    found = signal.signal(signal.SIGALRM, interrupt) if is_main else None
    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            has_ended = True
        if is_main:
            signal.signal(signal.SIGALRM, found)
    if text:
        raise TimeoutError(text)
