"""Run the command `pytorchrl`: train, watch, report, doctor, board, profile, enjoy, dataset, export, plot, ... .

Exit codes: 0 for success; 1 for an error after training began; 2 for an error before that; 130 after Ctrl-C;
143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType

from pytorchrl.cli.output import show, show_stderr
from pytorchrl.support.code import local_imports_off
from pytorchrl.support.tracebacks import (
    as_error,
    brief_errors,
    ends_in_users_code,
    full_tracebacks,
    is_full,
    shown_errors,
    shows_users_code,
    users_traceback,
)

_COMMANDS = {
    "train": "train an agent",
    "watch": "show a run live in the terminal",
    "report": "write one page about runs",
    "doctor": "check a run, and say what looks wrong",
    "board": "list runs on a local page",
    "profile": "train for a few seconds, and show where the time goes",
    "enjoy": "play episodes with a trained agent",
    "dataset": "play episodes with a trained agent, and write them as a data set",
    "export": "write a trained policy to a file for other programs",
    "plot": "draw learning curves",
    "compare": "compare groups of runs",
    "replay": "make one update of a run again, or find where two runs differ",
    "audit": "show how old logged rows are, and what corrections would do",
}
Handler = Callable[[int, FrameType | None], object] | int | None
"""A signal handler, of the type that `signal.signal` accepts and returns."""
_USAGE = f"usage: pytorchrl {{{','.join(_COMMANDS)}}} ... | --help | --version"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None: the arguments of this process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or is_full()
    found = _catch_signals(end_at_once=argv is None and arguments[:1] == ["train"])
    try:
        with warnings.catch_warnings():
            # Show every warning of this package, regardless of other filters, because the warnings are for the user.
            warnings.filterwarnings("always", category=UserWarning, module="pytorchrl")
            warnings.showwarning = _show_warning
            with full_tracebacks() if debug else contextlib.nullcontext():
                return _run(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ended:
        error = as_error(ended, arguments[0]) if ends_in_users_code(ended) else ended
        return _code_of(ended) if error is ended else _report(error, debug=debug)
    except BrokenPipeError:
        # Standard output is a closed pipe. Redirect it, because Python would otherwise raise the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - every error becomes a line and an exit code
        return _report(error, debug=debug)
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


@brief_errors
def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        lines = [f"  {name:<9}{text}" for name, text in _COMMANDS.items()]
        show(_USAGE, "", *lines, "", "`pytorchrl COMMAND --help` lists the flags of a command.")
        return 0
    if command == "--version":
        from pytorchrl import __version__
        show(f"pytorchrl {__version__}")
        return 0
    if command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the commands are {', '.join(_COMMANDS)}"
        show_stderr(_USAGE, f"pytorchrl: error: no command {command!r}{hint}")
        return 2
    module = importlib.import_module(f"pytorchrl.cli.{command}")
    with local_imports_off():
        return int(module.run(arguments[1:]))


def _report(error: BaseException, *, debug: bool) -> int:
    """Write the error to stderr as one line, and return the exit code.

    If the error has frames of the user's own code, they are written above this line; all frames if `debug` is true.
    If a ConfigError reports several problems, there is another line for each of them.
    """
    from pytorchrl.errors import CheckpointError, ConfigError, PyTorchRLError, StartError

    is_users = shows_users_code(error)
    text = str(error) if isinstance(error, PyTorchRLError) else f"{type(error).__name__}: {error}"
    if not is_users and not isinstance(error, PyTorchRLError):
        text = f"internal error, {text}; --debug shows where"
    if debug:
        show_stderr(*"".join(traceback.format_exception(error)).rstrip("\n").split("\n"))
    elif is_users:
        users = next((each for each in shown_errors(error) if not isinstance(each, PyTorchRLError)), error)
        show_stderr(*users_traceback(users).rstrip("\n").split("\n"), "", "--debug shows all frames")
    problems = error.problems if isinstance(error, ConfigError) and len(error.problems) > 1 else ()
    show_stderr(f"pytorchrl: error: {f'{len(problems)} problems:' if problems else text}",
                *(f"- {problem}" for problem in problems))
    return 2 if isinstance(error, (CheckpointError, ConfigError, StartError)) else 1


def _show_warning(message: Warning | str, *_args: object, **_kwargs: object) -> None:
    text = re.sub(r"\x1b\[[\d;]*m", "", str(message))  # Gymnasium's warnings are colored
    show_stderr(f"pytorchrl: warning: {text}")


def _catch_signals(*, end_at_once: bool) -> dict[int, Handler]:
    """Install signal handlers that end the command; `train` replaces these handlers during training.

    Args:
        end_at_once: Whether signals end the process immediately; use True only if the process runs nothing but the
            command and has nothing to save. If False, SIGTERM raises `SystemExit`, which is lost if a module
            that is being imported suppresses it.

    Returns:
        Map from each signal to its previous handler. Outside the main thread, where Python allows no handlers to be
        installed, the map is empty.
    """
    def end(number: int, frame: FrameType | None) -> None:
        if end_at_once:
            os._exit(128 + number)
        raise SystemExit(128 + number)
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [signal.SIGTERM, signal.SIGINT] if end_at_once else [signal.SIGTERM]
    return {number: signal.signal(number, end) for number in numbers}


def _code_of(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code
    show_stderr(str(ended.code))
    return 1
