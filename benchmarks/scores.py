"""Measure reference scores: check whether PPO reaches the scores that are published for the same settings.

    python benchmarks/scores.py [--tasks CartPole-v1,Acrobot-v1,...] [--seeds 3] [--out FILE.json]

The script trains each task with settings from a published table (see `TASKS`), and prints one line of JSON per run:
steps, seconds, mean return of the last 100 training episodes, mean return of 20 evaluation episodes, and the learning
curve. `--out` also writes all runs to a file, from which `report.py` makes the table and figures of the documentation.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from results import origin

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, linear
from pytorchrl.envs import make_factory

TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "steps": 100_000, "envs": 8, "size": 32, "gae_lambda": 0.8, "published": "500 (RL-Zoo, evaluated)",
        "algo": {"num_epochs": 20, "num_mini_batch": 1, "gamma": 0.98, "lr": linear(1e-3, 0.0),
                 "clip_param": linear(0.2, 0.0), "entropy_coef": 0.0}},
    "Acrobot-v1": {
        "steps": 200_000, "envs": 16, "size": 256, "gae_lambda": 0.94, "published": "-73.5 +- 18 (RL-Zoo, 1M steps)",
        "algo": {"num_epochs": 4, "num_mini_batch": 64, "gamma": 0.99, "lr": 3e-4, "entropy_coef": 0.0}},
    "Pendulum-v1": {
        "steps": 100_000, "envs": 4, "size": 1024, "gae_lambda": 0.95, "published": "-172 +- 104 (RL-Zoo, with gSDE)",
        "algo": {"num_epochs": 10, "num_mini_batch": 64, "gamma": 0.9, "lr": 1e-3, "entropy_coef": 0.0}},
    "LunarLander-v3": {
        "steps": 1_000_000, "envs": 16, "size": 1024, "gae_lambda": 0.98, "published": "242 +- 32 (RL-Zoo, v2)",
        "algo": {"num_epochs": 4, "num_mini_batch": 256, "gamma": 0.999, "lr": 3e-4, "entropy_coef": 0.01}},
    "HalfCheetah-v5": {
        "steps": 1_000_000, "envs": 1, "size": 2048, "gae_lambda": 0.95,
        "published": "1443 +- 46 (CleanRL, v4, while training)",
        "actor": {"normalize_obs": True, "normalize_reward": True},
        "algo": {"num_epochs": 10, "num_mini_batch": 32, "gamma": 0.99, "lr": linear(3e-4, 0.0), "entropy_coef": 0.0,
                 "use_clipped_value_loss": True}},
}


def run(task: str, seed: int, points: int = 50) -> dict[str, Any]:
    """Train once, and return the results."""
    settings = TASKS[task]
    envs = make_factory(task, settings["envs"])
    scheme = Scheme(
        PPO.create_factory(compile=True, **settings["algo"]),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, **settings.get("actor", {})),
        GAEBuffer.create_factory(settings["size"], gae_lambda=settings["gae_lambda"]), envs, make_factory(task, 4),
        seed=seed)
    scheme.start(settings["steps"])
    start, curve, returns = time.perf_counter(), [], []
    while scheme.env_steps < settings["steps"]:
        scheme.step()
        returns += [episode.env_return for episode in scheme.episodes()]
        if returns and scheme.env_steps >= len(curve) * settings["steps"] / points:
            curve.append((scheme.env_steps, round(sum(returns[-100:]) / len(returns[-100:]), 2)))
    seconds = time.perf_counter() - start
    scheme.start_evaluation(20)
    evaluation = scheme.wait_evaluation(600.0)
    assert evaluation is not None
    steps = scheme.env_steps
    scheme.stop()
    return {"task": task, "seed": seed, "env_steps": steps, "seconds": round(seconds, 1),
            "train_return": curve[-1][1], "eval_return": round(evaluation.return_mean, 2),
            "eval_std": round(evaluation.return_std, 2), "published": settings["published"], "curve": curve}


def main() -> None:
    """Parse the command line, train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for task in options.tasks.split(","):
        for seed in range(1, options.seeds + 1):
            results.append({**origin(), **run(task, seed)})
            print(json.dumps(results[-1]), flush=True)
            if options.out:
                options.out.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")


if __name__ == "__main__":
    main()
