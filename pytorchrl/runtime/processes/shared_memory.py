"""Blocks of anonymous shared memory, which one process writes and other processes on this machine read.

A block is a memfd: it has no name in any file system, so the kernel frees it when the last process that uses it ends,
even if the process is killed. Its file descriptor is sent over a socket once, and the reader keeps the block mapped.
The writer reuses a block of up to 128 MiB when all readers have dropped their views of it.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

_SMALLEST = 2**16
# Larger blocks are freed after their first use, so that one large message, such as a replay storage in a checkpoint,
# does not occupy memory for the rest of the run.
_LARGEST_REUSED = 2**27


def is_supported() -> bool:
    """Return whether this platform has anonymous shared memory."""
    return hasattr(os, "memfd_create")


class Block:
    """Shared memory that this process writes.

    Args:
        number: Number of the block, which is unique in this process.
        capacity: Size in bytes.

    Attributes:
        number, capacity: The arguments.
        file: File descriptor of the memory.
        memory: (capacity,) uint8, the bytes of the block.
        uses: Number of readers that have not dropped their views, plus 1 while the writer needs the content.
    """

    def __init__(self, number: int, capacity: int) -> None:
        self.number, self.capacity, self.uses = number, capacity, 1
        self.file = os.memfd_create("pytorchrl")
        os.ftruncate(self.file, capacity)
        self.memory: np.ndarray = np.frombuffer(mmap.mmap(self.file, capacity), np.uint8)

    def __del__(self) -> None:
        os.close(self.file)


class BlockPool:
    """The blocks that this process writes. All methods may be called by any thread.

    Attributes:
        num_blocks: Number of blocks that are in use or kept for reuse.
        peak: Largest number of ended uses that have waited to be counted.
    """

    def __init__(self) -> None:
        # guards the blocks: not any(block.uses for blocks in self._free.values() for block in blocks)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._blocks: dict[int, Block] = {}
        self._free: dict[int, list[Block]] = {}
        # A block number for each use that has ended. `release` only appends to this queue, without the lock, because
        # finalizers call `release`, and a finalizer may run at any time, even while its thread holds the lock.
        self._ended: deque[int] = deque()
        self.peak = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are in use or kept for reuse."""
        with self._lock:
            self._collect()
            return len(self._blocks)

    def acquire(self, size: int) -> Block:
        """Return a block of at least `size` bytes; call `release` when the writer no longer needs the content."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        if capacity > _LARGEST_REUSED:
            capacity = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._collect()
            if free := self._free.get(capacity):
                block = free.pop()
                block.uses = 1
            else:
                block = Block(next(self._numbers), capacity)
                self._blocks[block.number] = block
            return block

    def use(self, block: Block) -> None:
        """Count one more use of a block that is already in use; see `Block.uses`."""
        with self._lock:
            block.uses += 1

    def release(self, number: int) -> None:
        """End one use of a block; when no use is left, the block is reused or freed."""
        self._ended.append(number)

    def _collect(self) -> None:
        self.peak = max(self.peak, len(self._ended))
        while self._ended:
            block = self._blocks[self._ended.popleft()]
            block.uses -= 1
            if block.uses:
                continue
            if block.capacity > _LARGEST_REUSED:
                del self._blocks[block.number]
            else:
                self._free.setdefault(block.capacity, []).append(block)


class MappedBlocks:
    """The blocks that this process reads and that one other process writes.

    Attributes:
        released: For each view that this process has dropped, the number of the view's block.
        peak: Largest number of entries that `take_released` has found in `released`.
    """

    def __init__(self) -> None:
        self.released: deque[int] = deque()
        self.peak = 0
        self._mapped: dict[int, mmap.mmap] = {}
        self._anchors: dict[int, weakref.ref[np.ndarray]] = {}
        self._keys = itertools.count()

    def add(self, number: int, capacity: int, file: int) -> None:
        """Map a block, and close its file descriptor."""
        self._mapped[number] = mmap.mmap(file, capacity, prot=mmap.PROT_READ)
        os.close(file)

    def view(self, number: int, size: int) -> np.ndarray:
        """Return a view of the first `size` bytes of block `number`: (size,) uint8, read-only.

        When no array refers to the view any more, `number` is added to `released`.
        """
        block = self._mapped[number]
        if len(block) > _LARGEST_REUSED:
            del self._mapped[number]
        anchor: np.ndarray = np.frombuffer(block, np.uint8, size)
        key = next(self._keys)
        self._anchors[key] = weakref.ref(anchor, functools.partial(self._release, key, number))
        return anchor

    def take_released(self) -> list[int]:
        """Remove and return the entries of `released`; views that are dropped meanwhile stay for the next call."""
        number = len(self.released)
        self.peak = max(self.peak, number)
        return [self.released.popleft() for _ in range(number)]

    def _release(self, key: int, number: int, _: weakref.ref[np.ndarray]) -> None:
        del self._anchors[key]
        self.released.append(number)


def is_reused(capacity: int) -> bool:
    """Return whether the writer reuses blocks of this capacity; readers keep such blocks mapped."""
    return capacity <= _LARGEST_REUSED
