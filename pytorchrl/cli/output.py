"""Print the output of the commands, line by line."""

from __future__ import annotations

import sys

from pytorchrl.terminal import printable


def show(*lines: str) -> None:
    """Print lines on standard output without buffering; control characters are escaped, see `printable`."""
    print(*map(printable, lines), sep="\n", flush=True)


def show_stderr(*lines: str) -> None:
    """Print lines on standard error, with control characters escaped."""
    print(*map(printable, lines), sep="\n", file=sys.stderr)
