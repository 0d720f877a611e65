"""Make the methods of an object run one at a time, even if several threads call them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(lock_name: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that lets only one thread at a time run the decorated methods of an object.

    A running call may call other decorated methods of the same object.

    Args:
        lock_name: Attribute that stores the lock. Only methods with the same `lock_name` wait for each other.
    """
    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            # `setdefault` of a dictionary is atomic, so all threads use the same lock.
            with vars(self).get(lock_name) or vars(self).setdefault(lock_name, threading.RLock()):
                return method(self, *args, **kwargs)

        return call

    return decorate
