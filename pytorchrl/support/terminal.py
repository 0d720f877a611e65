"""Escape untrusted text in terminal output: the command line's output, the progress line, warnings and logs.

Names of environments, policies and info entries, and the errors of environments and of users' code, may contain control
characters. If they were printed unescaped, they could clear the screen, overwrite other text, or forge lines. The
files of a run need no such escaping, because JSON escapes control characters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
import warnings
from collections.abc import Iterator


def printable(text: object) -> str:
    """Return `text` as one line in which every character that is not printable is escaped, as `repr` escapes it.

    The following Unicode categories are unprintable: control characters (such as escape, line feed and carriage
    return), format characters (such as marks that change the direction of text), surrogates, and separators other than
    the space.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def red(text: str) -> str:
    """Return text that a terminal shows in red, unless the user has set NO_COLOR."""
    return text if not text or os.environ.get("NO_COLOR") else f"\x1b[31m{text}\x1b[0m"


class Lines:
    """Text of several lines for a log, such as a traceback.

    Each line is escaped separately, and line feeds are kept.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return "\n".join(map(printable, self._text.split("\n")))


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module. The arguments of its records are escaped before any handler prints them."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)  # a logger adds the same function only once
    return logger


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    """Suppress Python warnings, and messages below level ERROR of the logger `name`, in a `with` block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _Shown:
    """Argument of a log record; its text is escaped when the record is formatted."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(self._value)

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _escape(record: logging.LogRecord) -> bool:
    """Escape the arguments and the exception of a record; its message, the package's own text, stays unchanged."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    if record.exc_info and record.exc_info[1] is not None:
        text = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        if (escaped := str(Lines(text))) != text:
            record.exc_text = escaped  # formatters print this text instead of the exception
    return True


def _shown(argument: object) -> object:
    is_fine = isinstance(argument, (int, float, Lines)) or str(argument).isprintable()
    return argument if is_fine else _Shown(argument)
