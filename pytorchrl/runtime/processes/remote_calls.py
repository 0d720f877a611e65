"""The calls that this process has made to worker processes, and the connections to these processes.

No separate thread receives the answers: one of the threads that wait for an answer reads the answers of all workers,
and wakes the other waiting threads.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
import time
from collections.abc import Callable

from pytorchrl.errors import WorkerDiedError, WorkerLostError
from pytorchrl.runtime.base import Outcome
from pytorchrl.runtime.processes.channel import Channel, ClosedError, FullError, Message
from pytorchrl.runtime.processes.start import connect
from pytorchrl.runtime.processes.wire import Value
from pytorchrl.runtime.processes.worker import ERROR

# If the connection is full, because the worker is stopped or overloaded, a call fails after this many seconds.
_FULL_TIMEOUT_S = 5.0
_FULL_INTERVAL_S = 0.01
_LONGEST_WAIT_S = 3600.0
# If no other thread is reading answers, a waiting thread tries to become the reader after this many seconds.
_TURN_INTERVAL_S = 0.001


class RemoteCall:
    """A call to a worker process.

    Attributes:
        worker: Name of the worker.
        is_over: Whether the call has an outcome.
    """

    __slots__ = ("_answer", "_outcome", "is_over", "worker")

    def __init__(self, worker: str) -> None:
        self.worker, self.is_over = worker, False
        self._answer: Message | None = None
        self._outcome: Outcome[Value] | None = None

    def settle(self, answer: Message | WorkerLostError) -> None:
        """Store the answer, or the error that prevents an answer."""
        if isinstance(answer, Message):
            self._answer = answer
        else:
            self._outcome = Outcome(self.worker, error=answer)
        self.is_over = True

    def outcome(self) -> Outcome[Value]:
        """Return the outcome of a call that is over."""
        if self._outcome is None:
            assert self._answer is not None, "the call is not over"
            answer, self._answer = self._answer, None
            value = answer.take()
            if answer.kind == ERROR:
                self._outcome = Outcome(self.worker, error=value.received())
            else:
                self._outcome = Outcome(self.worker, value)
        return self._outcome


class _Peer:
    """A worker process that this process calls.

    Attributes:
        name: Name of the worker.
        channel: Connection to the worker; None if the worker has ended.
        pending: The calls that have no outcome yet, by number.
    """

    def __init__(self, name: str, channel: Channel | None) -> None:
        self.name, self.channel = name, channel
        self.pending: dict[int, RemoteCall] = {}


class RemoteCalls:
    """All calls of this process to worker processes. Any thread may call the methods."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()  # guards the dictionaries
        self._peers: dict[str, _Peer] = {}
        self._by_file: dict[int, _Peer] = {}
        self._numbers = itertools.count()
        # guards the connections: only the holder reads answers. The lock is reentrant, so that the thread can acquire
        # it again if Ctrl-C has prevented its release.
        self._reading = threading.RLock()
        self._is_reading = False
        self._changed = threading.Condition()  # guards no data: it is notified when answers have been read

    def call(self, address: str, name: str, kind: int, method: str, value: object) -> RemoteCall:
        """Send a call to the worker at an address."""
        peer, call, number = self._peer(address, name), RemoteCall(name), next(self._numbers)
        peer.pending[number] = call
        deadline = time.monotonic() + _FULL_TIMEOUT_S
        while not call.is_over:
            channel = peer.channel
            try:
                if channel is None:
                    raise ClosedError
                channel.send(kind, number, method, value, wait=False)
                break
            except ClosedError:
                self._settle(peer, number, _died(name))
            except FullError:
                if time.monotonic() > deadline:
                    self._settle(peer, number, WorkerLostError(f"{name} does not read its calls"))
                else:
                    self.wait(lambda: False, _FULL_INTERVAL_S)
        return call

    def _peer(self, address: str, name: str) -> _Peer:
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(name, None)
                with contextlib.suppress(OSError):  # `connect` fails if the worker has ended
                    peer.channel = Channel(connect(address))
                    self._by_file[peer.channel.connection.fileno()] = peer
                    self._epoll.register(peer.channel.connection.fileno(), select.EPOLLIN)
            return peer

    def _settle(self, peer: _Peer, number: int, answer: Message | WorkerLostError) -> None:
        if (call := peer.pending.pop(number, None)) is not None:
            call.settle(answer)

    def is_alive(self, address: str) -> bool:
        """Return whether the worker at an address is running, judged by the connection to the worker."""
        return self._peer(address, "").channel is not None

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Receive answers until `is_over()` is true, for at most `timeout_s` seconds; return whether it is true.

        Answers that have arrived already are received first, even if `is_over()` is true or `timeout_s` is 0.
        """
        deadline = time.monotonic() + min(timeout_s, _LONGEST_WAIT_S)
        self._turn(is_over, 0.0)
        while not is_over() and (left := deadline - time.monotonic()) > 0:
            self._turn(is_over, left)
        return is_over()

    def _turn(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Read the next answers; if another thread is reading, wait until that thread has read answers."""
        if self._reading.acquire(blocking=False):
            try:
                self._is_reading = True
                self._read(timeout_s)
            finally:
                self._is_reading = False
                self._reading.release()
                with self._changed:
                    self._changed.notify_all()
        elif timeout_s:
            with self._changed:
                if not is_over():
                    self._changed.wait(timeout_s if self._is_reading else min(timeout_s, _TURN_INTERVAL_S))

    def _read(self, timeout_s: float) -> None:
        for file, _ in self._epoll.poll(timeout_s):
            peer = self._by_file.get(file)
            if peer is None or peer.channel is None:
                continue
            try:
                message = peer.channel.receive()
            except ClosedError:
                self._end(peer)
            else:
                self._settle(peer, message.number, message)

    def _end(self, peer: _Peer) -> None:
        """Close the connection to a worker that has ended; its pending calls fail."""
        with self._lock:
            channel, peer.channel = peer.channel, None
            if channel is None:
                return
            del self._by_file[channel.connection.fileno()]
            self._epoll.unregister(channel.connection.fileno())
        channel.close()
        for number in list(peer.pending):
            self._settle(peer, number, _died(peer.name))

    def close(self) -> None:
        """Close all connections; pending calls fail."""
        for peer in list(self._peers.values()):
            self._end(peer)
        self._peers.clear()


def _died(name: str) -> WorkerDiedError:
    return WorkerDiedError(f"{name} is lost: its process has ended")
