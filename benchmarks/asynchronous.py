"""Compare asynchronous with synchronous training by the command lines of the documentation, on CartPole-v1.

    python benchmarks/asynchronous.py [--algorithms ppo appo impala a3c dqn] [--seeds 1 2 3 4 5] [--steps 40000]
        [--workers 2 4] [--runtimes threads processes ray] [--modes synchronous equal asynchronous checkpoints]
    python benchmarks/asynchronous.py --table docs/benchmarks/asynchronous.jsonl

Every run uses the defaults of `train`. In the mode "synchronous", only `col_communication` differs from the mode
"asynchronous". A synchronous train batch then contains a rollout of each worker, so that fewer updates are made per env
step. The mode "equal" is synchronous with train batches of the same size, and therefore as many updates per env step:
the environments of one worker are divided among the workers. For A3C and DQN, a single worker collects and learns
instead. In the mode "checkpoints", asynchronous runs also write a checkpoint every 2,000 env steps. A3C learns slowly:
give it the 500,000 steps of its preset.

The script prints one line of JSON per run: the mean return of 100 sampled episodes of the final policy, the mean return
over the training curve (`area`), the lag in train batches (for A3C that of gradients, in updates), env steps per
second, and the share of the collected steps that were dropped. `--table` prints the means of stored lines. One run
takes 2 to 10 seconds of one core, and 40 seconds with DQN.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from results import origin

from pytorchrl import train

# Algorithm -> updates that its preset for CartPole-v1 makes from each train batch.
UPDATES = {"ppo": 40, "appo": 16, "impala": 1, "a3c": 1, "dqn": 1}
MODES = ("synchronous", "equal", "asynchronous", "checkpoints")
# Environments of a worker in the presets of PPO, APPO and IMPALA for CartPole-v1.
ENVS = 8


def options_of(algorithm: str, mode: str, workers: int) -> dict[str, Any]:
    """Return the options of a run, without those that all runs share."""
    checkpoints = {"checkpoint_every": 2000} if mode == "checkpoints" else {}
    if algorithm == "a3c":
        return {} if mode == "equal" else {"preset": "a3c", "num_grad_workers": workers, "updates_per_step": 10,
                                           **checkpoints}
    if algorithm == "dqn":
        return {} if mode == "equal" else {"num_col_workers": workers, "num_replay_workers": 2,
                                           "col_communication": "asynchronous", **checkpoints}
    if mode == "synchronous":
        return {"num_col_workers": workers}
    if mode == "equal":
        return {"num_col_workers": workers, "num_envs": ENVS // workers}
    how = {"col_communication": "asynchronous"} if algorithm == "ppo" else {"preset": algorithm}
    return {"num_col_workers": workers, **how, **checkpoints}


def area_of(records: list[dict[str, Any]]) -> float:
    """Return the mean of `return_mean` over the env steps of the records, by the trapezoidal rule."""
    points = [(record["env_steps"], record["return_mean"]) for record in records if record["return_mean"] is not None]
    area = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(points))
    return float(area / (points[-1][0] - points[0][0]))


def run(algorithm: str, mode: str, runtime: str, workers: int, seed: int, steps: int) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir, start = Path(folder) / "run", time.process_time()
        agent = train("a2c" if algorithm == "a3c" else algorithm, "CartPole-v1", runtime=runtime, target_steps=steps,
                      seed=seed, log_dir=log_dir, progress=False, **options_of(algorithm, mode, workers))
        seconds = time.process_time() - start
        lines = (log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = list(map(json.loads, lines))
    summary = agent.summary
    ledger, lag = summary["ledger"], summary["policy_lag"]
    if algorithm == "a3c":
        lag = records[-1]["scheme"].get("grad_lag", lag)
    return {
        "algorithm": algorithm, "mode": mode, "runtime": runtime, "workers": workers, "steps": steps, "seed": seed,
        "final": agent.evaluate(100, deterministic=False, seed=1).return_mean,
        "area": area_of(records),
        "lag_batches": lag["mean"] / UPDATES[algorithm], "lag_batches_max": lag["max"] / UPDATES[algorithm],
        "env_steps": summary["env_steps"], "env_steps_per_s": summary["env_steps_per_s"],
        "updates": summary["updates"], "uses": ledger["consumed"] / ledger["collected"],
        "dropped_shutdown": ledger["dropped"]["shutdown"] / ledger["collected"], "cpu_s": seconds}


def table(lines: Iterable[str]) -> str:
    """Return a table with a row for the runs that differ only in their seeds."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in map(json.loads, lines):
        key = ("algorithm", "steps", "runtime", "workers", "mode", "before")
        rows.setdefault(tuple(record.get(name, False) for name in key), []).append(record)
    text = ["| algorithm, env steps, runtime, workers | collection | seeds | final (smallest to largest) | area | "
            "mean lag | env steps per second | env steps per update | dropped |", "|" + "---|" * 9]
    for (algorithm, steps, runtime, workers, mode, before), runs in sorted(rows.items(), key=lambda row: row[0]):
        def mean(name: str, of: list[dict[str, Any]] = runs) -> float:
            return statistics.fmean(record[name] for record in of)
        finals = [record["final"] for record in runs]
        name = "one worker" if mode == "equal" and algorithm in ("a3c", "dqn") else mode
        text.append(
            f"| {algorithm.upper()}, {steps:,}, {runtime}, {workers} | {name}{', before' if before else ''} | "
            f"{len(runs)} | {mean('final'):.0f} ({min(finals):.0f} to {max(finals):.0f}) | {mean('area'):.0f} | "
            f"{'' if algorithm == 'dqn' else format(mean('lag_batches'), '.2f')} | {mean('env_steps_per_s'):,.0f} | "
            f"{mean('env_steps') / mean('updates'):.0f} | {mean('dropped_shutdown'):.1%} |")
    return "\n".join([*text, ""])


def main() -> None:
    """Train with each algorithm, mode, runtime, number of workers and seed, and print the results."""
    parser = argparse.ArgumentParser(description="Compare asynchronous with synchronous training.")
    parser.add_argument("--algorithms", nargs="+", choices=UPDATES, default=["ppo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runtimes", nargs="+", default=["threads", "processes"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["synchronous", "equal", "asynchronous"])
    parser.add_argument("--before", action="store_true", help="mark the runs as those of an earlier version")
    parser.add_argument("--table", type=Path, help="train nothing, and print a table of the results in this file")
    args = parser.parse_args()
    if args.table is not None:
        print(table(args.table.read_text(encoding="utf-8").splitlines()), end="")
        return
    warnings.simplefilter("ignore")
    for case in product(args.seeds, args.algorithms, args.runtimes, args.workers, args.modes):
        seed, algorithm, runtime, workers, mode = case
        if algorithm in ("a3c", "dqn") and (mode == "synchronous" or (mode == "equal" and workers != args.workers[0])):
            continue
        result = run(algorithm, mode, runtime, workers, seed, args.steps)
        print(json.dumps({**origin(), **({"before": True} if args.before else {}), **result}), flush=True)


if __name__ == "__main__":
    main()
