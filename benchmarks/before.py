"""Env steps a second of this tree beside another one of this project, in turn: what a change has cost.

    git worktree add ../before COMMIT
    python benchmarks/before.py ../before [--seconds 20] [--pairs 3] [--tasks cartpole,sleeping]

`cartpole`: PPO in process with compiled updates, 8 environments x 128 steps, 4 epochs x 4 minibatches of 256, MLP
64-64. `sleeping`: asynchronous collection on Ray with training, 8 workers with one environment each that sleeps 5 ms a
step.

Both trees have a process of their own with one thread; start-up and compilation are not counted. On CartPole the two
take turns twice a second, for a machine's speed changes from second to second; where workers go on by themselves one
runs after the other, and each pair in the other order than the last. Prints one JSON object; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
WORKERS = 8


def cartpole() -> Any:
    """The scheme of `throughput.py cartpole --schemes central`."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    return Scheme(
        PPO.create_factory(num_epochs=4, num_mini_batch=4, compile=True),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(128), envs,
        seed=1)


def sleeping() -> Any:
    """The scheme of `throughput.py sleeping --workers 8`."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import SleepEnv

    envs = VecEnv.create_factory(SleepEnv, {"step_s": 0.005})
    return Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(200), envs,
        num_col_workers=WORKERS, col_communication="asynchronous", broadcast_interval=WORKERS, seed=1)


# Task: its scheme, updates before the clock starts, updates of a whole turn of its workers, and seconds of a turn of
# the trees; None: one after the other.
TASKS: dict[str, Any] = {"cartpole": (cartpole, 40, 1, 0.5), "sleeping": (sleeping, 4 * WORKERS, WORKERS, None)}


def serve(task: str) -> None:
    """Tell which package this is, then for each line, a number of seconds, the env steps used for learning a second."""
    import pytorchrl

    make, warm_up, turn, _ = TASKS[task]
    scheme = make()
    while scheme.version < warm_up:
        scheme.step()
    print(pytorchrl.__file__, flush=True)
    for line in sys.stdin:
        first, version, start = scheme.ledger()["consumed_unique"], scheme.version, time.perf_counter()
        while time.perf_counter() - start < float(line) or (scheme.version - version) % turn:
            scheme.step()
        print((scheme.ledger()["consumed_unique"] - first) / (time.perf_counter() - start), flush=True)
    scheme.stop()


class Served:
    """`serve` with the package of a tree, in a process of its own."""

    def __init__(self, tree: Path, task: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(tree), "--serve", task], cwd=tree, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        package = self._read()
        if not Path(package).is_relative_to(tree):
            raise SystemExit(f"{package} is not of {tree}: another one of its name comes first on the path")

    def rate(self, seconds: float) -> float:
        """Env steps a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._read())

    def stop(self) -> None:
        """End it."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a measurement has ended with code {self._process.wait()}")
        return line


def in_turn(before: Path, task: str, seconds: float) -> Iterator[dict[Path, float]]:
    """Rates of both trees, turn by turn."""
    served = {tree: Served(tree, task) for tree in (before, HERE)}
    for turn in range(round(seconds / TASKS[task][3])):
        order = (before, HERE) if turn % 2 else (HERE, before)
        yield {tree: served[tree].rate(TASKS[task][3]) for tree in order}
    for one in served.values():
        one.stop()


def one_by_one(before: Path, task: str, seconds: float, pairs: int) -> Iterator[dict[Path, float]]:
    """Rates of both trees, pair by pair."""
    for pair in range(pairs):
        rates = {}
        for tree in (before, HERE) if pair % 2 else (HERE, before):
            served = Served(tree, task)
            rates[tree] = served.rate(seconds)
            served.stop()
        print(f"{task}: {rates[before]:.0f} steps/s before, {rates[HERE]:.0f} now", file=sys.stderr, flush=True)
        yield rates


def compare(before: Path, task: str, seconds: float, pairs: int) -> dict[str, Any]:
    """Ratios of this tree's rate to the other's; the mean of their logarithms, back again, with its standard error."""
    rates = list(one_by_one(before, task, seconds, pairs) if TASKS[task][3] is None else in_turn(before, task, seconds))
    logs = [math.log(rate[HERE] / rate[before]) for rate in rates]
    import scipy.stats  # here, so that the processes that are measured do not load it

    return {"ratio": math.exp(statistics.mean(logs)), "ratio_median": math.exp(statistics.median(logs)),
            "standard_error": float(scipy.stats.sem(logs)), "turns": len(logs),
            "before": statistics.median(rate[before] for rate in rates),
            "now": statistics.median(rate[HERE] for rate in rates)}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=lambda path: Path(path).resolve(), help="folder of the other tree")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each tree, in all, or of one of a pair")
    parser.add_argument("--pairs", type=int, default=3, help="where one runs after the other, from 2")
    parser.add_argument("--tasks", default="cartpole,sleeping", help="which, comma-separated")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    print(json.dumps({task: compare(options.before, task, options.seconds, options.pairs)
                      for task in options.tasks.split(",")}, indent=1))


if __name__ == "__main__":
    main()
