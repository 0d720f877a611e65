"""Damage every file of real runs that is read back, and count which damage is refused, harmless or silent.

    python benchmarks/damage.py [--cases 6000] [--seed 0] [--examples DIR]
    python benchmarks/damage.py --fuzz 600 [--seed 0] [--examples DIR]

The script trains three small agents: PPO, DQN with replay, and an asynchronous PPO whose run is recorded; a data set is
recorded with the first. Then it damages one file at a time, and reads it with every reader of this kind of file. An
outcome is one of these:

    error      an error of this library that names the file
    equal      the same data as from the undamaged file
    named      other data, and a warning that names the file
    older      the checkpoint before the damaged one, and a warning that names the damaged one
    killed     data of a run that was killed earlier, because the file, or its end, is missing
    unnamed    an error of this library that does not name the file
    silent     other data without a warning
    raw        an exception of another kind
    hang       no outcome within ten seconds

`--fuzz` reads files that are forged, with correct checksums, and files with random damage, for a number of seconds, and
counts raw exceptions, hangs, and readers that take more than 1 GiB of memory. `--examples` keeps each file that was not
read as it should. The script prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import hashlib
import io
import itertools
import json
import logging
import math
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import damages
import numpy as np
import torch
from results import print_result

import pytorchrl as prl
from pytorchrl import cli
from pytorchrl.analysis import read_curve
from pytorchrl.analysis import read_run as read_description
from pytorchrl.errors import PyTorchRLError
from pytorchrl.monitor.view import read_run as read_view
from pytorchrl.play.dataset import read_dataset, record_dataset
from pytorchrl.scheme.recording.record import read_record
from pytorchrl.training.configuration import load_config
from pytorchrl.training.training import make_learner

HANG_S, MEMORY = 10, 1 << 30
BAD = ("silent", "raw", "hang", "unnamed")
TINY: dict[str, Any] = {"num_envs": 2, "hidden_sizes": (4,), "progress": False, "tensorboard": False, "log_every": 32}
PPO: dict[str, Any] = {**TINY, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "seed": 3, "checkpoint_every": 64}
DQN: dict[str, Any] = {**TINY, "start_steps": 32, "replay_size": 128, "mini_batch_size": 8, "update_every": 16,
                       "seed": 4, "checkpoint_every": 64}
ASYNC: dict[str, Any] = {**TINY, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "seed": 5, "num_col_workers": 2,
                         "col_communication": "asynchronous", "runtime": "threads"}
STEPS = 256
OPTIONS, RESUME = {"ppo": PPO, "dqn": DQN}, {"resume": True, "target_steps": STEPS + 64}
Reader = Callable[[Path], object]


class Hang(BaseException):
    """The time of a reader is over."""


def train(folder: Path) -> None:
    """Train the agents, each in a folder of its own."""
    agent = prl.train("ppo", "CartPole-v1", target_steps=STEPS, log_dir=folder / "ppo", **PPO)
    record_dataset(agent, folder / "ppo" / "data.npz", num_episodes=3)
    prl.train("dqn", "CartPole-v1", target_steps=STEPS, log_dir=folder / "dqn", **DQN)
    prl.train("ppo", "CartPole-v1", target_steps=STEPS, log_dir=folder / "async",
              record=folder / "async" / "record.jsonl", **ASYNC)


# ---- readers


def fingerprint(value: Any) -> Any:
    """Return a text that is equal for equal data, bit for bit."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        return f"{array.dtype}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (Mapping, list, tuple)):
        items = (sorted((repr(key), fingerprint(item)) for key, item in value.items()) if isinstance(value, Mapping)
                 else [fingerprint(item) for item in value])
        return hashlib.sha256(repr(items).encode("utf-8", "surrogatepass")).hexdigest()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def read_model(run: Path) -> object:
    agent = prl.load(run)
    return [agent.acting_state, agent.seed, agent.agent]


def read_as_start(run: Path) -> object:
    """Return the parameters of an actor that starts from the model."""
    agent = prl.load(run.with_name(f".good-{run.name}"))
    options = dataclasses.replace(agent.agent.actor_factory.options, checkpoint=str(run / "model.pt"))
    return dict(dataclasses.replace(agent.agent.actor_factory, options=options)(device="cpu", seed=0).state_dict())


def read_checkpoint(run: Path) -> object:
    """Return the state from which a learner would continue."""
    learner, _ = make_learner(run.name, "CartPole-v1", log_dir=run, **RESUME, **OPTIONS[run.name])
    return [learner._resumed, learner.scheme._checkpoint, learner.env_steps]


def resume(run: Path) -> object:
    """Continue the training of a run to its end, and return its parameters."""
    return prl.train(run.name, "CartPole-v1", log_dir=run, **RESUME, **OPTIONS[run.name]).acting_state


def replay(run: Path) -> object:
    agent = prl.train("ppo", "CartPole-v1", target_steps=STEPS, replay=run / "record.jsonl",
                      **{name: value for name, value in ASYNC.items() if name != "runtime"})
    return agent.acting_state


def read_events(run: Path) -> object:
    record = read_record(run / "record.jsonl")
    if text := record.warning():
        warnings.warn(text, stacklevel=1)
    return [record.settings, record.agent, record.target_steps, record.parts, record.failed, record.checksum]


def read_curves(run: Path) -> object:
    return [read_curve(run, "env_steps", name) for name in ("return_mean", "seconds", "updates", "policy_lag/mean")]


def read_report(run: Path) -> object:
    view = read_view(run)
    for problem in view.problems:
        warnings.warn(problem, stacklevel=1)
    return [dict(view.run), dict(view.result), view.records, view.state == "ended"]


def read_monitor(run: Path) -> object:
    from pytorchrl.agent.env.statistics import Monitor

    path = run / MONITOR
    Monitor(path).close()
    return path.read_bytes()


def command(*arguments: str) -> object:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = cli.main(list(arguments))
    if "internal error" in err.getvalue() or code not in (0, 1, 2):
        raise RuntimeError(err.getvalue())
    if code:
        raise PyTorchRLError(err.getvalue())
    if err.getvalue():
        warnings.warn(err.getvalue(), stacklevel=1)
    return out.getvalue()


def write_page(run: Path) -> object:
    command("report", str(run), "--out", str(run / "report.html"))
    return re.sub(r"[0-9.]+ ?m?s ago", "", (run / "report.html").read_text())


MONITOR = "monitor_train_0.csv"
# Reader -> (function, share of the cases that it reads); the readers of the command line are slow.
READERS: dict[str, tuple[Reader, float]] = {
    "load": (read_model, 1.0), "checkpoint option": (read_as_start, 1.0), "newest checkpoint": (read_checkpoint, 1.0),
    "resume": (resume, 0.02), "config": (lambda run: load_config(run / "run.json"), 1.0),
    "description": (read_description, 1.0), "curves": (read_curves, 1.0), "view": (read_report, 1.0),
    "record": (read_events, 1.0), "replay": (replay, 0.02),
    "data set": (lambda run: read_dataset(run / "data.npz"), 1.0), "monitor": (read_monitor, 1.0),
    "enjoy": (lambda run: command("enjoy", str(run), "--episodes", "1", "--json"), 0.03),
    "report": (write_page, 0.03), "plot": (lambda run: command("plot", str(run), "-o", str(run / "x.png")), 0.01),
    "compare": (lambda run: command("compare", f"a={run}", f"b={run}", "--json"), 0.02)}
OF_MODEL = ("load", "checkpoint option", "enjoy")
OF_CHECKPOINT = ("newest checkpoint", "resume")
READERS_OF = {
    "model.pt": OF_MODEL, "run.json": ("load", "config", "description", "view", "enjoy", "report", "compare"),
    "result.json": ("curves", "view", "report", "plot"),
    "metrics.jsonl": ("curves", "view", *OF_CHECKPOINT, "report", "plot", "compare"),
    "record.jsonl": ("record", "replay"), "data.npz": ("data set",), MONITOR: ("monitor",)}


def readers_of(name: str, run: str) -> tuple[str, ...]:
    found = OF_CHECKPOINT if name.startswith("checkpoints/") else READERS_OF.get(name, ())
    return tuple(reader for reader in found if run != "async" or reader not in OF_CHECKPOINT)


class Texts(logging.Handler):
    """Log handler that keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome_of(read: Reader, run: Path) -> tuple[str, str]:
    """Return (kind, text) of a read: "data" and its fingerprint, "error", "raw" or "hang"; texts of warnings follow."""
    log = Texts()
    logging.getLogger("pytorchrl").addHandler(log)

    def ring(number: int, frame: object) -> None:
        raise Hang
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG_S)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fingerprint(read(run))
        return "data", "\0".join([found, *log.texts, *(str(one.message) for one in caught)])
    except Hang:
        return "hang", ""
    except PyTorchRLError as error:
        return "error", str(error)
    except BaseException as error:  # noqa: BLE001 - every other exception is counted
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "raw", f"{type(error).__name__} in {Path(place.filename).name}, {place.name}: {error}"
    finally:
        signal.alarm(0)
        logging.getLogger("pytorchrl").removeHandler(log)


class Files:
    """The files of the runs, as they were written, and a copy to damage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        train(folder)
        self.contents = {run: {path.relative_to(folder / run).as_posix(): path.read_bytes()
                               for path in sorted((folder / run).rglob("*")) if path.is_file()}
                         for run in ("ppo", "dqn", "async")}
        for run in self.contents:
            shutil.copytree(folder / run, folder / f".good-{run}")

    def restore(self, run: str) -> Path:
        """Write the files of a run again, and return its folder."""
        folder = self._folder / run
        for left in (folder, *self._folder.glob(f"{run}.[0-9]*")):
            shutil.rmtree(left, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        for name, content in self.contents[run].items():
            (folder / name).write_bytes(content)
        return folder

    def artefacts(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield (run, name, contents) of each file that is read back."""
        for run, files in self.contents.items():
            for name, content in files.items():
                if readers_of(name, run):
                    yield run, name, content


# ---- integrity


def wrong_versions(name: str, content: bytes) -> Iterator[damages.Damage]:
    """Yield files of unknown versions, with correct checksums."""
    for version in (0, 2, 99, "1", None):
        if name.endswith(".pt"):
            value = torch.load(io.BytesIO(content), weights_only=True)
            out = io.BytesIO()
            if "scheme" in value:
                value["scheme"]["format"] = f"pytorchrl checkpoint {version if version != '1' else 3}"
            damages.write_sealed(value if "scheme" in value else {**value, "format": version}, out)
            yield "wrong version", damages.written(out.getvalue())
        elif name == "run.json":
            run = json.loads(content)
            run.pop("sha256", None)
            run = damages.with_checksum({**run, "format": version})
            yield "wrong version", damages.written(json.dumps(run).encode())
        elif name == "record.jsonl":
            yield "wrong version", damages.written(
                damages.first_line(content, format=f"pytorchrl record {version if version != '1' else 3}"))


def damages_of(files: Files, run: str, name: str, content: bytes, share: float, rng: random.Random,
               ) -> Iterator[damages.Damage]:
    """Yield the damages of one file; `share` scales their number."""
    def number(usual: int) -> int:
        return max(1, math.ceil(usual * share))
    yield from damages.flips(content, number(250), rng)
    yield from damages.blocks(content, number(15), rng)
    yield from damages.cuts(content, number(25), rng)
    own = files.contents[run]
    yield from damages.others([own[other] for other in own if other != name and own[other] != content])
    yield from wrong_versions(name, content)
    if name.endswith((".pt", ".npz")):
        yield from itertools.islice(damages.members(content, rng), number(60))
    if name.endswith((".jsonl", ".csv")):
        yield from damages.lines(content, number(12), rng)


def judged(outcome: tuple[str, str], good: str, older: str, name: str, kind: str) -> str:
    """Return the class of an outcome; see the head of this file."""
    what, text = outcome
    if what != "data":
        is_named = Path(name).name in text or (what == "error" and "contains no run" in text)
        return what if what != "error" or is_named else "unnamed"
    found, *texts = text.split("\0")
    if found == good:
        return "equal"
    is_named = any(Path(name).name in one for one in texts)
    if found == older and (is_named or kind == "missing"):
        return "older" if is_named else "killed"
    if is_named:
        return "named"
    return "killed" if kind == "missing" and name == "result.json" else "silent"


def integrity(files: Files, cases: int, every: int, rng: random.Random, examples: Path | None) -> dict[str, Any]:
    """Damage every file, and return the counts of outcomes by file and by reader."""
    all_cases = [(run, name, kind, damage) for share in (cases / 6000,) for run, name, content in files.artefacts()
                 for kind, damage in damages_of(files, run, name, content, share, rng)][::every]
    by_file: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    by_reader: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad: list[str] = []
    good: dict[tuple[str, str], str] = {}
    older: dict[tuple[str, str], str] = {}
    for run in files.contents:
        for reader in {reader for other, name, _ in files.artefacts() if other == run
                       for reader in readers_of(name, run)}:
            good[run, reader] = outcome_of(READERS[reader][0], files.restore(run))[1].split("\0")[0]
            if reader in OF_CHECKPOINT:
                folder = files.restore(run)
                max((folder / "checkpoints").iterdir()).unlink()
                older[run, reader] = outcome_of(READERS[reader][0], folder)[1].split("\0")[0]
    start, reads = time.monotonic(), 0
    for place, (run, name, kind, damage) in enumerate(all_cases):
        for reader in readers_of(name, run):
            read, share = READERS[reader]
            if share < 1.0 and rng.random() >= share:
                continue
            folder = files.restore(run)
            damage(folder / name)
            outcome = outcome_of(read, folder)
            found = judged(outcome, good[run, reader], older.get((run, reader), ""), name, kind)
            reads += 1
            by_file[f"{run}/{re.sub('step-.*', 'step', name)}"][found] += 1
            by_reader[reader][found] += 1
            if found in BAD:
                bad.append(f"{found} {run}/{name} {kind} {reader}: {outcome[1][:150] if found != 'silent' else ''}")
                keep(examples, folder / name, f"{found}-{len(bad)}-{reader}-{Path(name).name}")
        if place % 200 == 0:
            print(f"{place} of {len(all_cases)} cases, {time.monotonic() - start:.0f} s, {len(bad)} bad",
                  file=sys.stderr, flush=True)
    total = sum(by_file.values(), collections.Counter())
    return {"cases": len(all_cases), "reads": reads, "seconds": round(time.monotonic() - start),
            "outcomes": dict(total), **{name: total[name] for name in BAD},
            "by_file": {name: dict(found) for name, found in sorted(by_file.items())},
            "by_reader": {name: dict(found) for name, found in sorted(by_reader.items())}, "bad": bad[:200]}


def keep(examples: Path | None, path: Path, name: str) -> None:
    """Copy a file that was not read as it should."""
    if examples is not None and path.is_file():
        examples.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, examples / name.replace(" ", "_"))


# ---- fuzzing


def fuzz(files: Files, seconds: float, rng: random.Random, examples: Path | None) -> dict[str, Any]:
    """Read forged files for a number of seconds, and return the counts of outcomes by reader."""
    for run, reader in (("ppo", "plot"), ("ppo", "report"), ("ppo", "enjoy"), ("dqn", "load"), ("async", "record")):
        outcome_of(READERS[reader][0], files.restore(run))  # everything is imported before memory is limited
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad: dict[str, str] = {}
    artefacts, start, cases = list(files.artefacts()), time.monotonic(), 0
    while time.monotonic() - start < seconds:
        run, name, content = rng.choice(artefacts)
        forged = damages.forge(name, content, rng)
        cases += 1
        for reader in readers_of(name, run):
            read, share = READERS[reader]
            if share < 1.0 and rng.random() >= share:
                continue
            folder = files.restore(run)
            (folder / name).write_bytes(forged)
            kind, text = outcome_of(read, folder)
            counts[reader][kind] += 1
            if kind in ("raw", "hang"):
                place = f"{reader} {Path(name).suffix} {re.sub('[0-9]+', '#', text)[:80]}"
                if place not in bad:
                    bad[place] = f"{run}/{name} {text[:300]}"
                    keep(examples, folder / name, f"fuzz-{len(bad)}-{reader}-{Path(name).name}")
        if cases % 500 == 0:
            gc.collect()
            print(f"{cases} cases, {time.monotonic() - start:.0f} s, {len(bad)} kinds of failures", file=sys.stderr,
                  flush=True)
    total = sum(counts.values(), collections.Counter())
    return {"cases": cases, "reads": total.total(), "seconds": round(time.monotonic() - start), "outcomes": dict(total),
            "by_reader": {name: dict(found) for name, found in sorted(counts.items())}, "kinds_of_failures": bad}


def main() -> None:
    """Parse the command line, damage files, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000, help="approximate number of damaged files")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="read only every N-th damaged file")
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="fuzz the readers for so long instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage")
    parser.add_argument("--examples", type=Path, metavar="DIR", help="directory for files that were read wrongly")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        files = Files(Path(folder))
        result = (integrity(files, given.cases, given.every, rng, given.examples) if given.fuzz is None
                  else fuzz(files, given.fuzz, rng, given.examples))
    print_result({"seed": given.seed, **result})


if __name__ == "__main__":
    main()
