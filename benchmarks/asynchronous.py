"""Compare asynchronous with synchronous collection by the command line of the quickstart: PPO on CartPole-v1.

    python benchmarks/asynchronous.py [--seeds 1 2 3 4 5] [--steps 40000] [--workers 2 4] [--runtimes threads processes]

Every run uses the defaults of `train`; only `col_communication` differs, and in the mode "checkpoints", asynchronous
runs also write a checkpoint every 2,000 env steps. The script prints one line of JSON per run: the mean return of 100
sampled episodes of the final policy, the mean return over the training curve (`area`), the policy lag in train batches,
env steps per second, and the share of the collected steps that were dropped. All runs together take about 15 minutes of
one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

from results import origin

from pytorchrl import train

# Updates that the preset of PPO for CartPole-v1 makes from each train batch: 10 epochs of 4 minibatches.
UPDATES = 40
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"col_communication": "synchronous"},
    "asynchronous": {"col_communication": "asynchronous"},
    "checkpoints": {"col_communication": "asynchronous", "checkpoint_every": 2000},
}


def area_of(records: list[dict[str, Any]]) -> float:
    """Return the mean of `return_mean` over the env steps of the records, by the trapezoidal rule."""
    points = [(record["env_steps"], record["return_mean"]) for record in records if record["return_mean"] is not None]
    area = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(points))
    return float(area / (points[-1][0] - points[0][0]))


def run(mode: str, runtime: str, workers: int, seed: int, steps: int) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir, start = Path(folder) / "run", time.process_time()
        agent = train("ppo", "CartPole-v1", num_col_workers=workers, runtime=runtime, target_steps=steps, seed=seed,
                      log_dir=log_dir, progress=False, **MODES[mode])
        seconds = time.process_time() - start
        lines = (log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    summary = agent.summary
    ledger, lag = summary["ledger"], summary["policy_lag"]
    return {
        "mode": mode, "runtime": runtime, "workers": workers, "seed": seed,
        "final": agent.evaluate(100, deterministic=False, seed=1).return_mean,
        "area": area_of(list(map(json.loads, lines))),
        "lag_batches": lag["mean"] / UPDATES, "lag_batches_max": lag["max"] / UPDATES,
        "env_steps": summary["env_steps"], "env_steps_per_s": summary["env_steps_per_s"],
        "updates": summary["updates"], "dropped_shutdown": ledger["dropped"]["shutdown"] / ledger["collected"],
        "cpu_s": seconds}


def main() -> None:
    """Train with each mode, runtime, number of workers and seed, and print the results."""
    parser = argparse.ArgumentParser(description="Compare asynchronous with synchronous collection.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runtimes", nargs="+", default=["threads", "processes"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["synchronous", "asynchronous"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for seed in args.seeds:
        for runtime in args.runtimes:
            for workers in args.workers:
                for mode in args.modes:
                    print(json.dumps({**origin(), **run(mode, runtime, workers, seed, args.steps)}), flush=True)


if __name__ == "__main__":
    main()
