"""Detect scripts that start processes of `backend="async"` outside `if __name__ == "__main__":`."""

from __future__ import annotations

import ast
import linecache
import multiprocessing
import sys
import threading
from types import FrameType

from pytorchrl.errors import ConfigError

_STANDARD_INPUT = "<stdin>"
# An `if` condition that contains one of these names is assumed to be false when a new process imports the script.
_GUARDS = {"__name__", "current_process"}


def check_main_guard(setting: str) -> None:
    """Refuse to start processes if the main script starts them outside `if __name__ == "__main__":`.

    A spawned process first imports the main script. Outside the `if`, this import would again reach the line that
    starts processes, and would fail there. The process that runs the script would then wait forever.

    Args:
        setting: The setting that starts processes, for the message.

    Raises:
        ConfigError: The line that leads to this call is not inside the `if`; the message names the line. Or the
            script was read from the standard input, which other processes cannot import. Or this process may not start
            processes.
    """
    if multiprocessing.current_process().daemon:
        raise ConfigError(f"{setting} starts processes, but this process is daemonic, as those of multiprocessing.Pool "
                          "are, and Python lets such a process start no other; use backend='sync', or the processes of "
                          "concurrent.futures.ProcessPoolExecutor")
    frame = _main_frame()
    if frame is None:
        return
    path = frame.f_code.co_filename
    if path == _STANDARD_INPUT:
        raise ConfigError(f"{setting} starts processes that import the script again, but this script comes from the "
                          "standard input (`python -`); save it in a file, or use backend='sync'")
    lines = linecache.getlines(path)  # empty if the file no longer exists
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # the file has changed since the script started
        return
    if lines and not is_guarded(tree, frame.f_lineno):
        raise ConfigError(
            f"{setting} starts processes that import the script again, and line {frame.f_lineno} of {path}, "
            'which starts them, is not under `if __name__ == "__main__":`; move the training code into a function and '
            "call it under that condition, or use backend='sync'")


def _main_frame() -> FrameType | None:
    """Return the stack frame of the main script.

    Return None if there is no script for new processes to import (`-m package`, `-c`, notebooks).
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    is_module = spec is not None and spec.name.split(".")[-1] == "__main__"
    if main is None or getattr(main, "__file__", None) is None or is_module:
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return frame


def is_guarded(tree: ast.Module, line: int) -> bool:
    """Return whether `line` is inside an `if` that is true when the script runs, but not when it is imported."""
    return any(
        isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line)
        and any(getattr(part, name, None) in _GUARDS for part in ast.walk(node.test) for name in ("id", "attr"))
        for node in ast.walk(tree))
