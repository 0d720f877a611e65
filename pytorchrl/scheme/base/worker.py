"""The base class of all workers, and the context in which they are built."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pytorchrl.errors import ConfigError
from pytorchrl.runtime import Journal, Runtime, ThreadRuntime
from pytorchrl.scheme.numerics import Numerics
from pytorchrl.scheme.transport.link import Peer
from pytorchrl.support.numbers import plain

if TYPE_CHECKING:
    from pytorchrl.scheme.transport.messages import Weights


def check_timeout(value: object) -> None:
    """Raise `ConfigError` unless `value` is a positive, finite number of seconds."""
    value = plain(value)
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


@dataclass(frozen=True, kw_only=True)
class Context:
    """The surroundings in which a worker is built, which do not depend on the class of the worker.

    Attributes:
        runtime: The runtime in which the worker runs, and in which it starts the workers below it.
        incarnation: 0 for the first worker with an index; each replacement has a larger number.
        num_threads: PyTorch threads of the worker's process; None does not change them.
        numerics: Settings of the worker's process; None does not change them.
        journal: The journal of the gradient worker whose process the worker shares; None: the worker has its own.
        initial_weights: Weights to start from; None keeps the actor's own initialization.
    """

    runtime: Runtime = field(default_factory=ThreadRuntime)
    incarnation: int = 0
    num_threads: int | None = None
    numerics: Numerics | None = None
    journal: Journal | None = None
    initial_weights: Weights | None = None

    @classmethod
    def within(cls, runtime: Runtime | None) -> Context:
        """Return the default context in a runtime; None: threads."""
        return cls() if runtime is None else cls(runtime=runtime)


class Worker(Peer):
    """The base class of all workers of a tree.

    Args:
        index_worker: Index in the worker set: 0 for the local worker, 1..N for remote workers.
        num_threads: PyTorch threads of this process; None does not change them.
        numerics: Settings of this process; None does not change them.
    """

    def __init__(self, index_worker: int, num_threads: int | None = None, numerics: Numerics | None = None) -> None:
        self.index_worker = index_worker
        keep_freed_memory()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if numerics is not None:
            numerics.apply()

    def ready(self) -> object:
        """Return once this worker is built. An override may also wait until the workers below this worker are built."""
        return self.index_worker
