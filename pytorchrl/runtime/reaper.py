"""Kill the remaining processes of a local Ray instance and remove its directory, once its driver has finished or died.

`python reaper.py DIRECTORY SESSION DRIVER` waits for the end of its standard input, which the driver keeps open.
Without a reaper, Ray's agents would outlive a killed driver by a minute, and their files would remain. A reaper
has to start quickly, so this module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

_INTERVAL_S, _ATTEMPTS = 0.05, 100


def start_reaper(directory: str) -> subprocess.Popen[bytes]:
    """Start a reaper for this process, in a separate session that Ctrl-C and a closing terminal do not affect."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, directory, str(os.getsid(0)), str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True)


def processes_of(directory: str, session: int) -> list[int]:
    """Return the ids of a session's processes that have the directory in their command line or an open file in it."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError, ValueError):  # not a process, an ended process, or another user's process
            pid = int(name)
            if os.getsid(pid) == session and _uses(pid, directory):
                found.append(pid)
    return found


def _uses(pid: int, directory: str) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if os.fsencode(directory) in file.read():
            return True
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the file was closed in the meantime
            if os.readlink(descriptor.path).startswith(directory + os.sep):
                return True
    return False


def main(directory: str, session: int, driver: int) -> None:
    """Wait for the driver to end, kill the remaining processes, and remove the directory."""
    sys.stdin.buffer.read()
    for _ in range(_ATTEMPTS):
        left = [pid for pid in processes_of(directory, session) if pid != driver]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_INTERVAL_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
