"""What all workers have in common, and the closed choices of a scheme."""

from __future__ import annotations

import difflib
import functools
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.transport.link import Peer


class _Choice(str, Enum):
    """A closed set of texts; a wrong one is refused with the nearest right one."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        allowed = [choice.value for choice in cls]
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{cls.__name__.lower()} must be one of {allowed}, got {value!r}{hint}")

    def __str__(self) -> str:
        return str(self.value)


class Communication(_Choice):
    """Who waits for whom."""

    SYNC = "synchronous"
    ASYNC = "asynchronous"


class Execution(_Choice):
    """Where an operation runs: in its parent, or in remote workers."""

    CENTRAL = "Central"
    PARALLEL = "Parallel"


SYNC, ASYNC = Communication.SYNC, Communication.ASYNC
CENTRAL, PARALLEL = Execution.CENTRAL, Execution.PARALLEL


def check_count(name: str, value: object, low: int = 1) -> int:
    """Return `value` if it is a whole number >= `low`, else raise `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number >= {low}, got {value!r}")
    return value


def check_fraction(name: str, value: object) -> float:
    """Return `value` if it is a number in (0, 1], else raise `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{name} must be a number in (0, 1], got {value!r}")
    return float(value)


_LARGEST_BLOCK = 2**25 - 2**13
"""Bytes of the largest block that glibc still learns from, with room for its header and a page."""


@functools.cache  # once is enough
def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, where glibc would give it back and fault it in again a moment later.

    Every update makes and frees the same arrays of some megabytes. What is free at the end of the heap goes back to the
    system above a threshold, and blocks above another one are maps of their own; both thresholds follow the largest block
    that was ever freed, up to 32 MB (mallopt(3), `M_MMAP_THRESHOLD`). So one is freed here, which nobody has written to. Each
    thread then keeps 64 MB at most that it would have given back. Thresholds that the environment sets (`MALLOC_*`) stay,
    and other C libraries do not care.
    """
    np.empty(_LARGEST_BLOCK, np.uint8)


class Worker(Peer):
    """A place in the worker tree.

    Args:
        index_worker: Index in its worker set; 0 is local to its parent, 1..N are remote.
    """

    def __init__(self, index_worker: int) -> None:
        self.index_worker = index_worker
        keep_freed_memory()

    def ready(self) -> Any:
        """Answer once the constructor is done; workers may say more."""
        return self.index_worker
