"""Measure the cost of failures on Ray: seconds to detection and to replacement, and env steps lost or used twice.

    python benchmarks/failures.py [--count 20] [--rows "collection worker killed,..."] [--markdown]
    python benchmarks/failures.py --learn

Each row is one kind of failure, which is injected `--count` times while PPO trains asynchronously. Processes are killed
(SIGKILL) or stopped (SIGSTOP) from outside; environments, gradients and evaluations fail inside their processes.
Environments count their steps in files. The learner also has a file, to which it writes the identity of each received
step. A comparison of these files shows how many steps were lost or used twice.

`--learn` trains PPO on CartPole-v1, with two gradient workers that have two collection workers each, until an
evaluation reaches 475. In a first run, there are no failures. In a second run, each collection worker and one gradient
worker are killed, and environments raise errors with probability 0.001.

The script shows its progress on stderr, prints one JSON object (or a Markdown table), and asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from results import print_result

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv, RaisingEnv
from pytorchrl.errors import PyTorchRLError
from pytorchrl.scheme.base.worker import Worker

WORKER_TIMEOUT_S = 5.0
NUM_ENVS, NUM_STEPS = 4, 32
FREE = {"num_cpus": 0}
KILLS = ("kill col.1.1 @ step 500; kill col.2.1 @ step 1000; kill col.1.2 @ step 1500; kill col.2.2 @ step 2000; "
         "kill grad.1 @ grad 2000")
"""Faults that kill each collection worker once, and then a gradient worker together with its collection workers."""
COLLECTION: dict[str, Any] = {"num_col_workers": 4, "col_communication": ASYNC, "col_worker_resources": FREE}
GRADIENTS: dict[str, Any] = {"num_col_workers": 2, "col_communication": ASYNC, "col_worker_resources": FREE,
                             "num_grad_workers": 2, "grad_communication": ASYNC, "grad_worker_resources": FREE}


class Noticed(logging.Handler):
    """Log handler that records the time of each report of a lost worker."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []
        logging.getLogger("pytorchrl.scheme.supervision.supervisor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.at.append(time.time())


class FiledEnv(CountingEnv):
    """Environment that appends one byte to its own file at each step, so that steps can be counted."""

    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(**options)
        self._path = os.path.join(directory, f"made-{os.getpid()}-{id(self)}")
        self._out: Any = None

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        result = super().step(action)
        if self._out is None:
            self._out = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed with the environment
        self._out.write(b".")
        return result

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None


class LateEnv(FiledEnv):
    """Environment that raises an error after `at` steps; the message of the error contains the current time."""

    def __init__(self, directory: str, at: int) -> None:
        super().__init__(directory)
        self._at = at

    def step(self, action: Any) -> Any:
        if self._num_steps >= self._at:
            raise RuntimeError(f"at={time.time()}")
        return super().step(action)


class FiledBuffer(GAEBuffer):
    """Storage that writes to a file the identity of each step that the learner receives."""

    directory = ""

    def insert_data_slice(self, rollouts: Any) -> None:
        with open(os.path.join(self.directory, f"learned-{os.getpid()}-{id(self)}"), "ab") as out:
            for rollout in rollouts:
                obs = np.asarray(rollout.obs["obs"])[:rollout.num_steps][np.asarray(rollout.valid)]
                out.write(obs[:, :3].astype(np.int64).tobytes())
        super().insert_data_slice(rollouts)


def counts(directory: str) -> dict[str, int]:
    """Return the number of env steps, and how many times a learner received a step that it had already received."""
    made = sum(path.stat().st_size for path in Path(directory).glob("made-*"))
    learned: Counter[tuple[int, ...]] = Counter()
    for path in Path(directory).glob("learned-*"):
        learned.update(map(tuple, np.fromfile(path, np.int64).reshape(-1, 3).tolist()))
    return {"made": made, "twice": sum(count - 1 for count in learned.values())}


def is_exact(ledger: Mapping[str, Any]) -> bool:
    """Return whether each collected step was either used or counted as dropped."""
    return bool(ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values()))


def counting_scheme(directory: str, envs: VecEnv.Options | Any = None, **settings: Any) -> Scheme:
    """Return a scheme whose steps are counted in files."""
    envs = envs or VecEnv.create_factory(FiledEnv, {"directory": directory}, NUM_ENVS)
    FiledBuffer.directory = directory
    storage = type("CountedBuffer", (FiledBuffer,), {"directory": directory})
    for path in Path(directory).glob("made-*"):  # delete the files of the environment that was built to read its spaces
        path.unlink()
    return Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=2, lr=1e-3),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,)),
        storage.create_factory(NUM_STEPS), envs, envs, seed=1, worker_timeout_s=WORKER_TIMEOUT_S,
        queue_timeout_s=120.0, **settings)


def pid_of(handle: Any) -> int:
    """Return the process id of a remote worker."""
    import ray

    # Calls in the concurrency group "control" are answered even while the worker is busy.
    ask = handle.native.__ray_call__.options(concurrency_group="control")
    return int(ray.get(ask.remote(lambda _self: os.getpid()), timeout=60))


def settle(scheme: Scheme, updates: int = 30) -> None:
    """Make `updates` updates."""
    for _ in range(updates):
        scheme.step()


def hit(scheme: Scheme, level: Any, index: int, number: int, noticed: Noticed) -> dict[str, float]:
    """Send a signal to a worker; return the seconds to detection and to the first answer of its replacement."""
    handle, before = level.remote_workers[index], len(noticed.at)
    pid = pid_of(handle)
    # A worker counts as hung if it misses its deadline, which depends on the longest rollout so far.
    deadline_s = level.collector.supervisor.deadline_s(index) if number == signal.SIGSTOP else 0.0
    start = time.time()
    os.kill(pid, number)
    while level.remote_workers[index] is handle:
        scheme.step()
    ready = level.remote_workers[index].submit(Worker.ready)
    while not scheme.update_worker._runtime.wait([ready], 0.0):
        scheme.step()
    return {"noticed_s": noticed.at[before] - start - deadline_s, "back_s": time.time() - start - deadline_s}


def workers_lost(settings: dict[str, Any], number: int, count: int, directory: str) -> dict[str, Any]:
    """Return the table row for a signal that is sent to the workers of the top remote level, one at a time."""
    noticed = Noticed()
    rows: list[dict[str, float]] = []
    lost, twice, balances = 0, 0, True
    # Each run sends only one signal to each worker, because the delay before its replacement doubles with each loss.
    while len(rows) < count:
        with tempfile.TemporaryDirectory(dir=directory) as run:
            scheme = counting_scheme(run, **settings)
            worker = scheme.start()
            level: Any = worker if "num_grad_workers" in settings else worker.local_worker
            places = len(level.remote_workers)
            for index in range(min(count - len(rows), places)):
                settle(scheme)
                rows.append(hit(scheme, level, index, number, noticed))
                print(f"  {len(rows)}: {rows[-1]}", file=sys.stderr, flush=True)
            ledger = scheme.stop()
            balances &= is_exact(ledger)
            seen = counts(run)
            lost += seen["made"] - ledger["collected"] + ledger["dropped"]["worker_lost"]
            twice += seen["twice"]
    return {"rows": rows, "lost": lost / count, "twice": twice, "ledger_exact": balances}


def environment_raises(count: int, directory: str) -> dict[str, Any]:
    """Return the table row for an environment that sometimes raises an error and is then restarted."""
    envs = VecEnv.create_factory(
        FiledEnv, {"directory": directory}, NUM_ENVS, wrappers=(functools.partial(RaisingEnv, probability=0.001),),
        on_env_error="restart", max_env_restarts=1000)
    scheme = counting_scheme(directory, envs, **COLLECTION)
    while scheme.metrics().get("envs_restarted", 0) < count:
        scheme.step()
    restarts = scheme.metrics()["envs_restarted"]
    ledger = scheme.stop()
    seen = counts(directory)
    return {"rows": [], "injected": restarts, "lost": (seen["made"] - ledger["collected"]) / restarts,
            "twice": seen["twice"],
            "ledger_exact": is_exact(ledger)}


def error_arrives(count: int, directory: str) -> dict[str, Any]:
    """Return the table row for an error that ends training.

    The row contains the seconds until a call raises the error, and the seconds that `stop()` takes.
    """
    rows, balances = [], True
    for number in range(count):
        with tempfile.TemporaryDirectory(dir=directory) as run:
            envs = VecEnv.create_factory(LateEnv, {"directory": run, "at": 100 + 20 * number}, NUM_ENVS,
                                         on_env_error="raise")
            scheme = counting_scheme(run, envs, **COLLECTION)
            try:
                settle(scheme, 10**6)
            except PyTorchRLError as error:
                rows.append({"noticed_s": time.time() - float(str(error).split("at=")[1].split()[0].strip(";,)'"))})
            start = time.time()
            ledger = scheme.stop()
            rows[-1]["stop_s"] = time.time() - start
            balances &= is_exact(ledger)
            print(f"  {len(rows)}: {rows[-1]}", file=sys.stderr, flush=True)
    return {"rows": rows, "ledger_exact": balances}


def nan_gradients(count: int, directory: str) -> dict[str, Any]:
    """Return the table row for gradients that are sometimes NaN, including the number of skipped updates."""
    scheme = counting_scheme(directory, faults="nan grad.* p=0.1", **GRADIENTS)
    while scheme.metrics()["updates_skipped_nan"] < count:
        scheme.step()
    finite = all(bool(value.isfinite().all()) for value in scheme.acting_state().values())
    skipped = scheme.metrics()["updates_skipped_nan"]
    ledger = scheme.stop()
    return {"rows": [], "injected": skipped, "lost": ledger["dropped"]["nan"] / skipped, "parameters_finite": finite,
            "twice": counts(directory)["twice"],
            "ledger_exact": is_exact(ledger)}


def evaluator_killed(count: int, directory: str) -> dict[str, Any]:
    """Return the table row for a killed evaluator; training continues, and a new evaluator repeats the evaluation."""
    scheme = counting_scheme(directory, **COLLECTION)
    scheme.start()
    rows = []
    for _ in range(count):
        scheme.start_evaluation(20)
        settle(scheme, 5)
        evaluator: Any = scheme._evaluator
        pid, start = pid_of(evaluator), time.time()
        os.kill(pid, signal.SIGKILL)
        evaluation = None
        while evaluation is None:
            scheme.step()
            evaluation = scheme.poll_evaluation()
        rows.append({"back_s": time.time() - start})
        print(f"  {len(rows)}: {rows[-1]}", file=sys.stderr, flush=True)
    ledger = scheme.stop()
    return {"rows": rows, "twice": counts(directory)["twice"],
            "ledger_exact": is_exact(ledger)}


def stopping(count: int, directory: str) -> dict[str, Any]:
    """Return the table row for `stop()`, called after a different number of updates in each run."""
    rows, balances = [], True
    for number in range(count):
        with tempfile.TemporaryDirectory(dir=directory) as run:
            scheme = counting_scheme(run, **(GRADIENTS if number % 2 else COLLECTION))
            settle(scheme, 1 + number)
            start = time.time()
            ledger = scheme.stop()
            rows.append({"stop_s": time.time() - start})
            balances &= is_exact(ledger)
            print(f"  {len(rows)}: {rows[-1]}", file=sys.stderr, flush=True)
    return {"rows": rows, "ledger_exact": balances}


ROWS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "collection worker killed": functools.partial(workers_lost, COLLECTION, signal.SIGKILL),
    "collection worker hangs (from its deadline)": functools.partial(workers_lost, COLLECTION, signal.SIGSTOP),
    "gradient worker with 2 collection workers killed": functools.partial(workers_lost, GRADIENTS, signal.SIGKILL),
    "environment raises once": environment_raises,
    "environment raises permanently": error_arrives,
    "gradient is NaN": nan_gradients,
    "evaluator killed": evaluator_killed,
    "stop()": stopping,
}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the median, the 95th percentile and the maximum of each time, and the counts."""
    rows = result.pop("rows")
    injected = result.pop("injected", len(rows))
    times = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = sorted(row[key] for row in rows if key in row)
        times[key] = {"p50": statistics.median(values), "p95": values[math.ceil(0.95 * len(values)) - 1],
                      "max": values[-1]}
    return {"injected": injected, **times, **result}


def markdown(table: dict[str, Any]) -> str:
    """Return the Markdown table for the documentation."""
    def seconds(row: dict[str, Any], key: str) -> str:
        return "" if key not in row else f"{row[key]['p50']:.2f} / {row[key]['p95']:.2f}"

    lines = ["| failure | injected | detected after, s | replaced after, s | stop(), s | env steps lost per failure | "
             "used twice | ledger |",
             "|---|---|---|---|---|---|---|---|"]
    for name, row in table.items():
        lost = "" if "lost" not in row else f"{row['lost']:.0f}"
        lines.append(f"| {name} | {row['injected']} | {seconds(row, 'noticed_s')} | {seconds(row, 'back_s')} | "
                     f"{seconds(row, 'stop_s')} | {lost} | {row.get('twice', '')} | "
                     f"{'exact' if row['ledger_exact'] else 'NOT exact'} |")
    return "\n".join(lines)


def matrix(names: list[str], count: int) -> dict[str, Any]:
    """Return all rows, measured on one Ray cluster."""
    table = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            print(name, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=directory) as own:
                table[name] = summary(ROWS[name](count, own))
                print(json.dumps(table[name]), file=sys.stderr, flush=True)
    return table


def learn() -> dict[str, Any]:
    """Train on CartPole, first without failures, and then while workers are killed and environments raise errors."""
    plain = VecEnv.create_factory("CartPole-v1", vec_env_size=4, backend="sync")
    raising = VecEnv.create_factory(
        "CartPole-v1", vec_env_size=4, backend="sync", wrappers=(functools.partial(RaisingEnv, probability=0.001),),
        on_env_error="restart", max_env_restarts=1000)
    result: dict[str, Any] = {}
    for name, envs, faults in (
            ("without failures", plain, None), ("with failures", raising, KILLS)):
        scheme = Scheme(
            PPO.create_factory(num_epochs=4, num_mini_batch=4, lr=1e-3, entropy_coef=0.0),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(64), envs,
            plain,
            num_col_workers=2, col_communication=ASYNC, num_grad_workers=2, seed=1, col_worker_resources=FREE,
            grad_worker_resources=FREE, faults=faults)
        start, best, steps = time.perf_counter(), 0.0, 0
        while steps < 1_500_000 and (best < 475 or (faults is not None and scheme.metrics()["workers_restarted"] < 5)):
            scheme.step()
            if scheme.version % 200 == 0:
                scheme.start_evaluation(20)
                best = max(best, scheme.wait_evaluation(120.0).return_mean)  # type: ignore[union-attr]
                steps = scheme.env_steps
                print(f"  {name}: {steps} steps, {best:.0f}, {scheme.metrics()['workers_restarted']} restarted",
                      file=sys.stderr, flush=True)
        metrics, seconds = scheme.metrics(), time.perf_counter() - start
        ledger = scheme.stop()
        result[name] = {
            "return": best, "env_steps": steps, "seconds": seconds, "env_steps_per_s": steps / seconds,
            "workers_restarted": metrics["workers_restarted"], "envs_restarted": metrics["envs_restarted"],
            "ledger_exact": is_exact(ledger)}
    return result


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="injections of each kind")
    parser.add_argument("--rows", default=",".join(ROWS), help="kinds of failures, separated by commas")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    parser.add_argument("--learn", action="store_true", help="train while workers are killed")
    options = parser.parse_args()
    import ray  # one Ray cluster for all schemes

    # Ray prints messages about lost workers at any log level.
    with contextlib.redirect_stdout(sys.stderr):
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
        result = learn() if options.learn else matrix(options.rows.split(","), options.count)
        ray.shutdown()
    if options.markdown:
        print(markdown(result))
    else:
        print_result(result)


if __name__ == "__main__":
    main()
