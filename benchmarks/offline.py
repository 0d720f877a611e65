"""Measure what algorithms learn from data sets: imitation of a demonstrator, and learning from good and bad episodes.

    python benchmarks/offline.py [--tasks cartpole pendulum mixed] [--algorithms bc iql td3_bc] [--seeds 1 2 3 4 5]
    python benchmarks/offline.py --table docs/benchmarks/offline.jsonl

The library makes the data itself, once per call: the demonstrator is PPO on CartPole-v1, and SAC on Pendulum-v1.

- cartpole, pendulum: 20 episodes of the demonstrator, from which behavior cloning learns.
- mixed: 50 episodes of the demonstrator, and 50 episodes of sampled actions of an untrained policy, of Pendulum-v1.

One line of JSON is printed per run: the mean return of the data set, of the demonstrator's episodes, and of 20 episodes
of the trained policy. `--table` prints a table of stored lines. A call with all defaults takes 5 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path

from results import origin

import pytorchrl as prl
from pytorchrl.play.dataset import read_dataset, record_dataset

UPDATES = {"bc": 4000, "iql": 8000, "td3_bc": 8000}
TASKS = {
    "cartpole": ("CartPole-v1", ("bc",)), "pendulum": ("Pendulum-v1", ("bc",)),
    "mixed": ("Pendulum-v1", ("bc", "iql", "td3_bc"))}
NUM_EPISODES, NUM_MIXED, NUM_TESTS = 20, 50, 20


def demonstrator_of(env: str, seed: int, smoke: bool) -> prl.TrainedAgent:
    """Train the agent whose episodes are imitated."""
    algorithm, steps = ("ppo", 50_000) if env == "CartPole-v1" else ("sac", 12_000)
    return prl.train(algorithm, env, target_steps=100 if smoke else steps, seed=seed, progress=False)


def record(task: str, folder: Path, seed: int, smoke: bool) -> float:
    """Write the data sets of a task to a directory, and return the mean return of the demonstrator's episodes."""
    env, expert = TASKS[task][0], demonstrator_of(TASKS[task][0], seed, smoke)
    number = 2 if smoke else NUM_MIXED if task == "mixed" else NUM_EPISODES
    data = record_dataset(expert, folder / "expert.npz", seed=seed, num_episodes=number)
    if task == "mixed":
        untrained = prl.train("sac", env, target_steps=0, seed=seed, progress=False)
        record_dataset(untrained, folder / "untrained.npz", num_episodes=number, deterministic=False, seed=seed)
    return float(data.returns.mean())


def run(task: str, name: str, folder: Path, seed: int, smoke: bool) -> dict[str, object]:
    """Train one agent from the data in a directory, and return its figures."""
    start = time.process_time()
    agent = prl.train(name, TASKS[task][0], dataset=folder, seed=seed, progress=False,
                      target_steps=20 if smoke else UPDATES[name])
    cpu_s = time.process_time() - start
    return {"task": task, "algorithm": name, "seed": seed, "updates": agent.summary["updates"],
            "data": float(read_dataset(folder).returns.mean()), "return": agent.evaluate(NUM_TESTS).return_mean,
            "cpu_s": cpu_s}


def table(lines: list[dict[str, object]]) -> str:
    """Return a table with a row for each task and algorithm."""
    rows = ["| task | algorithm | seeds | demonstrator | data set | return: mean (smallest to largest) |",
            "|---|---|---|---|---|---|"]
    groups: dict[tuple[object, object], list[dict[str, object]]] = {}
    for line in lines:
        groups.setdefault((line["task"], line["algorithm"]), []).append(line)
    for (task, name), runs in groups.items():
        found = [float(str(one["return"])) for one in runs]
        rows.append(f"| {task} | {name} | {len(runs)} | {runs[0]['demonstrator']:.0f} | {runs[0]['data']:.0f} | "
                    f"{statistics.fmean(found):.0f} ({min(found):.0f} to {max(found):.0f}) |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores of algorithms that learn from data sets.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--data-seed", type=int, default=1, help="seed of the demonstrator and of its episodes")
    parser.add_argument("--table", metavar="FILE", help="print a table of the lines in this file, and train nothing")
    parser.add_argument("--smoke", action="store_true", help="few steps, episodes and updates, as a test")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in Path(args.table).read_text(encoding="utf-8").splitlines()]))
        return
    for task in args.tasks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            demonstrator = record(task, folder, args.data_seed, args.smoke)
            for seed, algorithm in product(args.seeds, TASKS[task][1]):
                if algorithm in args.algorithms:
                    result = run(task, algorithm, folder, seed, args.smoke)
                    print(json.dumps({**origin(), "demonstrator": demonstrator, **result}), flush=True)


if __name__ == "__main__":
    main()
