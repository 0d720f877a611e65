"""What one process of replay can serve and take in at the same time: stacked pictures, priorities, their updates.

    python benchmarks/replay_shard.py [--seconds 10] [--size 100000] [--batch 512] [--insert-per-served 1.25]

Rollouts of 84 x 84 x 4 uint8 observations go in, batches of 512 come out and their priorities go back, in turns, so that of
each transition served 1.25 are inserted. Memory is compared with that of single pictures, 84 x 84 bytes a transition.

Progress on stderr; prints one JSON object; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages import PERBuffer

PICTURE, NUM_FRAMES, EPISODE = 84, 4, 800


def make_rollouts(num_envs: int, num_steps: int, count: int, rng: np.random.Generator) -> list[RolloutData]:
    """Rollouts that follow each other, with an episode's end in every `EPISODE`-th step (SAME_STEP, black padding)."""
    stacks = np.zeros((num_envs, NUM_FRAMES, PICTURE, PICTURE), np.uint8)
    random = lambda *shape: rng.integers(0, 256, (*shape, PICTURE, PICTURE), dtype=np.uint8)  # noqa: E731
    stacks[:, -1] = random(num_envs)
    rollouts, ages = [], rng.integers(0, EPISODE, num_envs)
    for _ in range(count):
        obs = np.empty((num_steps + 1, *stacks.shape), np.uint8)
        obs[0] = stacks
        done, finals, final_obs = np.zeros((num_steps + 1, num_envs), bool), [], []
        for t in range(num_steps):
            stacks = np.concatenate([stacks[:, 1:], random(num_envs, 1)], 1)
            ages += 1
            for e in np.flatnonzero(ages == EPISODE):
                finals.append((t, e))
                final_obs.append(stacks[e])
                stacks[e, :-1], ages[e], done[t + 1, e] = 0, 0, True
            obs[t + 1] = stacks
        truncated = np.zeros((num_steps, num_envs), bool)
        index = np.array(finals, np.int64).reshape(-1, 2)
        truncated[tuple(index.T)] = True
        final = np.array(final_obs, np.uint8).reshape(-1, *stacks.shape[1:])
        no = np.zeros_like(truncated)
        rollouts.append(RolloutData(
            obs={"obs": obs}, done=done, rhs={}, mask=None, action=rng.integers(0, 6, no.shape),
            reward=rng.standard_normal(no.shape).astype(np.float32), terminated=no, truncated=truncated, valid=~no,
            final_index=index, final_obs={"obs": final}).map(torch.from_numpy))
    return rollouts


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    num_envs, num_steps = arguments.num_envs, arguments.num_steps
    # Taken in in a circle: the first does not go on where the last ended, so its environments start anew each time.
    rollouts = make_rollouts(num_envs, num_steps, 16, rng)
    storage = PERBuffer.create_factory(arguments.size, n_step=arguments.n_step, rollout_size=num_steps)(
        actor=SimpleNamespace(initial_states=lambda num_envs: {}), algorithm=SimpleNamespace(gamma=0.99),
        num_envs=num_envs, seed=0)
    before, inserted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0

    def insert() -> int:
        nonlocal inserted
        storage.insert_data_slice([rollouts[inserted % len(rollouts)]], sources=["collector"])
        inserted += 1
        return num_envs * num_steps

    start = time.perf_counter()
    filled = 0
    while filled < 1.2 * arguments.size:
        filled += insert()
    fill_rate = filled / (time.perf_counter() - start)
    print(f"filled at {fill_rate:.0f} transitions/s", file=sys.stderr)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    serve_rates, insert_rates, parts = [], [], dict.fromkeys(("insert", "sample", "priorities"), 0.0)
    window, own_start, total_served = time.perf_counter(), time.process_time(), 0
    end, served, taken, owed = window + arguments.seconds, 0, 0, 0.0
    while True:
        begin = time.perf_counter()
        batch = storage.sample(arguments.batch)
        sampled = time.perf_counter()
        storage.after_gradients(batch, {"errors": rng.standard_normal(arguments.batch)})
        updated = time.perf_counter()
        served += arguments.batch
        total_served += arguments.batch
        owed += arguments.batch * arguments.insert_per_served
        while owed > 0:
            count = insert()
            owed, taken = owed - count, taken + count
        now = time.perf_counter()
        for part, seconds in (("sample", sampled - begin), ("priorities", updated - sampled), ("insert", now - updated)):
            parts[part] += seconds
        if now - window > 1.0:
            serve_rates.append(served / (now - window))
            insert_rates.append(taken / (now - window))
            window, served, taken = now, 0, 0
            if now > end:
                break
    own = total_served / (time.process_time() - own_start)
    pictures = arguments.size * PICTURE * PICTURE
    return {
        "served_per_s": spread(serve_rates), "inserted_per_s": spread(insert_rates), "filled_per_s": round(fill_rate),
        "served_per_s_of_its_own_cpu_time": round(own),
        "inserted_per_s_of_its_own_cpu_time": round(own * arguments.insert_per_served),
        "seconds_by_part": {name: round(seconds, 3) for name, seconds in parts.items()},
        "bytes": storage.num_bytes, "bytes_over_single_pictures": round(storage.num_bytes / pictures, 4),
        "peak_memory_growth_over_single_pictures": round(memory / pictures, 4), "drawable": storage.num_items}


def spread(rates: list[float]) -> dict[str, int]:
    low, median, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
    return {"low": round(low), "median": round(median), "high": round(high), "count": len(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--n-step", type=int, default=3)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--insert-per-served", type=float, default=1.25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False,
                            cwd=Path(__file__).parent).stdout.strip()
    print(json.dumps({
        **measure(arguments), "options": vars(arguments), "commit": commit, "machine": platform.processor() or
        platform.machine(), "cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__,
        "numpy": np.__version__}, indent=2))


if __name__ == "__main__":
    main()
