"""Treat `sys.exit()` in a user's code as an error; otherwise, a run would end early and look successful."""

from __future__ import annotations

import signal
import traceback

from pytorchrl.errors import WorkerError

USER_ERRORS = (Exception, SystemExit)
"""The exceptions of a user's code, such as an environment, that are converted to errors of this package."""


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
