"""The base class of all workers, and enums for settings of a scheme."""

from __future__ import annotations

import functools
import math

import numpy as np

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.transport.link import Peer


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
