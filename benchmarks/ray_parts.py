"""Kill and stop each part of Ray, and fill its memory, while a run trains; print the outcomes as JSON (Linux only).

    python benchmarks/ray_parts.py [--count 5] [--cases "GCS SIGKILL" ...]

The script trains PPO on CartPole-v1 with two asynchronous collection workers and a checkpoint every 2000 env steps. Two
seconds after the first checkpoint, it sends a signal to one of Ray's processes, fills Ray's object store, or fills
`/dev/shm`. A run that goes on for `GOES_ON_S` seconds and collects data in the last `LATE_S` of them has survived;
it is then ended with SIGTERM. For each case, the script reports outcomes, the time until the end, the last line of the
error, whether this line names the part, whether the newest checkpoint can be resumed, and what was left behind. The
time until the end counts from the end of the first of Ray's processes.
The cases that fill memory need root, because they give the run a small `/dev/shm` of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from process_table import process
from results import print_result
from signals import GIVE_UP_S, LEFT_AFTER_S, Run, wait_for_training

from pytorchrl.analysis.plotting import read_curve
from pytorchrl.errors import PyTorchRLError
from pytorchrl.learner import checkpoints
from pytorchrl.runtime.ray.watch import parts_of

PARTS = ("GCS", "raylet", "dashboard agent", "runtime environment agent")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
FILLS = ("object store full", "/dev/shm full")
LARGE = ", large rollouts"
CASES = [*(f"{part} {name}" for part in PARTS for name in SIGNALS),
         *(f"raylet {name}{LARGE}" for name in SIGNALS), *FILLS]
GOES_ON_S, LATE_S = 25.0, 5.0
SHARED_MB = 300
SMALL_SHARED = ("unshare", "--mount", "sh", "-c",
                f"mount -t tmpfs -o size={SHARED_MB}m tmpfs /dev/shm && exec \"$@\"", "sh",
                "env", f"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES={SHARED_MB * 700_000}")
CHECKPOINTS = ("--checkpoint-every", "2000")
# Rollouts of 400 KB, which are sent through the object store; smaller ones are part of the messages.
LARGE_ROLLOUTS = ("--num-envs", "16", "--num-steps", "512", "--log-every", "8192", "--checkpoint-every", "8192")
FILL_STORE = """
import os, sys, time
import numpy as np
import ray
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host  # the run's Ray listens on the loopback address only
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
kept = []
try:
    while len(kept) < 200:
        kept.append(ray.put(np.ones(2_000_000)))
except Exception as error:
    print(type(error).__name__, flush=True)
print("full", len(kept), flush=True)
time.sleep(1000)
"""


def steps_of(run: Run) -> float:
    """Return the env steps in the last record of a run."""
    with contextlib.suppress(Exception):
        return read_curve(run.folder / "run", "env_steps", "env_steps")[0][-1]
    return 0.0


def wait_for_checkpoint(run: Run) -> None:
    wait_for_training(run)
    deadline = time.monotonic() + GIVE_UP_S
    while not checkpoints.paths(run.folder / "run" / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.05)


def fill(case: str, run: Run) -> subprocess.Popen[bytes] | None:
    """Fill the memory of a run; return the process that holds the memory, if it is a process."""
    inside = ("nsenter", "--target", str(run.process.pid), "--mount")
    if case == "/dev/shm full":
        subprocess.run([*inside, "dd", "if=/dev/zero", "of=/dev/shm/filler", "bs=1M"], capture_output=True, check=False)
        return None
    address = next(word.split("=")[1] for text in run.processes() for word in text.split()
                   if word.startswith("--gcs-address="))
    environment = {**os.environ, "HOME": str(run.folder / "home"), "RAY_AUTH_MODE": "token"}
    return subprocess.Popen([*inside, sys.executable, "-c", FILL_STORE, address], env=environment,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class FirstEnd(threading.Thread):
    """A thread that notes when the first of Ray's processes ends: a full `/dev/shm` ends one only when it is used."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self._pids, self._is_over = list(parts_of(run.process.pid)), threading.Event()
        self.moment: float | None = None
        self.start()

    def run(self) -> None:
        """Look for the processes until one has ended."""
        while self.moment is None and not self._is_over.wait(0.02):
            if not all(process(pid) for pid in self._pids):
                self.moment = time.monotonic()

    def stop(self, otherwise: float) -> float:
        """End the thread, and return when a process has ended; `otherwise` if none has."""
        self._is_over.set()
        self.join()
        return otherwise if self.moment is None else self.moment


def one(case: str) -> dict[str, Any]:
    """Make one run, damage it, and return the outcome."""
    part, _, name = case.removesuffix(LARGE).rpartition(" ")
    is_fill = case in FILLS
    run = Run("ray", SMALL_SHARED if is_fill else (), LARGE_ROLLOUTS if is_fill or LARGE in case else CHECKPOINTS)
    filler = None
    try:
        wait_for_checkpoint(run)
        time.sleep(2.0)
        run.processes()  # this call also finds Ray's directory
        if is_fill:
            filler = fill(case, run)
        else:
            pid = next(pid for pid, found in parts_of(run.process.pid).items() if found == part)
            os.kill(pid, SIGNALS[name])
        sent, first_end = time.monotonic(), FirstEnd(run)
        has_ended = run.wait(GOES_ON_S - LATE_S)
        shared = shared_used(run) if is_fill and not has_ended else None
        before = steps_of(run)
        has_ended = has_ended or run.wait(LATE_S)
        seconds = time.monotonic() - first_end.stop(sent)
        goes_on = not has_ended and steps_of(run) > before
        if not has_ended:
            run.send(signal.SIGTERM, to_group=False)
            if not run.wait(GIVE_UP_S):
                goes_on = False
        code = run.process.poll()
        ended = time.monotonic()
        if filler is not None:
            filler.kill()
            filler.wait()
        while (left := run.processes() + run.files_left()) and time.monotonic() - ended < LEFT_AFTER_S:
            time.sleep(0.05)
        lines = [line for line in (run.folder / "stderr").read_text(errors="replace").splitlines() if line.strip()]
        error = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
        return {"case": case, "outcome": "goes on" if goes_on else "ended" if has_ended else "hangs",
                "seconds": round(seconds, 2) if has_ended else None, "code": code,
                "seconds_until_a_part_ended": round(first_end.stop(sent) - sent, 2),
                "error": "" if goes_on else error,
                "names_part": part in error or is_fill, "resumes": resumes(run), "left": left,
                "shared_memory_used": shared}
    finally:
        if filler is not None:
            filler.kill()
        run.close()


def shared_used(run: Run) -> float:
    """Return the share of the run's `/dev/shm` that is in use."""
    found = os.statvfs(f"/proc/{run.process.pid}/root/dev/shm")
    return round(1.0 - found.f_bfree / found.f_blocks, 3)


def resumes(run: Run) -> bool:
    """Return whether the newest checkpoint can be read."""
    with contextlib.suppress(PyTorchRLError):
        return checkpoints.newest(run.folder / "run" / "checkpoints") is not None
    return False


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcomes of one case."""
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    return {"runs": len(rows), "outcomes": {name: sum(row["outcome"] == name for row in rows)
                                            for name in sorted({row["outcome"] for row in rows})},
            "seconds": {"median": statistics.median(seconds), "max": max(seconds)} if seconds else None,
            "exit_codes": sorted({row["code"] for row in rows}, key=str),
            "errors": sorted({row["error"] for row in rows if row["error"]}),
            "names_part": sum(row["names_part"] for row in rows if row["outcome"] == "ended"),
            "resumes": sum(row["resumes"] for row in rows),
            "left": sorted({item for row in rows for item in row["left"]})}


def main() -> None:
    """Parse the command line, make the runs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5, help="runs for each case")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    options = parser.parse_args()
    result = {}
    for case in options.cases:
        rows = []
        for _ in range(options.count):
            rows.append(one(case))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        result[case] = summary(rows)
    print_result(result)


if __name__ == "__main__":
    main()
