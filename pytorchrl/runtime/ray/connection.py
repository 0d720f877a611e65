"""Connect this process to a Ray instance; all runtimes of the process share the connection.

The first runtime starts or joins a Ray instance, and the last runtime to close leaves it. If the user has started or
joined a Ray instance, the runtimes use this instance, but do not leave it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from pytorchrl.errors import RayConnectionError
from pytorchrl.runtime.ray.reaper import kill_processes, start_reaper
from pytorchrl.runtime.ray.start import LOOPBACK, private_start, replaced, without_handlers_of
from pytorchrl.runtime.ray.watch import Watch
from pytorchrl.support.terminal import Lines, get_logger

logger = get_logger(__name__)

_CONNECT_TIMEOUT_S = 5.0
# Seconds to wait for the reaper, which usually ends Ray's remaining processes within a tenth of a second.
_REAP_TIMEOUT_S = 5.0
# A start that fails after at least this many seconds is tried once more, because the machine may just be slow. A
# start that fails sooner was not merely slow, so it is not tried again.
_SLOW_START_S = 10.0
# Workers must not report an event for each call. These events made the GCS grow by 280 MB in the first hour of a run,
# and only Ray's dashboard, which is not started, reads them.
_SYSTEM_CONFIG = {"task_events_report_interval_ms": 0}  # 0: never
# After a failed start, the error quotes the last line of each Ray log, cut to this number of characters.
_LOG_WIDTH = 300


class Connection:
    """The connection to a Ray instance that this process has either joined or started in a new directory.

    Args:
        directory: Directory of a Ray instance that this process starts; None: the process joins a cluster.

    Attributes:
        problem: A sentence about a process of Ray that has ended; "" if none has ended.
    """

    current: ClassVar[Connection | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()  # guards `current` and its number of users

    def __init__(self, directory: str | None = None) -> None:
        self._users, self._directory = 1, directory
        self._reaper: subprocess.Popen[bytes] | None = None if directory is None else start_reaper(directory)
        self._watch: Watch | None = None
        self._replaced = contextlib.ExitStack()  # functions of Ray that are replaced while the connection exists

    @property
    def problem(self) -> str:
        """A sentence about a process of Ray that has ended; "" if none has ended."""
        return "" if self._watch is None else self._watch.problem

    @property
    def is_watched(self) -> bool:
        """Whether this process watches Ray's processes, and notices immediately if one ends; see `ray_watch`."""
        return self._watch is not None

    @classmethod
    def share(cls) -> Connection | None:
        """Return this process's connection, and count the caller as a further user; return None if there is none."""
        with cls._lock:
            if cls.current is not None:
                cls.current._users += 1
            return cls.current

    @classmethod
    def join(cls, ray: ModuleType, address: str) -> Connection:
        """Join the cluster at an address.

        Raises:
            RayConnectionError: There is no cluster at the address.
        """
        check_reachable(address)
        try:
            with without_handlers_of(ray):
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise RayConnectionError(f"no Ray cluster at {address!r}: {error}") from error
        cls.current = cls()
        return cls.current

    @classmethod
    def start(cls, ray: ModuleType, tell: Callable[[str], object],
              now: Callable[[], float] = time.monotonic) -> Connection:
        """Start Ray on this machine. A start that fails after a long time, as on a busy machine, is tried once more.

        Args:
            ray: The module `ray`.
            tell: Function that receives a line of text if the start is tried again.
            now: Clock in seconds.

        Raises:
            RayConnectionError: Ray did not start; the message states what was observed.
        """
        seen = list[str]()
        while True:
            began = now()
            # The name of the directory is short, because paths of sockets are limited to 107 bytes. The process
            # that `start_reaper` starts removes the directory.
            connection = cls(tempfile.mkdtemp(prefix="prl-", dir="/tmp" if os.path.isdir("/tmp") else None))
            try:
                connection._start(ray)
            except BaseException as error:
                seconds, lines = now() - began, last_lines(connection._directory or "")
                connection._close(ray)
                if not isinstance(error, Exception):
                    raise
                seen.append(f"after {seconds:.0f} s (load {_load()}): {type(error).__name__}: {error}{lines}")
                if seconds < _SLOW_START_S or len(seen) > 1:
                    raise RayConnectionError(
                        "Ray did not start on this machine; a busy machine or a full disk can be the cause; try again, "
                        "or give runtime='processes', which starts workers on this machine without Ray; "
                        + "; ".join(f"attempt {number} failed {text}" for number, text in enumerate(seen, 1))
                    ) from error
                tell(f"Ray did not start within {seconds:.0f} s; starting it once more ...")
            else:
                cls.current = connection
                return connection

    def _start(self, ray: ModuleType) -> None:
        with private_start(ray):
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                     _node_ip_address=LOOPBACK, _temp_dir=os.path.join(self._directory or "", "r"),
                     _system_config=_SYSTEM_CONFIG)
        # If a worker dies, Ray prints a message to the standard output, which belongs to the program.
        self._replaced.enter_context(
            replaced(getattr(ray._private, "worker", None), "print_to_stdstream", _log_message))
        if hasattr(os, "pidfd_open"):
            self._watch = Watch(self._note)
        # If the program ends without leaving Ray, Ray's own exit function ends the processes that the watch observes.
        # The watch must end first. `atexit` calls `_close` before Ray's function, because `_close` was registered last.
        atexit.register(self._close, ray)

    def _note(self, problem: str) -> None:
        """Send `problem` to the reaper (see `reaper.py`), which prints it if Ray's native code ends this process."""
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(OSError):
                self._reaper.stdin.write(problem.encode() + b"\n")
                self._reaper.stdin.flush()

    def leave(self, ray: ModuleType) -> None:
        """If no other runtime uses the connection, leave Ray, and end a Ray instance that this process started."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            type(self).current = None
        self._close(ray)

    def _close(self, ray: ModuleType) -> None:
        atexit.unregister(self._close)
        if self.problem:
            self._kill()
        if self._watch is not None:
            self._watch.close()
        ray.shutdown()
        self._replaced.close()
        if self._reaper is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the reaper may continue in the background
                self._reaper.communicate(b"\n", timeout=_REAP_TIMEOUT_S)

    def _kill(self) -> None:
        """Kill Ray's processes after one of them has ended, because `ray.shutdown` would wait for that process."""
        if self._directory is not None:  # without a directory, this process did not start Ray, and must not kill it
            kill_processes(self._directory, os.getsid(0), os.getpid())


def check_reachable(address: str) -> None:
    """Raise `RayConnectionError` if nothing listens at "host:port"; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise RayConnectionError(f"no Ray cluster at {address!r}: {error}") from error


def last_lines(directory: str) -> str:
    """Return the last line of each log of Ray after a failed start, for an error message; "" if there are no logs."""
    shown = []
    for path in sorted(Path(directory).glob("r/session_2*/logs/*")):
        if path.name.startswith(("gcs_server", "raylet", "dashboard_agent", "runtime_env_agent")):
            with contextlib.suppress(OSError):
                lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                shown += [f"\n  {path.name}: {line[:_LOG_WIDTH]}" for line in lines[-1:]]
    return "".join(shown)


def _log_message(data: Mapping[str, list[str]], **options: bool) -> None:
    """Log Ray's message about a lost worker instead of printing it, because this library's errors report the loss."""
    logger.info("%s", Lines("\n".join(data.get("lines", []))))


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else "unknown"
