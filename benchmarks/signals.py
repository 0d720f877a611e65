"""Check what Ctrl-C, SIGTERM and SIGKILL leave behind if they end a training run at a random moment (Linux only).

    python benchmarks/signals.py [--count 50] [--twice 10] [--forms central threads processes ray] [--kinds SIGINT ...]
        [--training 4]

The script runs `pytorchrl train` as a process in its own session, and sends signals to it at a random moment. In half
of the runs, this moment is before training begins, during imports or the startup of Ray; in the other half, it is in
the first seconds of training. The script then measures the time until the process exits, and checks its exit code, the
processes and files that remain ten seconds later, and whether the written files can be read. Half of all SIGINT signals
go to the whole process group, as with Ctrl-C in a terminal. The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_table import command_of, ray_directories, running_processes
from results import print_result

from pytorchrl import load
from pytorchrl.analysis.plotting import read_curve
from pytorchrl.errors import PyTorchRLError

ASYNCHRONOUS = ("--num-col-workers", "2", "--col-communication", "asynchronous")
FORMS = {"central": (), **{name: (*ASYNCHRONOUS, "--runtime", name) for name in ("threads", "processes", "ray")}}
KINDS = {
    "SIGINT": (signal.SIGINT,), "SIGTERM": (signal.SIGTERM,), "SIGKILL": (signal.SIGKILL,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT), "SIGTERM, SIGKILL": (signal.SIGTERM, signal.SIGKILL),
}
# A second signal follows the first within PAUSE_S seconds, which is about the duration of a clean exit.
PAUSE_S = {"central": 0.4, "threads": 0.6, "processes": 1.0, "ray": 3.0}
# Remaining processes and files are counted after LEFT_AFTER_S seconds; a process that has not exited after GIVE_UP_S
# seconds is killed.
LEFT_AFTER_S, GIVE_UP_S = 10.0, 60.0
TRAIN = ("-m", "pytorchrl", "train", "ppo", "--env", "CartPole-v1", "--target-steps", "1000000000", "--log-every",
         "500",
         "--log-dir", "run", "--json", "--compile", "no")


class Run:
    """One training process, with its own directory, HOME and temporary files.

    Args:
        form: Key of `FORMS`.
        prefix: Command that starts the training process.
        more: More arguments of the training process.
    """

    def __init__(self, form: str, prefix: Sequence[str] = (), more: Sequence[str] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="signals-"))
        self._shared_before, self._ray_folders = set(Path("/dev/shm").iterdir()), set[Path]()
        for name in ("home", "tmp"):
            (self.folder / name).mkdir()
        environment = {**os.environ, "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"),
                       "OMP_NUM_THREADS": "1"}
        with open(self.folder / "stderr", "wb") as stderr, open(self.folder / "stdout", "wb") as stdout:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *TRAIN, *FORMS[form], *more], cwd=self.folder, env=environment,
                stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True)
        self.started = time.monotonic()

    @property
    def is_training(self) -> bool:
        """Whether training has produced results that are worth saving."""
        path = self.folder / "run" / "metrics.jsonl"
        return path.exists() and path.stat().st_size > 0

    def send(self, number: int, *, to_group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_group else os.kill)(self.process.pid, number)

    def wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            return True
        return False

    def processes(self) -> list[str]:
        """Return the command lines of live processes that are in the run's session or refer to its Ray directory."""
        table = running_processes()
        own = {pid for pid, entry in table.items() if entry.session == self.process.pid}
        self._ray_folders |= ray_directories(own)
        commands = {pid: " ".join(command_of(pid)) for pid in table}
        return [command for pid, command in commands.items()
                if pid in own or any(str(folder) in command for folder in self._ray_folders)]

    def files_left(self) -> list[str]:
        """Return the files left outside the log directory: temporary files, Ray's files, and shared memory."""
        left = [*(self.folder / "tmp").iterdir(), *(path for path in self._ray_folders if path.exists()),
                # Files `sem.mp*` are semaphores of Python's multiprocessing. The run creates none, so they belong to
                # other programs.
                *(path for path in set(Path("/dev/shm").iterdir()) - self._shared_before
                  if not path.name.startswith("sem.mp"))]
        return sorted(path.name for path in left)

    def flaws(self, kind: str, was_training: bool) -> list[str]:
        """Return a description of each flaw in the files of the run."""
        folder, found = self.folder / "run", []
        if not folder.is_dir():
            return []
        for name in ("run.json", "result.json"):
            if (folder / name).exists():
                with described(found, name):
                    json.loads((folder / name).read_text())
        if (folder / "metrics.jsonl").exists() and (text := (folder / "metrics.jsonl").read_text()):
            if not text.endswith("\n"):
                found.append("metrics.jsonl ends with an incomplete line")
            with described(found, "metrics.jsonl"):
                read_curve(folder, "env_steps", "env_steps")
        for path in folder.glob("monitor_*.csv"):
            rows = list(csv.reader(line for line in path.read_text().splitlines() if not line.startswith("#")))
            if any(len(row) != len(rows[0]) for row in rows):
                found.append(f"{path.name} ends with an incomplete row")
        if (folder / "model.pt").exists():
            with described(found, "model.pt"):
                load(folder)
        elif was_training and "SIGKILL" not in kind and "twice" not in kind:
            found.append("no model.pt")
        # A kill may leave a temporary file, which the next run in this directory removes.
        return found + ([] if "SIGKILL" in kind else self._temporary_files())

    def _temporary_files(self) -> list[str]:
        return [f"{path.name.rsplit('.', 1)[0]} left" for path in (self.folder / "run").glob(".*")]

    def close(self) -> None:
        """Kill the remaining processes of the session, and remove the files."""
        deadline = time.monotonic() + LEFT_AFTER_S
        while self.processes() and time.monotonic() < deadline:
            self.kill_session()
            time.sleep(0.1)
        self.process.wait(GIVE_UP_S)
        for path in (*self._ray_folders, self.folder):
            shutil.rmtree(path, ignore_errors=True)

    def kill_session(self) -> None:
        for pid, entry in running_processes().items():
            if entry.session == self.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def described(found: list[str], name: str) -> Any:
    """Catch an error in the `with` block, and append the file name `name` and the error's message to `found`."""
    try:
        yield
    except (PyTorchRLError, ValueError, OSError) as error:
        found.append(f"{name}: {error}")


def wait_for_training(run: Run) -> None:
    while not run.is_training:
        if run.process.poll() is not None or time.monotonic() - run.started > GIVE_UP_S:
            raise RuntimeError(f"training did not start: {(run.folder / 'stderr').read_text()[-2000:]}")
        time.sleep(0.02)


def start_up_s(form: str) -> float:
    """Return the seconds until training begins, without signals."""
    run = Run(form)
    try:
        wait_for_training(run)
        seconds = time.monotonic() - run.started
        run.send(signal.SIGTERM, to_group=False)
        run.wait(GIVE_UP_S)
        return seconds
    finally:
        run.close()


def one(form: str, kind: str, moment: float, pause: float, *, in_training: bool, to_group: bool) -> dict[str, Any]:
    """Start a run, send signals to it, and return the results.

    The first signal is sent `moment` seconds after the process starts or, with `in_training`, after training begins.
    """
    run, numbers = Run(form), KINDS[kind]
    try:
        if in_training:
            wait_for_training(run)
            time.sleep(moment)
        else:
            time.sleep(max(0.0, run.started + moment - time.monotonic()))
        moment = time.monotonic() - run.started
        run.processes()  # this call also finds Ray's directory
        was_training, ended = run.is_training, False
        run.send(numbers[0], to_group=to_group)
        sent = time.monotonic()
        for number in numbers[1:]:
            if ended := run.wait(pause):
                break
            run.send(number, to_group=to_group)
            sent = time.monotonic()
        in_time = run.wait(GIVE_UP_S)
        seconds, gone = time.monotonic() - sent, None
        while gone is None:
            processes, files = run.processes(), run.files_left()
            if not processes and not files:
                gone = time.monotonic() - sent
            elif time.monotonic() - sent > LEFT_AFTER_S:
                break
            else:
                time.sleep(0.05)
        code = run.process.returncode
        return {
            "form": form, "kind": kind, "moment": moment, "was_training": was_training, "ended_before_second": ended,
            "seconds": seconds, "code": code if in_time else None, "gone_s": gone, "processes_left": processes,
            "files_left": files, "flaws": run.flaws(kind, was_training),
            "stderr": (run.folder / "stderr").read_text(errors="replace")[-3000:],
        }
    finally:
        run.close()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics of the runs with one form of training and one kind of signal."""
    seconds = sorted(row["seconds"] for row in rows if not row["ended_before_second"])
    gone = [row["gone_s"] for row in rows if row["gone_s"] is not None]

    def counted(values: Any) -> dict[str, int]:
        return {str(value): count for value, count in sorted(collections.Counter(values).items(), key=str)}
    return {
        "runs": len(rows), "of_them_training": sum(row["was_training"] for row in rows),
        "exit_s": {"p50": statistics.median(seconds), "p95": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
                   "max": seconds[-1]} if seconds else None,
        "nothing_left_s": {"p50": statistics.median(gone), "max": max(gone)} if gone else None,
        "exit_codes": counted(row["code"] for row in rows),
        "ended_before_second": sum(row["ended_before_second"] for row in rows),
        "runs_with_processes_left": sum(bool(row["processes_left"]) for row in rows),
        "runs_with_files_left": sum(bool(row["files_left"]) for row in rows),
        "flaws": counted(flaw for row in rows for flaw in row["flaws"]),
        "tracebacks": sum("Traceback" in row["stderr"] or "Exception ignored" in row["stderr"] for row in rows),
    }


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="runs for each form and single signal")
    parser.add_argument("--twice", type=int, default=10, help="runs for each form and pair of signals")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--start-up", type=float,
                        help="seconds until training begins; measured once per form if not given")
    parser.add_argument("--training", type=float, default=4.0,
                        help="seconds of training in which signals are sent, from its beginning")
    parser.add_argument("--rows", help="file to write, with one line of JSON per run")
    options = parser.parse_args()
    # In a shell's background job, this script would ignore SIGINT, and the runs would inherit this setting.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `finally` clauses end the current run
    result: dict[str, Any] = {}
    for form in options.forms:
        start_up = options.start_up or start_up_s(form)
        result[form] = {"start_up_s": start_up}
        for kind in options.kinds:
            rng = random.Random(f"{options.seed} {form} {kind}")
            rows = []
            for number in range(options.count if len(KINDS[kind]) == 1 else options.twice):
                in_training = number % 2 == 0
                row = one(form, kind, rng.uniform(0.0, options.training if in_training else start_up),
                          rng.uniform(0.0, PAUSE_S[form]), in_training=in_training,
                          to_group=kind.startswith("SIGINT") and number % 4 < 2)
                rows.append(row)
                print(f"{form} {kind} {number + 1}: at {row['moment']:.2f} s, code {row['code']} after "
                      f"{row['seconds']:.2f} s, "
                      f"left {len(row['processes_left'])} + {len(row['files_left'])}, {row['flaws'] or 'sound'}",
                      file=sys.stderr, flush=True)
                if options.rows:
                    with open(options.rows, "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            if rows:
                result[form][kind] = summary(rows)
    print_result(result)


if __name__ == "__main__":
    main()
