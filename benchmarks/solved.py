"""Measure how long PPO trains on CartPole-v1 until the policy reaches a return of 500 in each of 100 episodes.

    python benchmarks/solved.py [--seeds 10]

CartPole-v1 ends an episode after 500 steps, so no policy has a larger mean return. Each run trains in this process,
with one thread and without compilation, for a fixed number of env steps, and ends with 100 evaluation episodes. The
settings are those of the preset, except for the options in `SETTINGS`. Before the first run, a short run that is not
measured loads everything that is loaded on first use.

For each seed, the script prints the seconds that training took, the seconds of processor time (which other programs
affect less), and the mean return of the 100 episodes. It prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from results import print_result

import pytorchrl
from pytorchrl import linear

SETTINGS = {"target_steps": 50_000, "num_epochs": 7, "lr": linear(2e-3, 0.0)}


def run(seed: int) -> dict[str, float]:
    """Train with one seed; return the seconds of training and the mean return of 100 evaluation episodes."""
    start, start_cpu = time.perf_counter(), time.process_time()
    agent = pytorchrl.train("ppo", "CartPole-v1", seed=seed, **SETTINGS)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "return": agent.evaluate(100).return_mean}


def main() -> None:
    """Train with all seeds, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="number of seeds, from 1 [%(default)s]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pytorchrl.train("ppo", "CartPole-v1", target_steps=1_000)
    results = {}
    for seed in range(1, args.seeds + 1):
        results[seed] = run(seed)
        print(f"seed {seed}: {results[seed]}", file=sys.stderr, flush=True)
    print_result({"settings": {name: str(value) for name, value in SETTINGS.items()}, "seeds": results})


if __name__ == "__main__":
    main()
