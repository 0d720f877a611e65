"""Watch the processes of a local Ray instance, because Ray notices their loss only after a minute, or never.

Ray's parts are the GCS (which lists all workers), the raylet (which starts workers and has the object store), its
agents, and the log monitor. If a part ends, all calls to workers fail. The watch resumes parts that SIGSTOP stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

# Name of a process (Linux keeps only its first 15 bytes) -> name of the part of Ray. A process named "raylet" is the
# raylet only if its parent is the driver: the raylet's children have the same name until they execute Python.
_OF_DRIVER = {"gcs_server": "GCS", "raylet": "raylet", "log_monitor": "log monitor"}
_OF_RAYLET = {"ray::DashboardA": "dashboard agent", "ray::RuntimeEnv": "runtime environment agent"}
_INTERVAL_S = 0.5
# Seconds that `close` waits for the thread; a check of all parts takes a few milliseconds.
_CLOSE_TIMEOUT_S = 5.0
# A part receives SIGCONT when this number of checks in a row have found it stopped. One check is not enough: Ctrl-Z and
# `fg` stop and continue all processes at about the same time, so a check shortly after `fg` may find a stopped part.
_MAX_STOPPED = 4


def parts_of(driver: int) -> dict[int, str]:
    """Return the parts of the Ray instance that the process `driver` has started: process id -> name of the part."""
    found = _named_children(driver, _OF_DRIVER)
    for raylet in [pid for pid, name in found.items() if name == "raylet"]:
        found |= _named_children(raylet, _OF_RAYLET)
    return found


def _named_children(parent: int, names: Mapping[str, str]) -> dict[int, str]:
    found = dict[int, str]()
    for child in _children(parent):
        with contextlib.suppress(OSError):  # the process has ended
            name = Path(f"/proc/{child}/comm").read_text(encoding="utf-8", errors="replace").strip()
            if name in names:
                found[child] = names[name]
    return found


def _children(parent: int) -> list[int]:
    found = list[int]()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                text = Path(f"/proc/{parent}/task/{thread}/children").read_text(encoding="ascii")
                found += map(int, text.split())
    return found


class Watch:
    """A thread that watches the parts (GCS, raylet, agents) of the Ray instance that this process started, on Linux.

    Args:
        on_lost: Function that receives a sentence about a part that has ended. It is called at most once.

    Attributes:
        problem: The sentence that `on_lost` received; "" while all parts run.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.problem = ""
        self._on_lost = on_lost
        self._files: dict[int, tuple[int, str]] = {}  # process id and name of each part of Ray, by its pidfd
        self._stopped: dict[int, int] = {}
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; log a warning if it does not end in time, for example because `on_lost` hangs."""
        os.close(self._wake)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the thread that watches Ray has not ended within %g s", _CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        try:
            while not self.problem:
                # Look for new parts each time, because Ray's agents start a little later than its raylet.
                known = {pid for pid, _ in self._files.values()}
                for pid, name in parts_of(os.getpid()).items():
                    if pid not in known:
                        with contextlib.suppress(OSError):
                            file = os.pidfd_open(pid)
                            self._files[file] = pid, name
                            poll.register(file, select.POLLIN)
                for file, _ in poll.poll(1000 * _INTERVAL_S):
                    if file == self._woken:
                        return
                    self._lose(*self._files[file])
                for pid, name in self._files.values():
                    self._continue(pid, name)
        finally:
            for file in (self._woken, *self._files):
                os.close(file)

    def _lose(self, pid: int, name: str) -> None:
        if not self.problem:
            self.problem = (f"Ray's {name} (process {pid}) has ended unexpectedly, so the workers cannot continue; "
                            "memory may have run out, or the process was killed")
            self._on_lost(self.problem)

    def _continue(self, pid: int, name: str) -> None:
        """Send SIGCONT to a part of Ray if several checks in a row have found it stopped (SIGSTOP)."""
        with contextlib.suppress(OSError):  # the part has ended
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            self._stopped[pid] = self._stopped.get(pid, 0) + 1 if fields[0] == "T" else 0
            if self._stopped[pid] >= _MAX_STOPPED:
                os.kill(pid, signal.SIGCONT)
                logger.warning("Ray's %s (process %d) was stopped (SIGSTOP); it was continued", name, pid)
