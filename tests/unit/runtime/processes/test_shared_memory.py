"""Tests of blocks of shared memory: what a reader sees, and when the writer reuses or frees a block."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pytorchrl.runtime.processes import shared_memory
from pytorchrl.runtime.processes.shared_memory import BlockPool, MappedBlocks, is_reused


@pytest.fixture
def pool():
    pool = BlockPool()
    yield pool
    assert not any(block.uses for blocks in pool._free.values() for block in blocks)


def mapped(block):
    """Return the blocks of a reader that has mapped `block`."""
    blocks = MappedBlocks()
    blocks.add(block.number, block.capacity, os.dup(block.file))
    return blocks


def test_a_reader_sees_what_the_writer_wrote_and_cannot_change_it(pool):
    block = pool.acquire(100_000)
    block.memory[:5] = [1, 2, 3, 4, 5]
    view = mapped(block).view(block.number, 5)
    assert view.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9


def test_a_view_is_released_when_the_last_array_that_uses_it_is_dropped(pool):
    block = pool.acquire(80)
    blocks = mapped(block)
    view = blocks.view(block.number, 80)
    part = np.ndarray((2, 3), np.float64, view, 8)[1]
    del view
    assert list(blocks.released) == []
    del part
    assert list(blocks.released) == [block.number]


def test_each_view_of_a_block_is_released_by_itself(pool):
    block = pool.acquire(8)
    blocks = mapped(block)
    views = [blocks.view(block.number, 8) for _ in range(3)]
    del views[1]
    assert list(blocks.released) == [block.number]
    views.clear()
    assert blocks.take_released() == [block.number] * 3
    assert list(blocks.released) == blocks.take_released() == []
    assert blocks.peak == 3


def test_blocks_in_use_are_distinct_and_released_blocks_are_reused(pool):
    blocks = [pool.acquire(size) for size in (10, 70_000, 10)]
    assert len({block.number for block in blocks}) == 3
    pool.release(blocks[0].number)
    assert pool.acquire(60_000) is blocks[0]  # the same capacity
    assert pool.acquire(60_000) not in blocks
    assert pool.num_blocks == 4
    assert pool.peak == 1
    for block in blocks[:2]:
        pool.release(block.number)
    assert pool.num_blocks == 4
    assert pool.peak == 2


def test_a_block_is_reused_only_after_its_last_use(pool):
    block = pool.acquire(10)
    pool.use(block)
    pool.release(block.number)
    other = pool.acquire(10)
    assert other is not block
    pool.release(block.number)
    assert pool.acquire(10) is block


def test_large_blocks_are_freed_after_their_use(pool, monkeypatch):
    monkeypatch.setattr(shared_memory, "_LARGEST_REUSED", 2**16)
    block = pool.acquire(2**16 + 1)
    assert not is_reused(block.capacity)
    assert block.capacity == 2**16 + os.sysconf("SC_PAGE_SIZE")
    blocks = mapped(block)
    view = blocks.view(block.number, 10)
    with pytest.raises(KeyError):  # the reader keeps the memory only as long as the view
        blocks.view(block.number, 10)
    number = block.number
    del view, block
    pool.release(number)
    assert pool.num_blocks == 0


@pytest.mark.parametrize(("size", "capacity"), [(1, 2**16), (2**16, 2**16), (2**16 + 1, 2**17), (2**27, 2**27)])
def test_capacities_are_powers_of_two(pool, size, capacity):
    assert pool.acquire(size).capacity == capacity
