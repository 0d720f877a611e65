"""Send values between two processes on this machine over a socket and shared memory.

A message is one packet of the socket. The packet contains the scalars of the value, and the bytes of its arrays. If the
arrays are large, they are written into a block of shared memory, and the packet contains only the number of this block.
The file descriptor of a block accompanies the first packet that uses the block.
"""

from __future__ import annotations

import array
import marshal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import cloudpickle
import numpy as np

from pytorchrl.runtime.processes.shared_memory import Block, BlockPool, MappedBlocks, is_reused
from pytorchrl.runtime.processes.wire import (
    Build,
    MessageParts,
    ScalarList,
    Stored,
    StoredValue,
    Structure,
    Value,
    builder_of,
    take_apart,
)

Content: TypeAlias = bytes | tuple[int, int]
"""Bytes of arrays, or (number of the block of shared memory that contains them, their size in bytes)."""
Head: TypeAlias = tuple[Value, ...]
"""Content of a packet: plain values."""

# Up to this size in bytes, arrays are part of the packet, because a block of shared memory would take longer.
LARGEST_ENCLOSED = 4096
# Packets of more than this number of bytes are written into a block. The kernel's own limit for a packet is
# `net.core.wmem_default`, usually 212,992 bytes.
_LARGEST_PACKET = 32768
# The largest number of structures (the types and names in a value, see `wire`) to which a channel assigns numbers. A
# structure with a number is sent once, and later messages contain only its number. Others are sent with each message.
_MOST_STRUCTURES = 1000
_UNNUMBERED = -1
_MOST_FILE_BYTES = 253 * array.array("i").itemsize  # the kernel sends at most 253 descriptors with a packet
_MARSHAL_VERSION = 2  # later versions of the format look for objects that occur twice, which takes longer

_pool = BlockPool()


@dataclass(slots=True)
class Message:
    """A message that was received. Its value is built when `take` is called.

    Attributes:
        kind: Kind of the message, such as `worker.CALL` or `worker.VALUE`.
        number: Number of the call to which the message belongs.
        method: Name of the method to call; "" if the message is not a call.
    """

    kind: int
    number: int
    method: str
    _build: Build
    _scalars: ScalarList
    _data: np.ndarray
    _stored: list[tuple[ScalarList, np.ndarray]]

    def take(self) -> Value:
        """Build and return the value; arrays in it are read-only views of the message."""
        return self._build(iter(self._scalars), self._data, _each(self._stored))


def _each(stored: list[tuple[ScalarList, np.ndarray]]) -> Iterator[Stored]:
    return ((iter(scalars), data) for scalars, data in stored)


class Shared(StoredValue):
    """A value that is encoded and stored once, and can then be sent to many readers.

    If a message contains this object, the reader receives the value instead of the object.

    Args:
        value: The value; later changes of its arrays have no effect.
    """

    def __init__(self, value: object) -> None:
        self.structure, parts = take_apart(value)
        self.scalars, self.size, self.parts = parts.scalars, parts.size, parts.stored
        self.block: Block | None = None
        self.data = b""
        if parts.size > LARGEST_ENCLOSED:
            self.block = _pool.acquire(parts.size)
            parts.copy_to(self.block.memory)
        else:
            self.data = _bytes_of(parts)

    def __del__(self) -> None:
        if self.block is not None:
            _pool.release(self.block.number)


def _bytes_of(parts: MessageParts) -> bytes:
    memory: np.ndarray = np.zeros(parts.size, np.uint8)
    parts.copy_to(memory)
    return memory.tobytes()


class ClosedError(Exception):
    """The other process has ended, or has closed the channel."""


class FullError(Exception):
    """The connection is full, because the other process does not read the messages that were sent to it."""


class Channel:
    """One end of a connection between two processes.

    `send` may be called by any thread, and `receive` by one thread at a time.

    Args:
        connection: Connected socket of the type SOCK_SEQPACKET.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        # guards the order of messages, and the numbers of structures:
        # self._known <= {*self._numbers.values(), _UNNUMBERED}
        self._sending = threading.Lock()
        self._counting = threading.Lock()  # guards `_used`: all(count >= 0 for count in self._used.values())
        self._numbers: dict[Structure, int] = {}
        self._known: set[int] = set()  # numbers of the structures that the other process knows
        self._builders: dict[int, Build] = {}  # keys: the numbers that the other process gave to structures
        self._mapped = MappedBlocks()
        self._sent: set[int] = set()  # blocks that the other process has mapped
        self._used: Counter[int] = Counter()  # blocks that the other process has not released
        self._buffer, self._file_bytes = bytearray(2 * _LARGEST_PACKET), socket.CMSG_SPACE(_MOST_FILE_BYTES)

    def send(self, kind: int, number: int, method: str, value: object, *, wait: bool = True) -> None:
        """Send a message.

        Args:
            kind: Kind of the message, such as `worker.CALL` or `worker.VALUE`.
            number: Number of the call to which the message belongs.
            method: Name of the method to call; "" if the message is not a call.
            value: The value to send.
            wait: Whether to wait while the connection is full.

        Raises:
            ClosedError: The channel is closed.
            FullError: The connection is full, and `wait` is False.
        """
        structure, parts = take_apart(value)
        with self._sending:
            blocks: list[Block] = []
            try:
                content = self._placed(parts, blocks)
                stored = list(self._placed_stored(parts.stored, blocks))
                layout, definition = self._layout_of(structure)
                head = (kind, number, method, layout, definition, parts.scalars, content, stored)
                self._write(head, blocks, 0 if wait else socket.MSG_DONTWAIT)
            except Exception:  # the message was not sent
                while blocks:
                    _pool.release(blocks.pop().number)
                raise
            finally:
                # If Ctrl-C interrupts the lines above, the message may have been sent. Its blocks then count as used.
                with self._counting:
                    self._used.update(block.number for block in blocks)
            # If Ctrl-C interrupts before this line, a later message contains the definition again, which does no harm.
            self._known.add(layout)

    def _layout_of(self, structure: Structure) -> tuple[int, bytes]:
        """Return (number, definition) for a structure: the number that identifies it in messages, and its pickled form.

        The number is `_UNNUMBERED` if none is left. The pickled form is b"" if the other process has it already.
        """
        number = self._numbers.get(structure, _UNNUMBERED)
        if number == _UNNUMBERED and len(self._numbers) < _MOST_STRUCTURES:
            number = self._numbers[structure] = len(self._numbers)
        is_known = number != _UNNUMBERED and number in self._known
        return number, b"" if is_known else cloudpickle.dumps(structure)

    @staticmethod
    def _placed(parts: MessageParts, blocks: list[Block]) -> Content:
        if parts.size <= LARGEST_ENCLOSED:
            return _bytes_of(parts)
        block = _pool.acquire(parts.size)
        blocks.append(block)
        parts.copy_to(block.memory)
        return block.number, parts.size

    def _placed_stored(self, values: list[StoredValue], blocks: list[Block]) -> Iterator[tuple[ScalarList, Content]]:
        for value in values:
            assert isinstance(value, Shared)
            content: Content = value.data
            if value.block is not None:
                _pool.use(value.block)
                blocks.append(value.block)
                content = value.block.number, value.size
            yield value.scalars, content
            yield from self._placed_stored(value.parts, blocks)

    def _write(self, head: Head, blocks: list[Block], flags: int) -> None:
        """Send `head`, and tell the other process which of its memory blocks are no longer used here.

        Values of the message lie in `blocks`. File descriptors are sent for the blocks that the other process has not
        mapped yet.
        """
        released = self._mapped.take_released()
        try:
            packet, new = self._packed(released, blocks, head)
            if len(packet) > _LARGEST_PACKET:
                content = np.frombuffer(marshal.dumps(head, _MARSHAL_VERSION), np.uint8)
                block = _pool.acquire(content.size)
                blocks.append(block)
                block.memory[:content.size] = content
                packet, new = self._packed(released, blocks, (block.number, content.size))
            files = array.array("i", [block.file for block in new])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if new else []
            self.connection.sendmsg([packet], ancillary, flags)
        except BlockingIOError as error:
            self._mapped.released.extend(released)
            raise FullError from error
        except OSError as error:
            raise ClosedError(str(error)) from error
        self._sent.update(block.number for block in new if is_reused(block.capacity))

    def _packed(self, released: list[int], blocks: list[Block],
                head: Head) -> tuple[bytes, list[Block]]:
        new = list({block.number: block for block in blocks if block.number not in self._sent}.values())
        return marshal.dumps((released, [(block.number, block.capacity) for block in new], head),
                             _MARSHAL_VERSION), new

    def receive(self) -> Message:
        """Receive a message.

        Raises:
            ClosedError: The other process has ended, or has closed the channel.
        """
        try:
            size, ancillary, _, _ = self.connection.recvmsg_into(
                [self._buffer], self._file_bytes, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ClosedError(str(error)) from error
        if not size:
            raise ClosedError("the connection was closed")
        released, new, head = marshal.loads(memoryview(self._buffer)[:size])
        files = array.array("i", b"".join(data for _, _, data in ancillary))
        for (number, capacity), file in zip(new, files, strict=True):
            self._mapped.add(number, capacity, file)
        self._count_released(released)
        if len(head) == len(("block", "size")):
            head = marshal.loads(self._mapped.view(*head).data)
        kind, number, method, layout, definition, scalars, content, stored = head
        return Message(kind, number, method, self._builder(layout, definition), scalars, self._data(content),
                       [(own, self._data(place)) for own, place in stored])

    def _builder(self, layout: int, definition: bytes) -> Build:
        if not definition:
            return self._builders[layout]
        build = builder_of(cloudpickle.loads(definition))
        if layout != _UNNUMBERED:
            self._builders[layout] = build
        return build

    def _data(self, content: Content) -> np.ndarray:
        return np.frombuffer(content, np.uint8) if isinstance(content, bytes) else self._mapped.view(*content)

    def _count_released(self, numbers: list[int]) -> None:
        with self._counting:
            for number in numbers:
                self._used[number] -= 1
                _pool.release(number)

    def close(self) -> None:
        """Close the channel. Further calls do nothing.

        The blocks of shared memory that the other process had not yet released become free for other messages.
        """
        self.connection.close()
        with self._counting:
            used, self._used = self._used, Counter()
        for number in used.elements():
            _pool.release(number)
