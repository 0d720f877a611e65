"""Text of others on a terminal: in the command line's output, the progress line, warnings and logs.

Names of environments, policies and info entries, and the errors of environments and of users' code, may hold control characters.
Printed as they are, these clear the screen, overwrite what stands there, or make up lines of their own. Files of a run keep every
text as it is, as JSON.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any


def printable(text: object) -> str:
    """Return `text` as one line in which every character that is not printable is escaped, as `repr` escapes it.

    Not printable are, by Unicode's categories, control characters (the escape character, line feed, carriage return), format
    characters (those that change the direction of text), surrogates, and separators other than the space.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class Lines:
    """Text of several lines, a traceback say, for a log: its line feeds stay, and each line is escaped by itself."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return "\n".join(map(printable, self._text.split("\n")))


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, whose records show the texts of others escaped, whatever handler prints them."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)  # the same function every time, which a logger keeps once
    return logger


class _Shown:
    """An argument of a log record whose text is not printable."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(self._value)

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _escape(record: logging.LogRecord) -> bool:
    """Escape the arguments of a record, and the exception that it shows; the message itself is the package's own text."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    if record.exc_info and record.exc_info[1] is not None:
        text = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        if (escaped := str(Lines(text))) != text:
            record.exc_text = escaped  # formatters print this in place of the exception
    return True


def _shown(argument: Any) -> Any:
    is_fine = isinstance(argument, (int, float, Lines)) or str(argument).isprintable()
    return argument if is_fine else _Shown(argument)
