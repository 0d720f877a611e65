"""Start worker processes quickly: a fork server imports torch and pytorchrl once, and forks a process for each worker.

The fork server also makes sure that no worker process remains. When a worker ends, the server kills the processes that
this worker had started, including other workers. When the driver (the process that builds the scheme) ends, even if it
is killed, the server kills all workers and ends. When the server is killed, the kernel kills the workers.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import marshal
import os
import random
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

_FORK, _KILL, _END = range(3)
_PACKET_BYTES = 4096
# Interval in seconds at which the server checks whether the driver is alive. It is not enough to wait until the
# connection to the driver closes, because a process that the driver has forked may keep the connection open.
_INTERVAL_S = 1.0
_END_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True)
class Place:
    """The place of a worker process in the tree of processes.

    Attributes:
        server: Address of the fork server.
        worker: Address of the worker.
    """

    server: str
    worker: str


here: Place | None = None
"""The place of this process in the tree of processes; None in the driver."""


def new_address() -> str:
    """Return an unused address in the abstract namespace of Unix sockets, which leaves no file."""
    return f"\0pytorchrl-{secrets.token_hex(12)}"


def listen(address: str) -> socket.socket:
    """Return a socket that accepts connections at an address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(4096)
    return listener


def connect(address: str) -> socket.socket:
    """Return a socket that is connected to an address; raise `OSError` if nothing listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a connection belongs to the same user."""
    size = struct.calcsize("3i")
    return bool(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
                == os.getuid())


class ForkServer:
    """Connection of a process to the fork server.

    Args:
        place: Place of this process in the tree of processes; None in the driver, which starts the server.

    Attributes:
        address: Address of the server.
    """

    def __init__(self, place: Place | None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if place is not None:
            self.address, self._own = place.server, place.worker
            self._connection = connect(self.address)
            return
        self.address, self._own = new_address(), ""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (f"import sys; sys.path[:] = {sys.path!r}; from pytorchrl.runtime.processes.worker import main; "
                f"main({self.address!r})")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=theirs.fileno(), start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended by itself, and with it all workers; it never sends anything."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def name(self) -> str:
        """The name of the server in messages."""
        process = self._process
        return "the fork server" if process is None else f"the fork server (process {process.pid})"

    def fork(self, address: str, name: str) -> None:
        """Start a worker that listens at `address`; connections to `address` break if the worker cannot start."""
        with listen(address) as listener:
            files = array.array("i", [listener.fileno()])
            self._send((_FORK, address, self._own, name), [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])

    def kill(self, address: str) -> None:
        """Kill the worker process at an address, and the processes that it has started."""
        self._send((_KILL, address))

    def close(self) -> None:
        """Kill the worker processes that this process has started; in the driver, also end the server."""
        if self._process is None:
            self._send((_END, self._own))
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills the workers
            self._process.wait()

    def _send(self, request: tuple[int | str, ...], ancillary: list[tuple[int, int, array.array[int]]] = []) -> None:  # noqa: B006
        with contextlib.suppress(OSError):  # the server has ended, and with it all workers
            self._connection.sendmsg([marshal.dumps(request)], ancillary)


class _Server:
    """The loop of the fork server, which has a single thread."""

    def __init__(self, driver: socket.socket, listener: socket.socket) -> None:
        self._driver, self._listener = driver, listener
        self._parent = os.getppid()
        self._clients: dict[int, socket.socket] = {driver.fileno(): driver}
        self._workers: dict[int, tuple[str, str]] = {}  # process id -> (address of the worker, address of its parent)
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, the signal would not wake `select`

    def serve(self) -> tuple[str, str, socket.socket] | None:
        """Fork workers until the driver ends, and return None.

        In each forked worker process, return the worker's address, name and listening socket instead.
        """
        while True:
            files = [self._listener.fileno(), self._woken.fileno(), *self._clients]
            ready, _, _ = select.select(files, [], [], _INTERVAL_S)
            if self._woken.fileno() in ready:
                self._woken.recv(_PACKET_BYTES)
                self._reap()
            if self._listener.fileno() in ready:
                client, _ = self._listener.accept()
                if is_own(client):
                    self._clients[client.fileno()] = client
                else:
                    client.close()
            for file in self._clients.keys() & ready:
                if (forked := self._handle(self._clients[file])) is not None:
                    return forked
            if self._driver.fileno() not in self._clients or os.getppid() != self._parent:
                self._end_all()
                return None

    def _handle(self, client: socket.socket) -> tuple[str, str, socket.socket] | None:
        """Handle one request of a client, and return None.

        In a newly forked worker process, return the worker's address, name and listening socket instead.
        """
        try:
            packet, files, _, _ = socket.recv_fds(client, _PACKET_BYTES, 1)
        except OSError:
            packet, files = b"", []
        if not packet:
            del self._clients[client.fileno()]
            if client is not self._driver:
                client.close()
            return None
        kind, address, *rest = marshal.loads(packet)
        if kind == _FORK:
            return self._fork(address, rest[0], rest[1], socket.socket(fileno=files[0]))
        for pid, (own, parent) in self._workers.items():
            if address == (own if kind == _KILL else parent):
                _kill(pid)
        return None

    def _fork(self, address: str, parent: str, name: str,
              listener: socket.socket) -> tuple[str, str, socket.socket] | None:
        pid = os.fork()
        if pid:
            listener.close()
            with contextlib.suppress(OSError):  # the new process has already done this, or has ended
                os.setpgid(pid, pid)
            self._workers[pid] = address, parent
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listener, self._woken, self._wakes, self._driver, *self._clients.values()):
            other.close()
        return address, name, listener

    def _reap(self) -> None:
        """Forget workers that have ended, and kill the processes that these workers had started."""
        while (ended := _ended()) is not None:
            _kill(ended)  # no other process group can have this id before `waitpid` frees it
            os.waitpid(ended, 0)
            own, _ = self._workers.pop(ended, ("", ""))
            for pid, (_, parent) in self._workers.items():
                if parent == own:
                    _kill(pid)

    def _end_all(self) -> None:
        for pid in self._workers:
            _kill(pid)
        for pid in self._workers:
            os.waitpid(pid, 0)


def _ended() -> int | None:
    """Return the id of a child process that has ended and was not waited for; None if there is none."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if found is None else found.si_pid
    return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def serve(address: str, run: Callable[[str, socket.socket], None]) -> None:
    """Run the fork server, whose standard input is its connection to the driver.

    Args:
        address: Address of the server.
        run: Function that runs a worker in its process, given the worker's name and its listening socket.
    """
    driver = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _import_all()
    forked = _Server(driver, listen(address)).serve()
    try:
        if forked is not None:
            _become_worker(address, *forked, run=run)
    finally:
        os._exit(0)  # skip the clean-up of modules, which takes a third of a second


def _import_all() -> None:
    """Import everything that workers usually need."""
    package = sys.modules["pytorchrl"]
    for name in package.__all__:  # the package imports each public name when it is first used
        getattr(package, name)
    gc.collect()
    gc.freeze()  # garbage collection would write to these objects, and so copy memory that the workers share


def _become_worker(server: str, address: str, name: str, listener: socket.socket,
                   run: Callable[[str, socket.socket], None]) -> None:
    global here  # noqa: PLW0603 - a process has one place
    import numpy as np

    parent = os.getppid()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver reacts to Ctrl-C, and ends the workers
    random.seed()
    np.random.seed()  # noqa: NPY002 - forks would otherwise draw the same numbers from the global generator
    here = Place(server, address)
    run(name, listener)
