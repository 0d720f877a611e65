"""Print the output of the commands, line by line."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from pytorchrl.support.terminal import printable, red


def show(*lines: str) -> None:
    """Print lines on standard output without buffering; control characters are escaped, see `printable`."""
    if lines:
        print(*map(printable, lines), sep="\n", flush=True)


def show_in_red(*lines: str) -> None:
    """Print lines on standard output, in red if it is a terminal; control characters are escaped."""
    shown = map(printable, lines)
    print(*(map(red, shown) if sys.stdout.isatty() else shown), sep="\n", flush=True)


def show_stderr(*lines: str) -> None:
    """Print lines on standard error, with control characters escaped."""
    if lines:
        print(*map(printable, lines), sep="\n", file=sys.stderr)


def wrapped(text: str, indent: int) -> list[str]:
    """Return text in lines that fit the terminal, all but the first indented by `indent` spaces."""
    return textwrap.wrap(printable(text), _width(), subsequent_indent=" " * indent, break_on_hyphens=False)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output as aligned text.

    If the table is wider than the terminal (80 columns if there is none), the columns that do not fit follow in further
    tables, which repeat the first column.
    """
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    first, *columns = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*cells, strict=True)]
    while columns:
        count = 1
        while count < len(columns) and len("  ".join((first[0], *(column[0] for column in columns[:count + 1])))) <= (
                _width()):
            count += 1
        show(*("  ".join(row).rstrip() for row in zip(first, *columns[:count], strict=True)))
        columns = columns[count:]
        if columns:
            show("")


def _width() -> int:
    return shutil.get_terminal_size().columns
