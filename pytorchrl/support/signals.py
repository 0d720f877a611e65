"""Let Ctrl-C end a loop of `Scheme.step` between two calls, and not in the middle of an update."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found] # `signal.getsignal` also looks for an enum member: slow
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

R = TypeVar("R")

GRACE_S = 2.0
"""Seconds from the first signal until an unfinished update is abandoned."""


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
