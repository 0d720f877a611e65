"""Break every kind of save at each of its system calls, and check that a reader then finds the old or the new data.

    python benchmarks/broken_saves.py [--saves model checkpoint ...] [--strace]

Each save runs in a process of its own, in which one system call is broken: `open`, `write`, `fsync`, `close`, `rename`,
`unlink`, `mkdir` or `truncate`. It is broken in one of four ways:

    error    the call fails once with an input/output error
    full     no call finds room on the disk from then on; half of a write succeeds first
    before   the process ends before the call
    after    the process ends after the call

Then this process reads the files. The save is repeated without a fault, and must find and leave a sound state: the new
data, and no temporary file. Calls are intercepted in Python; all files of the library are written by Python. With
`--strace`, the program of this name breaks real system calls instead: each fails once with ENOSPC, or kills the process
with SIGKILL. The script prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import errno
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import print_result

import pytorchrl as prl
from pytorchrl.analysis import read_curve
from pytorchrl.errors import PyTorchRLError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.run_directory import Lock
from pytorchrl.files.tensors import read_sealed, save
from pytorchrl.learner import checkpoints
from pytorchrl.learner.files import RunFiles
from pytorchrl.learner.options import LearnerOptions
from pytorchrl.learner.reporting import Recorder, write_json
from pytorchrl.play import dataset as offline
from pytorchrl.runtime import Section
from pytorchrl.scheme.recording.record import RecordWriter, read_record
from pytorchrl.training.configuration import load_config, save_config

WAYS = ("error", "full", "before", "after")
TAKES_ROOM = ("open", "write", "mkdir", "fsync")
FINISHED, FAILED, RAW, ENDED = 0, 3, 4, 9


# ---- saves: each writes version 1, 2, ... into a folder, and reads the version that is there


def save_model(folder: Path, version: int) -> None:
    weights = {"all": torch.full((20_000,), version)}
    save(folder / "model.pt", {"format": 1, "version": version, "acting_state": weights})


def read_model(folder: Path) -> object:
    found = read_sealed(folder / "model.pt", "model")
    assert bool((found["acting_state"]["all"] == found["version"]).all())  # type: ignore[index]
    return found["version"]


def save_checkpoint(folder: Path, version: int) -> None:
    state = {"scheme": {"all": torch.full((20_000,), version)}, "learner": {"env_steps": 100 * version}}
    options = LearnerOptions(target_steps=1, log_dir=folder, eval_every=1, keep_best_checkpoint=True)
    files = checkpoints.CheckpointFiles(folder / "checkpoints", options)
    files.rate(version, float(version))
    files.write(checkpoints.Written(100 * version, version), state)


def read_checkpoint(folder: Path) -> object:
    found = checkpoints.newest(folder / "checkpoints")
    if found is None:
        return 0
    assert bool((found.state.scheme["all"] == found.state.learner["env_steps"] // 100).all())
    return found.state.learner["env_steps"] // 100


def save_result(folder: Path, version: int) -> None:
    write_json(folder / "result.json", {"env_steps": version, "numbers": [version] * 20_000})


def read_result(folder: Path) -> object:
    found: Any = read_json(folder / "result.json")
    assert found["numbers"] == [found["env_steps"]] * 20_000
    return found["env_steps"]


def save_metrics(folder: Path, version: int) -> None:
    recorder = Recorder(folder, tensorboard=False)
    recorder.write({"env_steps": version, "return_mean": 1.0, "text": "x" * 900})
    recorder.close()


def read_metrics(folder: Path) -> object:
    if not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_bytes():
        return 0
    xs, _ = read_curve(folder, "env_steps", "return_mean")
    return int(xs[-1])


def resume_metrics(folder: Path, version: int) -> None:
    """Write three records at first; later, resume from the first of them."""
    state = folder / "state.json"
    if version == 1:
        recorder = Recorder(folder, tensorboard=False)
        recorder.write({"env_steps": 2, "return_mean": 1.0})
        state.write_text(json.dumps(recorder.state))
        recorder.write({"env_steps": 1, "return_mean": 1.0})
    else:
        recorder = Recorder(folder, tensorboard=False, after=2, resumed=json.loads(state.read_text()))
    recorder.close()


def save_record(folder: Path, version: int) -> None:
    """Record `version` updates in a new file, beside the records of earlier calls."""
    path = folder / "record.jsonl"
    path.unlink(missing_ok=True)
    record = RecordWriter(str(path), {"seed": 1}, {}, 100)
    for number in range(version):
        record.add([("UWorker", 0, Section([("update", 0, number)], []))])
    record.close(False, 7)


def read_updates(folder: Path) -> object:
    """Return the number of updates; a record that is cut off is an earlier state of the same record."""
    path = folder / "record.jsonl"
    if not path.exists():
        return 0
    if b"\n" not in path.read_bytes():  # the writer ended before the first line was complete
        return 0
    return read_record(path).updates


def save_data(folder: Path, version: int) -> None:
    steps = np.arange(3000)
    offline._write_npz(offline.Dataset(
        observations={"obs": np.full((3000, 4), version, np.float32)},
        final_observations={"obs": np.full((1, 4), version, np.float32)}, actions=steps, rewards=steps * 1.0,
        terminations=steps == 2999, truncations=steps < 0, lengths=np.array([3000]), seeds=np.array([version])),
        folder / "data.npz")


def read_data(folder: Path) -> object:
    found = offline.read_dataset(folder / "data.npz")
    assert bool((found.observations["obs"] == found.seeds[0]).all())
    return int(found.seeds[0])


def write_config(folder: Path, version: int) -> None:
    save_config(folder / "run.toml", "ppo", "CartPole-v1", {"num_envs": version})


def run(folder: Path, version: int) -> None:
    """Train a tiny run with checkpoints; later versions resume it and go on for as many steps again."""
    Lock(folder).close()
    prl.train("ppo", "CartPole-v1", target_steps=128 * version, log_dir=folder / "run", num_envs=2, num_steps=16,
              hidden_sizes=(4,), num_epochs=1, num_mini_batch=1, seed=1, checkpoint_every=64, resume=True,
              progress=False, tensorboard=False, log_every=32)


def read_run(folder: Path) -> object:
    """Return the version that the checkpoint belongs to; every other file must be readable, or missing."""
    path = folder / "run"
    if not (path / "run.json").exists():
        return 0
    read_json(path / "run.json")
    found = RunFiles(path).newest_checkpoint()
    for name, read in (("model.pt", lambda: prl.load(path)), ("result.json", lambda: read_json(path / "result.json")),
                       ("metrics.jsonl", lambda: read_metrics(path))):
        if (path / name).exists():
            read()
    return 0 if found is None else -(-int(found.state.learner["env_steps"]) // 128)


SAVES: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], object], tuple[int, ...]]] = {
    # name: (save, read, versions that may be there after a broken save of version 2)
    "model": (save_model, read_model, (1, 2)), "checkpoint": (save_checkpoint, read_checkpoint, (1, 2)),
    "result": (save_result, read_result, (1, 2)), "metrics": (save_metrics, read_metrics, (1, 2)),
    "resumed metrics": (resume_metrics, read_metrics, (1, 2)), "record": (save_record, read_updates, (0, 1, 2)),
    "data set": (save_data, read_data, (1, 2)),
    "configuration": (write_config, lambda folder: load_config(folder / "run.toml")["num_envs"], (1, 2)),
    "first run": (lambda folder, version: run(folder, version - 1), read_run, (0, 1)), "run": (run, read_run, (1, 2))}


# ---- breaking calls


class Breaker:
    """Counts the calls that write files, and breaks one of them.

    Args:
        number: Number of the call, from 0; None: no call is broken.
        way: One of `WAYS`.
    """

    def __init__(self, number: int | None = None, way: str = "error") -> None:
        self._number, self._way, self.calls = number, way, list[str]()

    def call(self, kind: str, act: Callable[[], Any], partly: Callable[[], Any] | None = None) -> Any:
        """Make one call, or break it; `partly` does half of it."""
        number = len(self.calls)
        self.calls.append(kind)
        if self._way == "full" and self._number is not None and number >= self._number and kind in TAKES_ROOM:
            if number == self._number and partly is not None:
                partly()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number == self._number and self._way == "error":
            if kind == "close":
                act()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if number == self._number and self._way == "before":
            os._exit(ENDED)
        found = act()
        if number == self._number and self._way == "after":
            os._exit(ENDED)
        return found

    def install(self) -> None:
        """Replace the functions of this process that write files."""
        real = {name: getattr(os, name) for name in (
            "open", "write", "fsync", "close", "replace", "rename", "unlink", "remove", "mkdir", "ftruncate")}
        breaker, real_open = self, builtins.open

        def wrapped(name: str) -> Callable[..., Any]:
            kind = {"replace": "rename", "remove": "unlink", "ftruncate": "truncate"}.get(name, name)

            def function(*args: Any, **options: Any) -> Any:
                def half() -> Any:
                    return real["write"](args[0], bytes(args[1])[:len(args[1]) // 2]) if name == "write" else None
                return breaker.call(kind, lambda: real[name](*args, **options), half)
            return function

        class Raw(io.FileIO):
            """A file whose writes and whose end are counted."""

            def write(self, data: Any) -> Any:
                view = memoryview(data).cast("B")
                return breaker.call("write", lambda: io.FileIO.write(self, view),
                                    lambda: io.FileIO.write(self, view[:len(view) // 2]))

            def close(self) -> None:
                if not self.closed:
                    breaker.call("close", lambda: io.FileIO.close(self))

        def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                  newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:
            if not set(mode) & set("wxa+"):
                return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = breaker.call("open", lambda: Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener))
            binary = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding or "utf-8", errors, newline)
        for name in real:
            setattr(os, name, wrapped(name))
        builtins.open = io.open = open_  # type: ignore[assignment] # the signature is that of `open`


def in_child(act: Callable[[], object]) -> int:
    """Run a function in a child process, and return its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = RAW
    exit_now = os._exit
    try:
        logging.disable()
        act()
        code = FINISHED
    except (PyTorchRLError, OSError):
        code = FAILED
    finally:
        exit_now(code)


def calls_of(save_it: Callable[[Path, int], None], folder: Path) -> list[str]:
    """Return the calls of a save that succeeds."""
    receive, send = os.pipe()

    def act() -> None:
        breaker, write = Breaker(), os.write
        breaker.install()
        save_it(folder, 2)
        write(send, json.dumps(breaker.calls).encode())
    in_child(act)
    os.close(send)
    with open(receive, "rb") as file:
        found: list[str] = json.loads(file.read())
    return found


def state_of(read: Callable[[Path], object], folder: Path) -> object:
    """Return the version that is there, or the text of the error of its reader."""
    logging.disable()
    try:
        return read(folder)
    except (PyTorchRLError, OSError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)


def temporary_files(folder: Path) -> list[str]:
    """Return the temporary files, except those in runs that were renamed because they had no checkpoint yet."""
    return [path.name for path in folder.rglob(".*") if path.is_file() and "run.1" not in path.parts]


def judge(name: str, folder: Path, code: int) -> list[str]:
    """Return what is wrong after a broken save, and after the same save without a fault."""
    save_it, read, allowed = SAVES[name]
    wrong = [f"exit code {code}"] if code not in (FINISHED, FAILED, ENDED, -signal.SIGKILL) else []
    found = state_of(read, folder)
    if found not in allowed:
        wrong.append(f"found {found}")
    if code == FINISHED and name not in ("metrics", "record", "first run", "run") and found != allowed[-1]:
        wrong.append(f"finished, but found {found}")
    if (again := in_child(lambda: save_it(folder, 2))) != FINISHED:
        wrong.append(f"saving again ends with exit code {again}")
    if (found := state_of(read, folder)) != allowed[-1]:
        wrong.append(f"saved again, but found {found}")
    if name in ("checkpoint", "first run", "run") and (left := temporary_files(folder)):
        wrong.append(f"left {re.sub('[0-9]+', '#', ' '.join(left))}")
    return wrong


def old_state(name: str, folder: Path) -> Path:
    """Return a folder with version 1, which a save of version 2 replaces."""
    folder.mkdir()
    if name != "first run":
        in_child(lambda: SAVES[name][0](folder, 1))
    return folder


def broken(name: str, root: Path, ways: tuple[str, ...] = WAYS, every: int = 1) -> dict[str, Any]:
    """Break one kind of save at each call and in each way, and return the counts."""
    old = old_state(name, root / "old")
    shutil.copytree(old, root / "counted")
    calls = calls_of(SAVES[name][0], root / "counted")
    outcomes, wrong = collections.Counter[str](), list[str]()
    for number in range(0, len(calls), every):
        for way in ways:
            folder = root / "case"
            shutil.copytree(old, folder)

            def act(number: int = number, way: str = way, folder: Path = folder) -> None:
                Breaker(number, way).install()
                SAVES[name][0](folder, 2)
            code = in_child(act)
            outcomes[{FINISHED: "finished", FAILED: "error", ENDED: "ended"}.get(code, f"exit code {code}")] += 1
            found = [f"call {number}, {calls[number]}, {way}: {text}" for text in judge(name, folder, code)]
            wrong += found
            print(*(f"{name}: {text}" for text in found), sep="\n", end="\n" * bool(found), file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    return {"calls": dict(collections.Counter(calls)), "points": len(range(0, len(calls), every)) * len(ways),
            "outcomes": dict(outcomes), "wrong": wrong}


# ---- with strace

SYSTEM_CALLS = ("openat", "write", "fsync", "close", "rename", "unlink", "mkdir", "ftruncate")


def traced(name: str, folder: Path, *options: str) -> tuple[int, str]:
    """Run a save in a child that strace traces; return its exit code and the output of strace."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGSTOP)
        code = RAW
        with contextlib.suppress(BaseException):
            logging.disable()
            try:
                SAVES[name][0](folder, 2)
                code = FINISHED
            except (PyTorchRLError, OSError):
                code = FAILED
        os._exit(code)
    os.waitpid(child, os.WUNTRACED)
    output = folder.with_suffix(".strace")
    with subprocess.Popen(["strace", "-p", str(child), "-o", str(output), *options], stderr=subprocess.PIPE) as tracer:
        assert tracer.stderr is not None
        tracer.stderr.readline()  # the child is attached
        os.kill(child, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, output.read_text()


def broken_by_strace(name: str, root: Path) -> dict[str, Any]:
    """Break each system call of a save, and return the counts."""
    old = old_state(name, root / "old")
    shutil.copytree(old, root / "counted")
    _, text = traced(name, root / "counted", "-e", f"trace={','.join(SYSTEM_CALLS)}")
    calls = collections.Counter(re.findall(r"^(\w+)\(", text, re.MULTILINE))
    points, wrong = 0, list[str]()
    for kind in SYSTEM_CALLS:
        for number, fault in itertools.product(range(1, calls[kind] + 1), ("error=ENOSPC", "signal=SIGKILL")):
            folder = root / "case"
            shutil.copytree(old, folder)
            code, _ = traced(name, folder, "-e", f"inject={kind}:{fault}:when={number}")
            points += 1
            wrong += [f"{kind} {number}, {fault}: {text}" for text in judge(name, folder, code)]
            shutil.rmtree(folder)
    return {"calls": dict(calls), "points": points, "wrong": wrong}


def main() -> None:
    """Parse the command line, break saves, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", nargs="+", default=list(SAVES), choices=SAVES)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="break only every N-th call")
    parser.add_argument("--strace", action="store_true", help="break real system calls with the program strace")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in given.saves:
        with tempfile.TemporaryDirectory(prefix="broken-") as folder:
            results[name] = (broken_by_strace(name, Path(folder)) if given.strace
                             else broken(name, Path(folder), every=given.every))
        print(f"{name}: {results[name]['points']} points, {len(results[name]['wrong'])} wrong", file=sys.stderr,
              flush=True)
    print_result({"points": sum(found["points"] for found in results.values()),
                  "wrong": sum(len(found["wrong"]) for found in results.values()), "saves": results})


if __name__ == "__main__":
    main()
