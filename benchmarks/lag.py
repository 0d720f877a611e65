"""Measure how the policy lag of asynchronous training affects the score, and draw the figure of the documentation.

    python benchmarks/lag.py [--seeds 3] [--steps 30000] [--out docs/benchmarks/lag.json]

APPO trains on CartPole-v1 with 8 updates per train batch, a queue of one batch and one request in flight. The runs
differ in `max_policy_lag`, with which collection waits for newer weights. The simulated runtime makes each run
repeatable. The script prints one line of JSON per run: mean policy lag in updates, and mean return of the last 100
training episodes. `--out` also writes all runs to a file, and an SVG file next to it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from results import origin

from pytorchrl import APPO, Learner, OnPolicyActor, Scheme, VecEnv, VTraceBuffer

LIMITS = (0, 2, 4, 6, None)


def run(limit: int | None, seed: int, steps: int) -> dict[str, Any]:
    """Train once, and return the lag and the score."""
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)
    waits = {} if limit is None else {"max_policy_lag": limit, "on_policy_lag": "wait"}
    scheme = Scheme.appo(
        APPO.create_factory(num_epochs=4, num_mini_batch=2, lr=1e-3), actor, VTraceBuffer.create_factory(size=64), envs,
        train_batch_size=1_024, queue_size=1, col_in_flight=1, runtime="simulated", seed=seed, **waits)
    with Learner(scheme, target_steps=steps, progress=False) as learner:
        learner.train()
        return {"max_policy_lag": limit, "seed": seed, "env_steps": learner.env_steps, "return": learner.return_mean,
                "lag": learner.get_metrics()["policy_lag"]["mean"]}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the score of each run over its mean policy lag, and the means of the runs with equal limits."""
    mpl.rcParams["svg.hashsalt"] = "lag"
    by_limit = defaultdict(list)
    for found in runs:
        by_limit[found["max_policy_lag"]].append(found)
    figure, axes = plt.subplots(figsize=(5, 3))
    for limit, group in by_limit.items():
        label = "no limit" if limit is None else f"max_policy_lag={limit}"
        lags, returns = ([found[name] for found in group] for name in ("lag", "return"))
        axes.plot(lags, returns, "o", label=label, markersize=4)
    means = [(fmean(found["lag"] for found in group), fmean(found["return"] for found in group))
             for group in by_limit.values()]
    axes.plot(*zip(*sorted(means), strict=True), color="gray", linewidth=1, zorder=0)
    axes.set(title="APPO on CartPole-v1", xlabel="mean policy lag, in updates", ylabel="return", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Train with each limit and seed, and write the results."""
    parser = argparse.ArgumentParser(description="Measure the effect of policy lag on scores.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--out", type=Path, default=None, help="file for the results")
    args = parser.parse_args()
    runs = []
    for limit in LIMITS:
        for seed in range(1, args.seeds + 1):
            runs.append({**origin(), **run(limit, seed, args.steps)})
            print(json.dumps(runs[-1]), flush=True)
    if args.out is not None:
        args.out.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n", encoding="utf-8")
        draw(runs, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
