"""The base class of all workers, and enums for settings of a scheme."""

from __future__ import annotations

import difflib
import functools
import math
from enum import Enum
from typing import NoReturn

import numpy as np

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.transport.link import Peer


class _Choice(str, Enum):
    """An enum of strings; the error for an unknown string suggests the most similar member."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        allowed = [choice.value for choice in cls]
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{cls.__name__.lower()} must be one of {allowed}, got {value!r}{hint}")

    def __str__(self) -> str:
        return str(self.value)


class Communication(_Choice):
    """Whether workers wait for each other."""

    SYNC = "synchronous"
    ASYNC = "asynchronous"


class Execution(_Choice):
    """Where an operation runs: in the parent worker or in remote workers."""

    CENTRAL = "Central"
    PARALLEL = "Parallel"


SYNC, ASYNC = Communication.SYNC, Communication.ASYNC
CENTRAL, PARALLEL = Execution.CENTRAL, Execution.PARALLEL


def check_execution(level: str, execution: Execution | str, num_workers: int) -> Execution:
    """Return `execution` as an enum member; raise `ConfigError` if it is central and there are several workers.

    Args:
        level: "col" for collection workers, or "grad" for gradient workers.
        execution: "Central" or "Parallel".
        num_workers: Number of these workers.
    """
    execution = Execution(execution)
    if execution is CENTRAL and num_workers > 1:
        above = "GWorkerSet.create_factory" if level == "col" else "Scheme.from_factory"
        raise ConfigError(f"{level}_execution='Central' contradicts num_{level}_workers={num_workers}: the local "
                          f"worker would do all the work; give {level}_execution='Parallel' to the level above (its "
                          f"default in {above} is 'Central'), or 1 worker")
    return execution


def check_count(name: str, value: object, low: int = 1) -> int:
    """Return `value` if it is a whole number >= `low`, else raise `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number >= {low}, got {value!r}")
    return value


def check_timeout(value: object) -> None:
    """Raise `ConfigError` unless `value` is a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"timeout_s must be a number of seconds > 0, got {value!r}")


_LARGEST_BLOCK = 2**25 - 2**13
"""Size in bytes of a block that raises glibc's `mmap` threshold almost to its maximum of 32 MB.

The block is 8 KB smaller than the maximum, because glibc adds a header and rounds the size up to whole pages.
"""


@functools.cache  # runs once per process
def keep_freed_memory() -> None:
    """Prevent glibc from returning freed memory to the system, because this process will soon request it again.

    Every update allocates and frees arrays of the same sizes, up to a few megabytes. glibc returns a freed block at
    once if the block is larger than the `mmap` threshold, and returns free memory at the end of the heap if this memory
    exceeds the trim threshold. If a freed block is larger than the `mmap` threshold and has at most 32 MB, glibc also
    raises the `mmap` threshold to the size of the block, and the trim threshold to twice that size (mallopt(3),
    `M_MMAP_THRESHOLD`). This function therefore allocates and frees a block of almost 32 MB, without writing to it. The
    cost is at most 64 MB of unused memory for each thread. Thresholds that are set by environment variables
    (`MALLOC_*`) stay in effect; other C libraries are not affected.
    """
    np.empty(_LARGEST_BLOCK, np.uint8)


class Worker(Peer):
    """The base class of all workers of a tree.

    Args:
        index_worker: Index in the worker set: 0 for the local worker, 1..N for remote workers.
    """

    def __init__(self, index_worker: int) -> None:
        self.index_worker = index_worker
        keep_freed_memory()

    def ready(self) -> object:
        """Return once this worker is built. An override may also wait until the workers below this worker are built."""
        return self.index_worker
