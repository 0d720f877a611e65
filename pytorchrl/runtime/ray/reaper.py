"""Kill the remaining processes of a local Ray instance and remove its directory, once its driver has finished or died.

`python reaper.py DIRECTORY SESSION DRIVER` waits for the end of its standard input, which the driver keeps open.
Without a reaper, Ray's agents would outlive a killed driver by a minute, and their files would remain. A reaper
has to start quickly, so this module imports only the standard library.

When the driver leaves Ray in an orderly way, it writes an empty last line to the reaper. If this line is missing,
either the driver was killed, or Ray's native code has ended the driver because Ray's raylet, which contains the object
store, has ended. In the second case, the reaper prints the reason, because the driver cannot.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import time

_INTERVAL_S, _ATTEMPTS = 0.05, 100
# The last line of the driver's log contains this text if Ray's native code has ended the driver.
_EXIT = "Terminate the process"


def start_reaper(directory: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `main` in a new session (`setsid`), so that Ctrl-C does not interrupt the process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, directory, str(os.getsid(0)), str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True)


def processes_of(directory: str, session: int) -> list[int]:
    """Return the ids of a session's processes with `directory` in the command line or in the path of an open file."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        # Skip entries that are not process ids, and processes that have ended or belong to another user.
        with contextlib.suppress(OSError, ValueError):
            pid = int(name)
            if os.getsid(pid) == session and _uses(pid, directory):
                found.append(pid)
    return found


def kill_processes(directory: str, session: int, driver: int) -> bool:
    """Kill the processes that `processes_of` returns, except the driver; return whether there was a process to kill."""
    left = [pid for pid in processes_of(directory, session) if pid != driver]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def _uses(pid: int, directory: str) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if os.fsencode(directory) in file.read():
            return True
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the file was closed in the meantime
            if os.readlink(descriptor.path).startswith(directory + os.sep):
                return True
    return False


def reason_of_end(told: str, directory: str) -> str:
    """Return why Ray has ended the driver; "" if the driver left Ray in an orderly way, or was killed.

    Args:
        told: The lines that the driver has written to this process. If a process of Ray has ended, a line states this.
            If the driver left Ray in an orderly way, the last line is empty.
        directory: Directory of the Ray instance, with the logs of the driver.
    """
    if lines := told.split("\n")[:-1]:
        return lines[-1]
    for path in glob.glob(os.path.join(directory, "r", "session_2*", "logs", "python-core-driver-*.log")):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            last = file.read()[-2000:].strip().rpartition("\n")[2]
            if _EXIT in last:
                return f"Ray's raylet has ended unexpectedly: {last.partition('] ')[2]}"
    return ""


def main(directory: str, session: int, driver: int) -> None:
    """Wait for the driver to end, kill the remaining processes, and remove the directory."""
    told = sys.stdin.buffer.read().decode(errors="replace")
    if reason := reason_of_end(told, directory):
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {reason}; Ray has ended this program; resume it from its newest checkpoint\n")
            sys.stderr.flush()
    for _ in range(_ATTEMPTS):
        if not kill_processes(directory, session, driver):
            break
        time.sleep(_INTERVAL_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
