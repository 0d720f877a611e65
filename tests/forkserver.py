"""Run scripts in forks of one process that has imported torch and pytorchrl, because these imports take seconds.

`ForkServer` starts this file as a process. The process reads one request per line as JSON, and answers with the exit
code. Each script runs in a separate fork as `__main__`, with its own working directory, environment, arguments and
output. Use fresh processes (`run_python`) for tests of how a process imports, starts or ends, and for scripts that
start Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


class ForkServer:
    """The process that forks; it starts when the first script runs."""

    def __init__(self, environment):
        self._environment, self._process = environment, None

    def run(self, *arguments, cwd, timeout):
        """Run `python ARGUMENTS` for at most `timeout` seconds; return its code and output as `subprocess.run` does."""
        if self._process is None:
            self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             text=True, env=self._environment, start_new_session=True)
        arguments = [str(argument) for argument in arguments]
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {"arguments": arguments, "cwd": str(cwd), "environment": self._environment, "out": str(out),
                       "err": str(err)}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            watch = threading.Timer(timeout, self._kill)
            watch.start()
            try:
                answer = self._process.stdout.readline()
            finally:
                watch.cancel()
            if not answer:
                self.close()
                self._process = None
                raise subprocess.TimeoutExpired(arguments, timeout)
            return subprocess.CompletedProcess(arguments, int(answer), out.read_text(), err.read_text())

    def _kill(self):
        """Kill the server and the script that it waits for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self):
        """Close the server and wait until it ends."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def run_script(request):
    """Run a script in this process, which was forked for this script."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        with open(request[name], "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), stream.fileno())
    first, *rest = request["arguments"]
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        runpy.run_path(_written(rest[0], request), run_name="__main__")
    elif first == "-m":
        sys.path.insert(0, request["cwd"])
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _written(code, request):
    """Write a script given as text to a file in the folder of the outputs, and return its path."""
    path = Path(request["out"]).with_name("script.py")
    path.write_text(code, encoding="utf-8")
    return str(path)


def serve():
    """Fork for each request; return the request in the fork, and None in the server after the last request."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may be written between the answers
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            answers.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()
    return None


if __name__ == "__main__":
    sys.path.pop(0)  # the directory of this file must not be on the import path
    import pytorchrl

    for public_name in pytorchrl.__all__:
        getattr(pytorchrl, public_name)
    if (todo := serve()) is not None:
        run_script(todo)
