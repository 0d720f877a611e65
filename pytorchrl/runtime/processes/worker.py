"""The process of a worker: one thread reads messages and runs urgent calls; the main thread runs all other calls."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import cloudpickle
import torch

from pytorchrl.runtime.processes.channel import Channel, ClosedError, Message
from pytorchrl.runtime.processes.start import is_own, serve
from pytorchrl.runtime.remote_errors import SentError
from pytorchrl.support.terminal import get_logger

START, CALL, SIGNAL, VALUE, ERROR = range(5)
"""Kinds of messages."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker process.

    Attributes:
        pickled: Pickled pair of the worker's class and the keyword arguments of its constructor.
        sys_path, folder: Paths from which modules are imported, and the working directory.
        num_threads: Number of torch threads.
    """

    pickled: bytes
    sys_path: list[str]
    folder: str
    num_threads: int


class _Host:
    """Object that builds the worker of this process at the first message, and then runs the worker's methods."""

    def __init__(self) -> None:
        self._worker: object = None
        self._failure: BaseException | None = None
        # Urgent calls (method, args, kwargs) that arrived before the worker was built.
        self._early: list[tuple[str, tuple[object, ...], Mapping[str, object]]] = []
        self._lock = threading.Lock()  # guards `_worker` and `_early`: self._worker is None or not self._early

    def build(self, start: Start) -> None:
        """Build the worker. If its constructor raises an error, every call of the worker raises this error."""
        try:
            sys.path[:] = start.sys_path
            os.chdir(start.folder)
            torch.set_num_threads(start.num_threads)
            cls, params = cloudpickle.loads(start.pickled)
            worker = cls(**params)
        except BaseException as error:  # noqa: BLE001 - every call reports the error
            self._failure = error
            return
        with self._lock:
            self._worker, early, self._early = worker, self._early, []
            for name, args, kwargs in early:
                getattr(worker, name)(*args, **kwargs)

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run a method of the worker; if the worker could not be built, raise the error of its constructor."""
        if self._failure is not None:
            raise self._failure
        return getattr(self._worker, method)(*args, **kwargs)

    def signal(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run a method immediately, and return its result.

        If the worker is not built yet, return None; the method runs as soon as the worker is built.
        """
        with self._lock:
            if self._worker is None:
                self._early.append((method, args, kwargs))
                return None
        return getattr(self._worker, method)(*args, **kwargs)


class _Reader(threading.Thread):
    """Thread that reads the messages of all callers.

    The thread belongs to the process and ends with it; an error in the thread ends the process, whose callers then find
    the worker lost.

    Attributes:
        calls: Calls for the main thread, in the order in which they arrived. The queue has no limit of its own: the
            callers limit it, for example to `col_in_flight` requests to each collection worker.
        peak: Largest number of calls, waiting or taken, when the main thread took a call.
    """

    def __init__(self, host: _Host, listener: socket.socket) -> None:
        super().__init__(name="ReaderThread", daemon=True)
        self._host, self._listener = host, listener
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._channels: dict[int, Channel] = {}
        self.calls: queue.SimpleQueue[tuple[Channel, Message]] = queue.SimpleQueue()
        self.peak = 0

    def run(self) -> None:
        try:
            while True:
                for file, _ in self._epoll.poll():
                    if file == self._listener.fileno():
                        self._accept()
                    else:
                        self._read(self._channels[file])
        except BaseException:
            logger.exception("the worker cannot read its calls, and ends")
            os._exit(1)

    def take(self) -> tuple[Channel, Message]:
        """Wait for a call, and return it with its channel; only the main thread calls this method."""
        taken = self.calls.get()
        self.peak = max(self.peak, self.calls.qsize() + 1)
        return taken

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if not is_own(connection):
            connection.close()
            return
        self._channels[connection.fileno()] = Channel(connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, channel: Channel) -> None:
        try:
            message = channel.receive()
        except ClosedError:
            file = channel.connection.fileno()
            self._epoll.unregister(file)
            self._channels.pop(file).close()
            return
        if message.kind == SIGNAL:
            answer(channel, message, self._host.signal)
        else:
            self.calls.put((channel, message))


def answer(
    channel: Channel, message: Message, function: Callable[[str, tuple[object, ...], Mapping[str, object]], object],
) -> None:
    """Run a call, and send its value or its error to the caller."""
    try:
        args, kwargs = message.take()
        value = function(message.method, args, kwargs)
        kind = VALUE
        args = kwargs = None
    except BaseException as error:  # noqa: BLE001 - the caller receives the error as a value
        kind, value = ERROR, SentError.of(error)
    with contextlib.suppress(ClosedError):  # the caller has ended
        try:
            channel.send(kind, message.number, "", value)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:  # the value cannot be pickled
            channel.send(ERROR, message.number, "", SentError.of(error))


def main(address: str) -> None:
    """Run the fork server at an address; each process that it forks runs one worker."""
    serve(address, run_worker)


def run_worker(name: str, listener: socket.socket) -> None:
    """Serve the callers that connect to `listener` until this process is killed."""
    threading.main_thread().name = name
    host = _Host()
    reader = _Reader(host, listener)
    reader.start()
    while True:
        channel, message = reader.take()
        if message.kind == START:
            host.build(message.take())
        else:
            answer(channel, message, host.call)
        del channel, message
