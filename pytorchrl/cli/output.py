"""Every line that the command line prints."""

from __future__ import annotations

import sys

from pytorchrl.terminal import printable


def show(*lines: str) -> None:
    """Print lines on standard output at once; what could be no text of ours in them is escaped, see `printable`."""
    print(*map(printable, lines), sep="\n", flush=True)


def tell(*lines: str) -> None:
    """Print lines on standard error, escaped in the same way."""
    print(*map(printable, lines), sep="\n", file=sys.stderr)
