"""Print the output of the commands, line by line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pytorchrl.support.terminal import printable


def show(*lines: str) -> None:
    """Print lines on standard output without buffering; control characters are escaped, see `printable`."""
    print(*map(printable, lines), sep="\n", flush=True)


def show_stderr(*lines: str) -> None:
    """Print lines on standard error, with control characters escaped."""
    if lines:
        print(*map(printable, lines), sep="\n", file=sys.stderr)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output.

    In a terminal, rich draws the table if rich is installed. Otherwise, the table is printed as aligned text.
    """
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:  # the extra `cli` is not installed
            pass
        else:
            table = Table()
            for cell in head:
                table.add_column(Text(printable(cell)))
            for row in rows:
                table.add_row(*(Text(printable(cell)) for cell in row))
            Console(file=sys.stdout).print(table)
            return
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    show(*("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells))
