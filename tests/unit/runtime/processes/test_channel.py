"""Tests of channels between two processes; both ends are in this process."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

import cloudpickle
import numpy as np
import pytest

from pytorchrl.runtime.processes import channel as module
from pytorchrl.runtime.processes import shared_memory
from pytorchrl.runtime.processes.channel import LARGEST_ENCLOSED, Channel, ClosedError, FullError, Shared
from pytorchrl.runtime.processes.shared_memory import BlockPool

NUMBERS = itertools.count(10**9)


class OwnPool(BlockPool):
    """A `BlockPool` that ignores blocks of earlier pools.

    Values that earlier tests have stored or received may be garbage that is collected only now, which releases blocks
    of the pool of that time. Their numbers are less than all numbers of this pool.
    """

    def __init__(self):
        super().__init__()
        self._numbers, self._before = NUMBERS, next(NUMBERS)

    def release(self, number):
        if number > self._before:
            super().release(number)


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """Return the blocks of this process; after the test, each block must have been released."""
    pool = OwnPool()
    monkeypatch.setattr(module, "_pool", pool)
    yield pool
    pool.num_blocks  # noqa: B018 - counts the uses that have ended
    assert [block.number for block in pool._blocks.values() if block.uses] == []
    assert not any(block.uses for blocks in pool._free.values() for block in blocks)


@pytest.fixture
def ends(pool):
    """Return the two ends of a channel."""
    ends = [Channel(connection) for connection in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield ends
    for end in ends:
        assert end._known <= {*end._numbers.values(), -1}
        assert all(count >= 0 for count in end._used.values())
        end.close()


def passed(sender, receiver, value):
    sender.send(1, 2, "method", value)
    message = receiver.receive()
    assert (message.kind, message.number, message.method) == (1, 2, "method")
    return message.take()


@pytest.mark.parametrize("size", [0, 1, LARGEST_ENCLOSED, LARGEST_ENCLOSED + 1, 100_000, 2**20])
def test_arrays_of_all_sizes_arrive(ends, size):
    first, second = np.arange(size, dtype=np.uint8), np.linspace(0, 1, 3)
    built = passed(*ends, [first, second])
    assert built[0].tobytes() == first.tobytes()
    assert built[1].tobytes() == second.tobytes()
    assert not any(array.flags.writeable for array in built if array.size)


@pytest.mark.parametrize("size", [0, 20_000, 1_000_000])
def test_scalars_of_all_sizes_arrive(ends, size):
    built = passed(*ends, {"text": "x" * size, "array": np.ones(3)})
    assert len(built["text"]) == size
    assert built["array"].sum() == 3


def test_a_structure_is_pickled_once_in_each_direction(ends, monkeypatch):
    pickled = []
    dumps = cloudpickle.dumps
    monkeypatch.setattr(cloudpickle, "dumps", lambda value, *rest, **options: pickled.append(value) or dumps(
        value, *rest, **options))
    for size in (3, 5000, 7):
        assert passed(*ends, {"a": np.ones(size), "b": 1})["a"].sum() == size
        assert passed(*reversed(ends), {"a": np.ones(size), "b": 1})["a"].sum() == size
    assert len(pickled) == 2
    assert passed(*ends, {"c": 1}) == {"c": 1}
    assert passed(*ends, {"a": np.ones(2), "b": 1})["a"].sum() == 2
    assert len(pickled) == 3


def test_structures_beyond_the_limit_are_sent_each_time(ends, monkeypatch):
    monkeypatch.setattr(module, "_MOST_STRUCTURES", 2)
    for _ in range(3):
        for name in "abcd":
            assert passed(*ends, {name: [1, None]}) == {name: [1, None]}
    assert len(ends[0]._numbers) == len(ends[1]._builders) == 2


def test_a_block_is_reused_once_its_message_is_dropped_and_another_has_returned(ends, pool):
    large = np.ones(10_000)
    for _ in range(5):
        passed(*ends, large)
        passed(*reversed(ends), None)  # tells the sender that the receiver has dropped its view
    assert pool.num_blocks == 1


def test_a_view_stays_valid_while_other_messages_are_sent(ends, pool):
    kept = [passed(*ends, np.full(10_000, number)) for number in range(3)]
    for _ in range(5):
        passed(*reversed(ends), None)
        passed(*ends, np.full(10_000, 9))
    assert [array[0] for array in kept] == [0, 1, 2]
    assert pool.num_blocks >= 4


def test_the_file_of_a_block_is_sent_once(ends, monkeypatch):
    sent = []
    connection = ends[0].connection

    class Counting:
        def sendmsg(self, parts, ancillary, flags):
            sent.append(len(ancillary))
            return connection.sendmsg(parts, ancillary, flags)

        def __getattr__(self, name):
            return getattr(connection, name)
    ends[0].connection = Counting()
    for _ in range(4):
        passed(*ends, np.ones(10_000))
        passed(*reversed(ends), None)
    assert sent == [1, 0, 0, 0]


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_stored_value_is_written_once_for_many_readers(ends, pool, size):
    values = np.ones(size)
    shared = Shared({"weights": values, "version": 3})
    values[:] = 2  # later changes have no effect
    taken = [passed(*ends, (shared, number, {"again": shared})) for number in range(3)]
    for number, (value, count, more) in enumerate(taken):
        assert count == number
        for each in (value, more["again"]):
            assert each["version"] == 3
            assert each["weights"].sum() == size
    assert pool.num_blocks == (size > 1000)
    del shared, taken, value, more, each
    passed(*reversed(ends), None)
    other = np.ones(size)
    passed(*ends, other)
    assert pool.num_blocks == (size > 1000)


def test_a_stored_value_may_contain_another(ends):
    inner = Shared([np.ones(5000), "a"])
    built = passed(*ends, [Shared((inner, 1, np.zeros(5000))), 2])
    assert built[0][0][0].sum() == 5000
    assert (built[0][0][1], built[0][1], built[0][2].sum(), built[1]) == ("a", 1, 0, 2)


def test_a_closed_channel_is_an_error_and_releases_its_blocks(ends):
    ends[0].send(1, 2, "", np.ones(10_000))
    ends[1].close()
    with pytest.raises(ClosedError):
        ends[0].receive()
    with pytest.raises(ClosedError):
        ends[0].send(1, 2, "", np.ones(10_000))


def test_a_receiver_that_does_not_read_is_an_error_unless_the_sender_waits(ends):
    number = 0
    with contextlib.suppress(FullError):
        while number < 1000:
            ends[0].send(1, number, "", "x" * 10_000, wait=False)
            number += 1
    assert 3 < number < 1000
    assert [ends[1].receive().number for _ in range(number)] == list(range(number))
    assert passed(*ends, [np.ones(10_000)])[0].sum() == 10_000


def open_files():
    """Return (device, inode) of each open file of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the file was closed in the meantime
            status = os.fstat(int(name))
            found.add((status.st_dev, status.st_ino))
    return found


def test_no_file_descriptor_is_left(pool):
    before = open_files()
    ends = [Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    passed(*ends, [np.ones(100_000)])
    files = [end.connection.fileno() for end in ends] + [block.file for block in pool._blocks.values()]
    own = {(status.st_dev, status.st_ino) for status in map(os.fstat, files)}  # other threads may open other files
    assert len(own - before) == len(files) == 3
    while ends:
        ends.pop().close()
    pool._collect()
    pool._blocks.clear()
    pool._free.clear()
    assert not own & open_files()


def test_an_interrupted_send_does_not_mix_up_structures(ends, monkeypatch):
    """Check that values arrive unchanged if Ctrl-C ends a call of `send` directly after the packet was sent."""
    sender, receiver = ends
    write = Channel._write

    def interrupted(channel, *arguments):
        write(channel, *arguments)
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.send(1, 0, "", {"a": 1})
    assert receiver.receive().take() == {"a": 1}
    for value in ({"b": 2.0}, {"a": 3}, {"b": 4.0}, {"a": 5}):
        sender.send(1, 0, "", value)
        assert receiver.receive().take() == value


class Interrupted:
    """Connection that raises `KeyboardInterrupt` as soon as it has sent a packet."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendmsg(self, *arguments):
        self._connection.sendmsg(*arguments)
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_reused", [True, False])
def test_a_message_stays_intact_although_its_send_was_interrupted(ends, pool, monkeypatch, is_reused):
    """Check that no later message overwrites arrays that were sent before Ctrl-C ended the call of `send`."""
    if not is_reused:
        monkeypatch.setattr(shared_memory, "_LARGEST_REUSED", 2**16)
    sender, receiver = ends
    connection = sender.connection
    sender.connection = Interrupted(connection)
    with pytest.raises(KeyboardInterrupt):
        sender.send(1, 0, "", np.full(10_000, 1.0))
    sender.connection = connection
    received = [receiver.receive().take()]
    for value in (2.0, 3.0):
        sender.send(1, 0, "", np.full(10_000, value))
        received.append(receiver.receive().take())
    assert [array[0] for array in received] == [1.0, 2.0, 3.0]
    del received
    receiver.send(1, 0, "", None)
    sender.receive()
    assert not is_reused or pool.num_blocks == 3


def test_blocks_of_a_message_that_was_not_sent_are_free_again(ends, pool):
    sender, _ = ends
    with contextlib.suppress(FullError):
        while True:
            sender.send(1, 0, "", np.ones(10_000), wait=False)
    before = pool.num_blocks
    for _ in range(3):
        with pytest.raises(FullError):
            sender.send(1, 0, "", np.ones(10_000), wait=False)
    assert pool.num_blocks == before
