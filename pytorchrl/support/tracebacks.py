"""Shorten the tracebacks of errors to the frames of the user's own code.

`sys.exit()` in a user's code becomes an error, because it would otherwise end the run early and look successful.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from pytorchrl.errors import CallbackError, ConfigError, EnvError, PyTorchRLError, WorkerError
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

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


class _Thread(threading.local):
    is_in_entry = False
    """Whether the thread runs a public function. Only the outermost public function shortens the traceback."""


_THREAD = _Thread()


def brief_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Remove the frames of libraries from the tracebacks of the errors of a public function.

    Python then prints the frames of the user's script, one frame of this module that says how to see all frames, and
    the frames of the user's own code that this library has called, such as the `step` of an environment. If such frames
    exist, the message of the error is logged, so that it is the first line as well as the last line. Causes of the
    error that have no frame of the user's code are removed, except the exceptions of environments and callbacks.

    The following errors are shortened: errors of this package, whose messages are sufficient, other errors that passed
    through the user's own code, errors about a full disk, and the `KeyboardInterrupt` with a message that training
    raises after it has saved the agent. All other errors keep their tracebacks, because they show a defect of this
    package.
    """
    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        if _THREAD.is_in_entry:
            return function(*args, **kwargs)
        _THREAD.is_in_entry = True
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if is_full() or not _is_for_users(error):
                raise
            brief = _shortened(error)
        finally:
            _THREAD.is_in_entry = False
        try:
            raise brief  # PYTORCHRL_FULL_TRACEBACKS=1 shows all frames
        finally:
            del brief  # otherwise, the error would refer to this frame, and this frame to the error
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
    trace = _innermost(error.__traceback__)
    return trace is not None and _is_users(trace)


def is_full() -> bool:
    """Return whether the user wants to see all frames."""
    return os.environ.get(VARIABLE, "0") != "0"


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, as Python prints them: each is the cause or the context of the one before it."""
    chain = [error]  # an error may be its own cause, after `raise error from error`
    while True:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or any(cause is other for other in chain):
            return chain
        chain.append(cause)


def shown_errors(error: BaseException) -> list[BaseException]:
    """Return an error, and those of its causes that are shown to the user; each is a cause of the one before it.

    A cause is shown if it has a frame of the user's own code. The exception of an environment or callback is always
    shown.
    """
    shown = [error]
    for cause in chain_of(error)[1:]:
        if _has_users_frame(cause.__traceback__) or (
                isinstance(shown[-1], (CallbackError, EnvError)) and not isinstance(cause, PyTorchRLError)):
            shown.append(cause)
    return shown


def shows_users_code(error: BaseException) -> bool:
    """Return whether an error or one of its causes has a frame of the user's own code."""
    return any(_has_users_frame(each.__traceback__) for each in shown_errors(error))


def users_traceback(error: BaseException) -> str:
    """Format an error and its causes with only the frames of the user's own code, or all frames if none is the user's.

    The last line is the error itself. The result contains all frames, too, if the user wants to see them.
    """
    if is_full() or not shows_users_code(error):
        return "".join(traceback.format_exception(error))
    blocks = []
    for each in reversed(shown_errors(error)):
        frames = traceback.format_tb(_shown_frames(each))
        head = ["Traceback (most recent call last):\n"] if frames else []
        blocks.append("".join([*head, *frames, *traceback.format_exception_only(each)]))
    return "\n".join(blocks)


def _is_for_users(error: BaseException) -> bool:
    """Return whether the traceback of an error is to be shortened; see `brief_errors`."""
    if isinstance(error, KeyboardInterrupt):
        return bool(error.args)
    is_full_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, PyTorchRLError) or is_full_disk or _has_users_frame(error.__traceback__)


def _shortened(error: BaseException) -> BaseException:
    """Remove frames and causes from an error, and log its message if it has frames of the user's own code."""
    if not isinstance(error, (ConfigError, KeyboardInterrupt)) and shows_users_code(error):
        is_own = isinstance(error, PyTorchRLError)
        logger.error("%s", error if is_own else f"{type(error).__name__}: {error}".partition("\n")[0])
    shown = shown_errors(error)
    for each, cause in itertools.zip_longest(shown, shown[1:]):
        each.__traceback__ = _users_frames(each.__traceback__) if each is error else _shown_frames(each)
        if cause is None or each.__cause__ is not None or each.__context__ is not cause:
            each.__cause__ = cause
    return error


def _shown_frames(error: BaseException) -> TracebackType | None:
    """Return the frames of the user's own code, or only the innermost frame if no frame is the user's."""
    trace = error.__traceback__
    return _users_frames(trace) or _innermost(trace)


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a copy of a traceback that contains only the frames of the user's own code."""
    entries = list[TracebackType]()
    while trace is not None:
        if _is_users(trace):
            entries.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for entry in reversed(entries):
        found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return found


def _has_users_frame(trace: TracebackType | None) -> bool:
    """Return whether a frame of the traceback belongs to the user's own code."""
    return _users_frames(trace) is not None


def _is_users(entry: TracebackType) -> bool:
    """Return whether the frame belongs to the user's own code; see `_LIBRARIES`."""
    package = str(entry.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


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
