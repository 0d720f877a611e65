"""Run Python scripts in forks of one process that has imported torch and pytorchrl, to save seconds per script.

`ForkServer` starts this file as a process, and provides an executable, `python`, that is called like Python:
`python SCRIPT ARGUMENTS`, `python -m MODULE ARGUMENTS` or `python -c CODE ARGUMENTS`. The executable sends its
arguments, environment, working directory and standard streams to the process, which forks; the fork runs the script as
`__main__`. The executable forwards SIGINT and SIGTERM to the fork, and ends with its exit code. If the executable is
killed, the fork is killed, too.

Ray is not imported before forking, because its connections do not work in forks; the packages that it imports are.
A fork waits for its threads and calls its exit handlers, but does not destroy its objects one by one. Tests of imports,
and of the start or end of a process, need fresh processes (`run_python`).

A fork is not a descendant of the process that called the executable; `parents_of_forks` says which call started it.

If the environment of a script has the variable `FORK_EXECUTABLE`, its value is `sys.executable` in the fork.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

# The code of the executable, which loads no package: connect, send the request, forward signals, and wait for the exit
# code.
CLIENT = """
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
server.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
server.sendall(json.dumps(request).encode() + b"\\n")
def forward(number, frame):
    try:
        server.sendall(bytes([number]))
    except OSError:  # the fork has ended
        pass
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, forward)
code = int(server.makefile().readline() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
# Packages that Ray imports. They take half the time of an import of Ray, which happens in each worker of a cluster.
OF_RAY = (
    "filelock", "google.protobuf.json_format", "google.protobuf.timestamp_pb2", "jsonschema", "logging.handlers",
    "msgpack", "pdb", "psutil", "requests", "tqdm.auto", "wcwidth", "yaml")
# Packages that a training run with a log directory imports.
OF_RUNS = ("torch.utils.tensorboard", "lz4.frame")
# Packages that plots, comparisons of runs and exported policies need. Many scripts of pages and examples import them.
OF_RESULTS = ("matplotlib.pyplot", "scipy.stats", "torch._dynamo", "onnxscript")
# Seconds that the process waits for the request of a client, which may have been stopped.
CLIENT_TIMEOUT_S = 30.0
# Python collects garbage when a process has built this many more objects than it has deleted; see `gc.set_threshold`.
# With Python's own threshold of 700, garbage collection takes 4 % of the time of the tests.
GC_THRESHOLD = 50_000
# Path of the executable that this process uses.
current = None


class ForkServer:
    """The process that forks.

    Args:
        environment: Environment variables of the process while it imports packages. Each script has the environment
            variables of the call that runs it.

    Attributes:
        python: Path of the executable.
    """

    def __init__(self, environment):
        self._folder = tempfile.TemporaryDirectory(prefix="fork-", dir="/tmp")
        folder = Path(self._folder.name)
        address = folder / "socket"
        (folder / "client.py").write_text(CLIENT, encoding="utf-8")
        command = shlex.join([sys.executable, "-IS", str(folder / "client.py"), str(address)])
        self.python = write_executable(folder / "python", f'[ "$1" = -u ] && shift\nexec {command} "$@"')
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(address))
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())], stdin=subprocess.PIPE, env=environment,
                pass_fds=[listening.fileno()], start_new_session=True)

    def close(self):
        """End the process, and kill all scripts that are still running."""
        self._process.stdin.close()
        try:
            self._process.wait(CLIENT_TIMEOUT_S + 30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def write_executable(path, commands):
    """Write a shell script, and return its path as a string."""
    path.write_text(f"#!/bin/sh\n{commands}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def parents_file(path):
    """Return the path of the file with the parents of forks, which is next to the socket and to the executable."""
    return Path(path).with_name("parents")


def parents_of_forks():
    """Return, for the process id of each fork, that of the executable that waits for the fork."""
    path = None if current is None else parents_file(current)
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return dict(map(int, line.split()) for line in lines)


class Forking:
    """The server in the process that forks. It reads one request at a time, while scripts run in parallel."""

    def __init__(self, listening):
        # Connection of each running script -> process ids of the fork and of the client.
        self._listening, self._running = listening, {}
        self._parents = parents_file(listening.getsockname())
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, the signal would not wake select()

    def serve(self):
        """Fork for each request until standard input is closed.

        In a fork, return the request of the fork. In the parent, return None.
        """
        while True:
            ready, _, _ = select.select([self._listening, sys.stdin, self._woken, *self._running], [], [])
            is_over = sys.stdin in ready
            for connection in self._running if is_over else self._running.keys() & ready:
                pid, _ = self._running[connection]
                numbers = b"" if is_over else forwarded_signals(connection)
                for number in numbers:
                    os.kill(pid, number)
                if not numbers:  # the client was killed, or the server is closing
                    kill(pid)
            if is_over:
                signal.set_wakeup_fd(-1)  # the killed scripts end while this process closes its sockets
                return None
            if self._woken in ready:
                self._woken.recv(1000)
                self._report_ended()
            if self._listening in ready and (request := self._fork(self._listening.accept()[0])) is not None:
                return request

    def _report_ended(self):
        """Send exit codes of scripts to their clients."""
        for connection, (pid, _) in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):  # the client was killed
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()
                del self._running[connection]
        self._write_parents()

    def _write_parents(self):
        """Replace the file that `parents_of_forks` reads."""
        new = self._parents.with_suffix(".new")
        new.write_text("".join(f"{pid} {client}\n" for pid, client in self._running.values()), encoding="utf-8")
        new.replace(self._parents)

    def _fork(self, connection):
        """Fork for the request of a client.

        In the fork, return the request and its standard streams. In the parent, return None.
        """
        streams, request = array.array("i"), bytearray()
        connection.settimeout(CLIENT_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the client was stopped or killed
            _, messages, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(3 * streams.itemsize))
            for _, _, data in messages:
                streams.frombytes(data)
            while not request.endswith(b"\n") and (seen := connection.recv(1 << 16, socket.MSG_PEEK)):
                request += connection.recv(seen.find(b"\n") + 1 or len(seen))  # signals may follow the line
        connection.settimeout(None)
        if not request.endswith(b"\n"):
            connection.close()
        elif pid := os.fork():
            client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            self._running[connection] = pid, client
            self._write_parents()
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._listening, self._woken, self._wakes, connection, *self._running):
                other.close()
            os.setsid()
            return json.loads(request), streams
        for stream in streams:
            os.close(stream)
        return None


def forwarded_signals(connection):
    """Return the numbers of the signals that a client forwards; none if the client was killed."""
    with contextlib.suppress(OSError):
        return connection.recv(100)
    return b""


def kill(pid):
    """Kill a script and the processes that it has started."""
    for end in (os.killpg, os.kill):  # a process that was just forked may not have its own group yet
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def run_script(request, streams):
    """Run the script of a request in this process, which was forked for it."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Gymnasium sets this variable when it is imported, as it was in this process, so that pygame prints no version.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "hide")
    sys.executable = os.environ.pop("FORK_EXECUTABLE", sys.executable)
    first, *rest = request["arguments"]
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.path.insert(0, request["folder"])
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def run_and_exit(request, streams):
    """Run the script of a request, and exit without destroying objects, which copies the memory of the server."""
    code = 0
    try:
        run_script(request, streams)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    import gc

    import pytorchrl

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in tests, whose processes do not import these modules again
        for public_name in pytorchrl.__all__:
            getattr(pytorchrl, public_name)
    for package in OF_RAY + OF_RUNS + OF_RESULTS:
        with contextlib.suppress(ImportError):  # another version of Ray may need other packages; others are optional
            importlib.import_module(package)
    gc.freeze()  # garbage collection would write to these objects, and so copy memory that the workers share
    gc.set_threshold(GC_THRESHOLD)
    if (todo := Forking(socket.socket(fileno=int(sys.argv[1]))).serve()) is not None:
        run_and_exit(*todo)
