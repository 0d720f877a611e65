"""Shorten the tracebacks of `ConfigError` and Ctrl-C to the caller's line and the message.

`sys.exit()` in a user's code becomes an error, because it would otherwise end the run early and look successful.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from pytorchrl.errors import ConfigError, WorkerError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

VARIABLE = "PYTORCHRL_FULL_TRACEBACKS"
"""Environment variable that keeps all frames if it is set to anything but 0."""

USER_ERRORS = (Exception, SystemExit)
"""The exceptions of a user's code, such as an environment, that are converted to errors of this package."""

_STACK_CHARS = 1500
# Packages that do not count as the user's own code, in addition to the modules of the standard library.
_LIBRARIES = {"pytorchrl", "ale_py", "cloudpickle", "gymnasium", "numpy", "pettingzoo", "ray", "torch"}


def brief_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Make a `ConfigError` of a public function point at the line that called the function.

    The message of a `ConfigError` is sufficient, so the frames of this library are removed from the traceback. The
    chain of causes is shortened, too: it then begins with the first cause that has a frame of the user's own code. If
    the traceback of the `ConfigError` itself has a frame of the user's own code, such as the `step` of an environment,
    nothing is removed.

    A `KeyboardInterrupt` with a message, which training raises after it has saved the agent, is treated in the same
    way.
    """
    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        brief: BaseException
        try:
            return function(*args, **kwargs)
        except (ConfigError, KeyboardInterrupt) as error:
            if (os.environ.get(VARIABLE, "0") != "0" or _has_users_frame(error.__traceback__)
                    or not (error.args or isinstance(error, ConfigError))):
                raise
            brief, cause = error.with_traceback(None), _users_cause(error)
        raise brief from cause  # PYTORCHRL_FULL_TRACEBACKS=1 shows all frames
    return entry


def brief_errors_of(*names: str) -> Callable[[C], C]:
    """Return a class decorator that applies `brief_errors` to the methods and class methods listed in `names`."""
    def decorate(cls: C) -> C:
        for name in names:
            method = vars(cls)[name]
            is_class_method = isinstance(method, classmethod)
            brief = classmethod(brief_errors(method.__func__)) if is_class_method else brief_errors(method)
            setattr(cls, name, brief)
        return cls
    return decorate


@contextlib.contextmanager
def full_tracebacks() -> Iterator[None]:
    """Keep the full tracebacks of errors that are raised inside the `with` block."""
    found = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if found is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = found


def stack_of(thread: threading.Thread) -> str:
    """Return the end of a thread's current stack, with the innermost calls last."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "an unknown place" if frame is None else "".join(traceback.format_stack(frame))[-_STACK_CHARS:]


def ends_in_users_code(error: BaseException) -> bool:
    """Return whether the error was raised in the user's own code, not in a library or Python's standard library."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return _has_users_frame(trace)


def _has_users_frame(trace: TracebackType | None) -> bool:
    """Return whether a frame of the traceback belongs to the user's own code; see `_LIBRARIES`."""
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in _LIBRARIES and package not in sys.stdlib_module_names:
            return True
        trace = trace.tb_next
    return False


def _users_cause(error: BaseException) -> BaseException | None:
    """Follow the causes of `error`; return the first cause with a frame of the user's own code, or None."""
    seen: list[BaseException] = [error]  # an error may be its own cause, after `raise error from error`
    while True:
        last = seen[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or any(cause is other for other in seen):
            return None
        if _has_users_frame(cause.__traceback__):
            return cause
        seen.append(cause)


def reraise_of_signal(failure: BaseException) -> None:
    """Raise `failure` again if it is a `SystemExit` from a signal handler, because the signal must end the program."""
    if isinstance(failure, SystemExit) and _is_of_signal(failure):
        raise failure


def as_error(failure: BaseException, where: str) -> BaseException:
    """Return `failure`; if it is a `SystemExit` that no signal handler has raised, return a `WorkerError` instead.

    Args:
        failure: An exception that has ended a part of a run.
        where: Name of that part.
    """
    if not isinstance(failure, SystemExit) or _is_of_signal(failure):
        return failure
    stack = traceback.extract_tb(failure.__traceback__)
    place = f" in {stack[-1].name} ({stack[-1].filename}:{stack[-1].lineno})" if stack else ""
    error = WorkerError(f"{where}: SystemExit({failure.code!r}) was raised{place}; code that runs during training must "
                        "not call sys.exit(), because that would end the run; raise an error instead")
    error.__cause__ = failure
    return error


def raise_exit(failure: BaseException, where: str) -> None:
    """Raise a `WorkerError` if `failure` is a `SystemExit` that no signal handler has raised; see `as_error`."""
    error = as_error(failure, where)
    if error is not failure:
        raise error from failure


def _is_of_signal(failure: SystemExit) -> bool:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(failure.__traceback__))
