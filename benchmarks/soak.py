"""Train for a long time while workers are killed, and measure what grows; or start and stop many times.

    python benchmarks/soak.py [--minutes 60] [--runtime ray] [--kill-every 20] [--workers 6] [--drive learner]
    python benchmarks/soak.py --drive ray
    python benchmarks/soak.py --cycles 50 [--runtime ray]

PPO trains asynchronously with central gradients, in a process of its own, the driver. This script watches the driver
from outside, so that its samples do not use the driver's memory. Every `--sample-every` seconds it reads, for the
driver, the collection workers and all other processes of the run (Ray's own, the fork server):

- resident memory (`rss_mb`), which includes memory that processes share; the proportional share (`pss_mb`); and the
  memory that belongs to one process only (`uss_mb`), in MB of 10^6 bytes;
- open file descriptors (`descriptors`) and threads (`threads`);
- used bytes and files of /dev/shm (`shm_mb`, `shm_files`), for the whole machine.

Every `--kill-every` seconds, a random worker out of the older half is killed (SIGKILL), so that no worker is lost so
often that the run counts as a crash loop. One worker is spared; its growth covers the whole run. The growth of the
others is measured within the life of each process. Threads cannot be killed, so `--runtime threads` has no kills.

A slope is the Theil-Sen estimate: the median of the slopes between all pairs of points, with its 95 % interval
(`scipy.stats.theilslopes`). Resident memory moves in steps and short peaks, which distort a least-squares fit and its
interval, because that interval assumes independent normal errors. A point is the median of the samples of one block,
a sixtieth of the time after the warm-up, because consecutive samples depend on each other. A Theil-Sen slope ignores
few large steps, so `change` also shows the last sixth minus the first sixth of the blocks.

With `--drive ray`, the driver calls methods of Ray's actors, and does nothing else: it sends arguments and receives
results of about the same size, and replaces actors that are killed. Its growth is that of Ray.

With `--cycles`, one process makes, trains for ten updates, and stops a learner again and again. `left` compares the
process after the last cycle with the process after the warm-up of five cycles; slopes are per cycle.

The script shows partial results on stderr (one JSON object per minute), prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from growth import pooled, sample, shared_memory, trend
from process_table import command_of, descendants, environment_of, name_of, ray_directories, running_processes
from results import print_result

NUM_ENVS, NUM_STEPS = 4, 32
UPDATES_PER_CYCLE, WARM_UP_CYCLES = 10, 5
FOREVER = 10**12
WEIGHTS_BYTES, ROLLOUT_BYTES = 1_000, 6_000
"""Sizes of the messages with `--drive ray`, about those of the scheme."""
SECONDS_TO_END = 2.0
"""Seconds after which the processes of a stopped run should have ended."""
WORKER_WARM_UP_S = 10.0
MARK = "PYTORCHRL_SOAK"
"""Environment variable that all processes of the run inherit."""


# The processes of a run


def processes_of(driver: int, mark: str) -> dict[int, str]:
    """Return the kind of each process of a run, by id: "driver", "worker", or the name of another process.

    A process belongs to the run if it descends from the driver, or has inherited the mark in its environment.
    """
    table = running_processes()
    marked = {pid for pid in table if f"{MARK}={mark}" in environment_of(pid)}
    own = descendants(({driver} | marked) - {os.getpid()}, table)
    return {pid: kind_of(pid, driver) for pid in sorted(own)}


def kind_of(pid: int, driver: int) -> str:
    """Return the kind of a process: "driver", "worker", or the name of another process."""
    command, thread = next(iter(command_of(pid)), ""), name_of(pid)
    if pid == driver:
        return "driver"
    if command.startswith("ray::Worker") or "/CWork" in thread:
        return "worker"
    return command if command.startswith("ray::") else os.path.basename(command) or thread


# The driver


def make_learner(options: argparse.Namespace, log_dir: str | None) -> Any:
    """Return the learner of the run."""
    from pytorchrl import ASYNC, PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import SleepEnv

    envs = VecEnv.create_factory(SleepEnv, {"step_s": options.step_ms / 1000}, NUM_ENVS, backend="sync")
    resources = {"col_worker_resources": {"num_cpus": 0}} if options.runtime == "ray" else {}
    scheme = Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=2, lr=1e-3),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,)),
        GAEBuffer.create_factory(NUM_STEPS), envs, envs, seed=1, num_col_workers=options.workers,
        col_communication=ASYNC, runtime=options.runtime, queue_timeout_s=120.0, **resources)
    return Learner(scheme, target_steps=FOREVER, log_dir=log_dir, progress=False)


def drive(options: argparse.Namespace) -> None:
    """Train until the standard input ends, and write the state of the run to standard output every second."""
    ended = threading.Event()
    # A buffered read would abort the interpreter if training fails.
    threading.Thread(target=lambda: (os.read(sys.stdin.fileno(), 1), ended.set()), daemon=True).start()
    if options.drive == "ray":
        drive_ray(options, ended)
        return
    with tempfile.TemporaryDirectory() as directory:
        learner = make_learner(options, directory if options.drive == "learner" else None)
        learner.start()
        step, due = (learner if options.drive == "learner" else learner.scheme).step, 0.0
        while not ended.is_set():
            step()
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                metrics, ledger = learner.scheme.metrics(), learner.scheme.ledger()
                tell({"updates": metrics["updates"], "workers_restarted": metrics["workers_restarted"],
                      "collected": ledger["collected"]})
        ledger = learner.stop()
        tell({"ledger_exact": ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values()),
              "collected": ledger["collected"]})


def drive_ray(options: argparse.Namespace, ended: threading.Event) -> None:
    """Call methods of Ray's actors until `ended` is set, as `drive` does, but without a scheme."""
    import ray

    class Worker:
        def collect(self, weights: bytes) -> bytes:
            time.sleep(options.step_ms / 1000 * NUM_STEPS * NUM_ENVS)
            return os.urandom(ROLLOUT_BYTES)

    with tempfile.TemporaryDirectory(prefix="prl-", dir="/tmp") as directory:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                 _node_ip_address="127.0.0.1", _temp_dir=os.path.join(directory, "r"),
                 _system_config={"task_events_report_interval_ms": 0})
        actor = ray.remote(num_cpus=0)(Worker)
        weights = os.urandom(WEIGHTS_BYTES)
        actors = [actor.remote() for _ in range(options.workers)]
        calls = {one.collect.remote(weights): index for index, one in enumerate(actors)}
        received, lost, due = 0, 0, 0.0
        while not ended.is_set():
            done, _ = ray.wait(list(calls))
            index = calls.pop(done[0])
            try:
                ray.get(done[0])
                received += 1
            except ray.exceptions.RayActorError:
                lost += 1
                actors[index] = actor.remote()
            calls[actors[index].collect.remote(weights)] = index
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                tell({"calls": received, "workers_restarted": lost})
        ray.shutdown()


def tell(value: dict[str, Any]) -> None:
    """Write one line of JSON to standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def driver_of(mark: str, state: dict[str, Any], directory: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run this script as the driver, with temporary files in `directory`; `state` receives the state of its run."""
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--is-driver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark, "TMPDIR": directory}, start_new_session=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a line that a library printed
                state.update(json.loads(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10.0)


# The soak


@dataclass
class Watch:
    """Samples of all processes of a run."""

    mark: str
    driver: int
    born: dict[int, float] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)  # of living processes
    ever: dict[int, str] = field(default_factory=dict)  # of all processes
    series: dict[tuple[int, str], tuple[list[float], list[float]]] = field(default_factory=dict)
    machine: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    directories: set[Path] = field(default_factory=set)  # of Ray
    spared: int | None = None

    def look(self, hours: float) -> None:
        """Take one sample of each process."""
        self.kinds = processes_of(self.driver, self.mark)
        self.ever.update(self.kinds)
        self.directories |= ray_directories(self.kinds)
        for pid in self.kinds:
            self.born.setdefault(pid, hours)
            for name, value in (sample(pid) or {}).items():
                times, values = self.series.setdefault((pid, name), ([], []))
                times.append(hours)
                values.append(value)
        totals = {"processes": float(len(self.kinds)), **shared_memory()}
        for name, value in totals.items():
            times, values = self.machine.setdefault(name, ([], []))
            times.append(hours)
            values.append(value)

    def workers(self) -> list[int]:
        """Return the living workers, the oldest first."""
        return sorted((pid for pid, kind in self.kinds.items() if kind == "worker"), key=lambda pid: self.born[pid])

    def kill_one(self, rng: random.Random) -> bool:
        """Kill a random worker out of the older half of those that are not spared."""
        workers = self.workers()
        if self.spared not in workers:
            self.spared = workers[0] if workers else None
        others = [pid for pid in workers if pid != self.spared]
        if not others:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(others[:max(1, len(others) // 2)]), signal.SIGKILL)
            return True
        return False

    def of(self, pid: int | None, since: float) -> dict[str, Any]:
        """Return the trend of each measurement of one process after the warm-up."""
        return {name: trend(*after(*series, since)) for (other, name), series in self.series.items() if other == pid}

    def result(self, warm_up_hours: float) -> dict[str, Any]:
        """Return all trends."""
        lives: dict[str, list[tuple[list[float], list[float]]]] = collections.defaultdict(list)
        rest: dict[str, dict[str, Any]] = {}
        for (pid, name), series in self.series.items():
            kind = self.ever[pid]
            if kind == "worker" and pid != self.spared:
                lives[name].append(after(*series, self.born[pid] + WORKER_WARM_UP_S / 3600))
            elif pid in self.kinds and kind not in ("driver", "worker"):
                rest.setdefault(f"{kind} {pid}", {})[name] = trend(*after(*series, warm_up_hours))
        return {"unit": "per hour", "driver": self.of(self.driver, warm_up_hours),
                "spared_worker": self.of(self.spared, warm_up_hours),
                "killed_workers": {name: pooled(found) for name, found in lives.items()},
                "whole_machine": {name: trend(*after(*series, warm_up_hours)) for name, series in self.machine.items()},
                "other_processes": rest}


def after(times: list[float], values: list[float], since: float) -> tuple[list[float], list[float]]:
    """Return the part of a series from a time on."""
    first = next((index for index, moment in enumerate(times) if moment >= since), len(times))
    return times[first:], values[first:]


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Train for the given time while workers are killed, and return all trends."""
    rng, mark, state = random.Random(options.seed), f"{os.getpid()}-{time.time_ns()}", dict[str, Any]()
    warm_up_s = min(300.0, options.minutes * 60 / 4)
    kills, before = 0, shared_memory()
    with tempfile.TemporaryDirectory() as directory:
        with driver_of(mark, state, directory) as process:
            while not state and process.poll() is None:
                time.sleep(0.2)
            watch, start = Watch(mark, process.pid), time.monotonic()
            next_kill, next_report = start + options.kill_every, start + 60.0
            while (now := time.monotonic()) - start < options.minutes * 60 and process.poll() is None:
                watch.look((now - start) / 3600)
                if options.runtime != "threads" and now >= next_kill:
                    kills += watch.kill_one(rng)
                    next_kill += options.kill_every
                if now >= next_report:
                    next_report += 60.0
                    partial = watch.result(warm_up_s / 3600)
                    print(json.dumps({"minutes": (now - start) / 60, "kills": kills, **state,
                                      **{name: partial[name] for name in ("driver", "spared_worker")}}),
                          file=sys.stderr, flush=True)
                time.sleep(max(0.0, options.sample_every - (time.monotonic() - now)))
            seconds, ended_early = time.monotonic() - start, process.poll() is not None
            result, own = watch.result(warm_up_s / 3600), set(watch.kinds)
        time.sleep(SECONDS_TO_END)
        own |= processes_of(process.pid, mark).keys()
        left = {"processes": [kind_of(pid, 0) for pid in own if command_of(pid)],
                "shm_files": shared_memory()["shm_files"] - before["shm_files"],
                "temporary_files": [*os.listdir(directory), *map(str, filter(Path.exists, watch.directories))]}
    return {"minutes": seconds / 60, "warm_up_s": warm_up_s, "kills": kills, **state, "ended_early": ended_early,
            "exit_code": process.returncode, "left": left, **result}


# Cycles


def targets() -> collections.Counter[str]:
    """Return how many descriptors this process has of each kind."""
    found: collections.Counter[str] = collections.Counter()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            path = os.readlink(f"/proc/self/fd/{entry}")
            found[path if path.startswith("/") else path.split(":")[0]] += 1
    return found


def whole_state(mark: str, directories: Iterable[Path]) -> dict[str, collections.Counter[str]]:
    """Return what this process holds: descriptors, threads of Python, child processes and temporary files, by name."""
    gc.collect()
    processes = processes_of(os.getpid(), mark)
    return {"descriptors": targets(), "threads": collections.Counter(thread.name for thread in threading.enumerate()),
            "processes": collections.Counter(kind for pid, kind in processes.items() if pid != os.getpid()),
            "shm_files": collections.Counter(os.listdir("/dev/shm")),
            "temporary_files": collections.Counter(
                [*os.listdir(tempfile.gettempdir()), *map(str, filter(Path.exists, directories))])}


def cycles(options: argparse.Namespace) -> dict[str, Any]:
    """Make, train and stop a learner `--cycles` times, and return what is left and what grows."""
    mark = os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    rows: list[dict[str, float]] = []
    directories: set[Path] = set()  # of Ray
    first: dict[str, collections.Counter[str]] = {}
    with tempfile.TemporaryDirectory() as own_directory:
        tempfile.tempdir = os.environ["TMPDIR"] = own_directory
        for number in range(options.cycles):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as log_dir:
                learner = make_learner(options, log_dir)
                for _ in range(UPDATES_PER_CYCLE):
                    learner.step()
                directories |= ray_directories(processes_of(os.getpid(), mark))
                learner.stop()
            del learner
            state = whole_state(mark, directories)
            rows.append({**(sample(os.getpid()) or {}), **shared_memory(), "python_threads": threading.active_count(),
                         "processes": state["processes"].total(), "seconds": time.monotonic() - start})
            if number == min(WARM_UP_CYCLES, options.cycles) - 1:
                first = state
            print(json.dumps({"cycle": number + 1, **rows[-1]}), file=sys.stderr, flush=True)
        time.sleep(SECONDS_TO_END)
        state = whole_state(mark, directories)
    later = rows[min(WARM_UP_CYCLES, len(rows)) - 1:]
    numbers = [float(number) for number in range(len(later))]
    return {"cycles": options.cycles, "unit": "per cycle",
            "left": {name: dict(counts - first[name]) for name, counts in state.items()},
            "trends": {name: trend(numbers, [row[name] for row in later], len(later)) for name in rows[0]}}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the run")
    parser.add_argument("--runtime", choices=["ray", "processes", "threads"], default="ray", help="runtime of workers")
    parser.add_argument("--workers", type=int, default=6, help="number of collection workers")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--sample-every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--step-ms", type=float, default=1.0, help="duration of a step of the environment in ms")
    parser.add_argument("--drive", choices=["learner", "scheme", "ray"], default="learner",
                        help="object whose step() is called (a scheme's episodes and metrics are then never taken), "
                             "or ray for actors of Ray without a scheme")
    parser.add_argument("--cycles", type=int, default=0, help="start and stop so often instead")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice of workers to kill")
    parser.add_argument("--is-driver", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.is_driver:
        drive(options)
        return
    result = cycles(options) if options.cycles else soak(options)
    print_result({
        "task": "cycles" if options.cycles else "soak", "runtime": options.runtime, "workers": options.workers,
        "drive": options.drive, **result})


if __name__ == "__main__":
    main()
