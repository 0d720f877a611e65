"""Implement `pytorchrl watch RUN_DIR`: show a run live in the terminal."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytorchrl.cli.parsing import Parser, positive_seconds
from pytorchrl.errors import ConfigError
from pytorchrl.files.run_directory import RUN_FILE
from pytorchrl.monitor.live import show_once, watch
from pytorchrl.monitor.screen import check_rich

# Seconds to wait, after training, until the process that shows the run has drawn the last frame and exited. If the
# process still runs, it is terminated; if it still runs after the same number of seconds, it is killed.
_LAST_FRAME_S = 5.0


def run(arguments: Sequence[str]) -> int:
    """Show the run until it ends, and return the exit code."""
    parser = Parser(prog="pytorchrl watch", usage="pytorchrl watch RUN_DIR [flags]",
                    description="Show the worker tree of a run live: rates, queues, lags, time shares, restarts, and "
                                "the bottleneck. The command only reads the files of the run, and ends when the run "
                                "ends, or with q or Ctrl-C.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, the --log-dir of training")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--interval", type=positive_seconds, default=2.0, metavar="NUMBER",
                        help="seconds between two frames [2]")
    parser.add_argument("--width", type=int, metavar="COLUMNS",
                        help="with --once: columns of the frame [the terminal's]")
    parser.add_argument("--wait", action="store_true", help="wait until a run starts in RUN_DIR")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    if given.width is not None and (not given.once or given.width < 40):
        parser.error(f"--width needs --once and at least 40 columns, got {given.width}")
    while given.wait and not (Path(given.run_dir) / RUN_FILE).exists():
        time.sleep(given.interval)
    if given.once:
        show_once(Path(given.run_dir), width=given.width)
    else:
        watch(Path(given.run_dir), interval_s=given.interval)
    return 0


def check_watching(log_dir: object) -> None:
    """Raise `ConfigError` if a run with this `log_dir` cannot be watched in this terminal."""
    if log_dir is None:
        raise ConfigError("--watch shows the files of the run, so it needs --log-dir")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("--watch needs a terminal; leave it out, or use `pytorchrl watch RUN_DIR` in another one")
    check_rich()


@contextlib.contextmanager
def watching(run_dir: Path) -> Iterator[None]:
    """Show the run of this process in the terminal; a separate process draws, so that the run is not slowed down."""
    process = subprocess.Popen([sys.executable, "-m", "pytorchrl", "watch", "--wait", str(run_dir)])
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_FRAME_S)
    finally:
        process.terminate()
        try:
            process.wait(_LAST_FRAME_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
