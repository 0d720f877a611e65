"""Show the view of a run in the terminal: print it once, or redraw it until the run ends or the user quits."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pytorchrl.files.reading import check_run
from pytorchrl.monitor.screen import check_rich, frame
from pytorchrl.monitor.view import Reader

# Height, in lines, of a view that is printed rather than redrawn; it is enough to show every worker.
_PAGE_LINES = 1000


def show_once(run_dir: Path, *, width: int | None = None, stream: IO[str] | None = None) -> None:
    """Print the view of a run once.

    Args:
        run_dir: The directory of the run.
        width: Number of columns; None: the width of the terminal, or 80 without a terminal.
        stream: The stream to which the view is printed; None: standard output.

    Raises:
        ConfigError: The directory contains no run, or rich is missing.
    """
    check_rich()
    from rich.console import Console

    check_run(run_dir)
    console = Console(file=stream, width=width, highlight=False)
    console.print(frame(Reader(run_dir, only_latest=True).read(), console.width, _PAGE_LINES))


def watch(run_dir: Path, *, interval_s: float = 2.0) -> None:
    """Redraw the view of a run every `interval_s` seconds, until the run ends or the user presses q or Ctrl-C.

    The last view stays in the terminal.

    Raises:
        ConfigError: The directory contains no run, or rich is missing.
    """
    check_rich()
    from rich.console import Console
    from rich.live import Live

    check_run(run_dir)
    console, reader = Console(highlight=False), Reader(run_dir, only_latest=True)
    view = reader.read()
    with contextlib.suppress(KeyboardInterrupt), _keys() as keyboard, Live(
            console=console, screen=True, auto_refresh=False) as live:
        while view.state != "ended":
            live.update(frame(view, console.width, console.height), refresh=True)
            if _is_quit(keyboard, interval_s):
                break
            view = reader.read()
    console.print(frame(view, console.width, _PAGE_LINES))


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Turn off line buffering of the keyboard; yield the terminal's file descriptor, or None without a terminal."""
    try:
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ImportError, OSError, ValueError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_quit(keyboard: int | None, seconds: float) -> bool:
    """Wait for `seconds`, and return whether the user pressed q in the meantime."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if keyboard is None:
            time.sleep(left)
        elif select.select([keyboard], [], [], left)[0]:
            keys = os.read(keyboard, 64)
            if not keys or keys.lower().count(b"q"):
                return True
    return False
