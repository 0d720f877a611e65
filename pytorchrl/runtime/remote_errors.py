"""Send an error to another process together with its traceback and its causes, which pickle drops."""

from __future__ import annotations

import ast
import contextlib
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import cloudpickle

from pytorchrl.errors import WorkerError
from pytorchrl.support.tracebacks import chain_of


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a traceback: a function, and the part of its source code that was running."""

    file: str
    function: str
    module: str
    lines: tuple[int, int]
    """First and last line."""
    columns: tuple[int, int]
    """Bytes before the part in its first line, and bytes up to the part's end in its last line; (0, 0) if unknown."""


@dataclass(frozen=True, slots=True)
class SentError:
    """An error that is sent to another process.

    Attributes:
        pickled: The pickled error.
        frames: The traceback, with the innermost call last.
        cause: The error that is shown as the cause of this error, or during whose handling this error was raised.
        has_context: Whether `cause` is only the context of the error, because `raise ... from ...` did not name it.
    """

    pickled: bytes
    frames: tuple[Frame, ...]
    cause: SentError | None
    has_context: bool

    @classmethod
    def of(cls, error: BaseException) -> SentError:
        """Prepare an error for sending. An error that cannot be pickled is sent as a `WorkerError` with its text."""
        sent: SentError | None = None
        for each in reversed(chain_of(error)):
            sent = cls(_pickled(each), tuple(_frames_of(each.__traceback__)), sent, each.__cause__ is None)
        assert sent is not None
        return sent

    def received(self) -> BaseException:
        """Restore the error with its traceback and its causes.

        The frames of the restored traceback have the names and lines of the original frames, but no local variables.
        """
        error: BaseException = pickle.loads(self.pickled)
        trace: TracebackType | None = None
        for frame in reversed(self.frames):
            trace = _rebuilt(frame, trace)
        error.__traceback__ = trace
        cause = None if self.cause is None else self.cause.received()
        if self.has_context:
            error.__context__ = cause
        else:
            error.__cause__ = cause
        return error


def _pickled(error: BaseException) -> bytes:
    with contextlib.suppress(Exception):  # an error of any class may refuse to be pickled
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)  # this fails if the constructor of the error does not accept `error.args`
        return pickled
    return cloudpickle.dumps(WorkerError(f"{type(error).__name__}: {error}"))


def _frames_of(trace: TracebackType | None) -> Iterator[Frame]:
    while trace is not None:
        code, lines, columns = trace.tb_frame.f_code, (trace.tb_lineno, trace.tb_lineno), (0, 0)
        if hasattr(code, "co_positions"):  # Python 3.11
            first, last, start, end = next(itertools.islice(code.co_positions(), trace.tb_lasti // 2, None))
            if first is not None and last is not None and start is not None and end is not None:
                lines, columns = (first, last), (start, end)
        yield Frame(code.co_filename, code.co_name, str(trace.tb_frame.f_globals.get("__name__", "")), lines, columns)
        trace = trace.tb_next


def _rebuilt(frame: Frame, following: TracebackType | None) -> TracebackType:
    """Return an entry of a traceback that looks like `frame` and is followed by `following`.

    Only a frame of running code can be part of a traceback, so this function runs code that divides by zero at the same
    place of the same file, in a function of the same name.
    """
    tree = ast.parse("1 / 0")
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            (node.lineno, node.end_lineno), (node.col_offset, node.end_col_offset) = frame.lines, frame.columns
    code = compile(tree, frame.file, "exec").replace(co_name=frame.function)
    try:
        exec(code, {"__name__": frame.module})
    except ZeroDivisionError as error:
        entry = error.__traceback__.tb_next if error.__traceback__ is not None else None
    assert entry is not None
    return TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
