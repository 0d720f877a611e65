"""Measure how many transitions a replay shard serves and inserts per second, with stacked images and priorities.

    python benchmarks/replay_shard.py [--seconds 10] [--size 100000] [--batch 512] [--insert-per-served 1.25]

The script repeatedly samples a batch of 512 transitions, updates their priorities, and inserts rollouts with
observations of 84 x 84 x 4 uint8; it inserts 1.25 transitions per sampled transition. The script compares the memory of
the shard with the memory of one 84 x 84 image per transition, and reads the resident memory of the process every
second. "dropped" counts inserted transitions that are neither stored nor evicted.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from results import print_result

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages import PERBuffer

PICTURE, NUM_FRAMES, EPISODE = 84, 4, 800


def make_rollouts(num_envs: int, num_steps: int, count: int, rng: np.random.Generator) -> list[RolloutData]:
    """Return consecutive rollouts whose episodes end every `EPISODE` steps.

    An environment is reset in the step that ends its episode. After a reset, its stack has one new image, and the other
    images are black.
    """
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


class Shard:
    """A storage, and a fixed sequence of rollouts that is repeatedly inserted into it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rng = np.random.default_rng(0)
        self.batch_size, self.per_served = arguments.batch, arguments.insert_per_served
        self.rollouts = make_rollouts(arguments.num_envs, arguments.num_steps, 16, self.rng)
        self.storage = PERBuffer.create_factory(
            arguments.size, n_step=arguments.n_step, rollout_size=arguments.num_steps)(
            actor=SimpleNamespace(initial_states=lambda num_envs: {}), algorithm=SimpleNamespace(gamma=0.99),
            num_envs=arguments.num_envs, seed=0)
        self.inserted, self.owed = 0, 0.0
        self.seconds = dict.fromkeys(("insert", "sample", "priorities"), 0.0)

    def insert(self) -> int:
        rollout = self.rollouts[self.inserted % len(self.rollouts)]
        self.storage.insert_data_slice([rollout], sources=["collector"])
        self.inserted += 1
        return rollout.num_steps * rollout.num_envs

    def turn(self) -> int:
        """Sample a batch, update its priorities, insert the due rollouts; return the number of inserted transitions."""
        begin = time.perf_counter()
        batch = self.storage.sample(self.batch_size)
        sampled = time.perf_counter()
        self.storage.after_gradients(batch, {"errors": self.rng.standard_normal(self.batch_size)})
        updated, taken = time.perf_counter(), 0
        self.owed += self.batch_size * self.per_served
        while self.owed > taken:
            taken += self.insert()
        self.owed -= taken
        for part, seconds in (("sample", sampled - begin), ("priorities", updated - sampled),
                              ("insert", time.perf_counter() - updated)):
            self.seconds[part] += seconds
        return taken


def serve(shard: Shard, seconds: float) -> dict[str, Any]:
    """Repeat `turn` for `seconds` seconds; return the rates in each second."""
    served_rates, inserted_rates, resident, total, own = [], [], [resident_mb()], 0, time.process_time()
    window = time.perf_counter()
    end, served, taken = window + seconds, 0, 0
    while window < end:
        taken += shard.turn()
        served += shard.batch_size
        now = time.perf_counter()
        if now - window > 1.0:
            served_rates.append(served / (now - window))
            inserted_rates.append(taken / (now - window))
            resident.append(resident_mb())
            total, window, served, taken = total + served, now, 0, 0
    rate = total / (time.process_time() - own)
    return {
        "served_per_s": spread(served_rates), "inserted_per_s": spread(inserted_rates),
        "served_per_s_of_its_own_cpu_time": round(rate),
        "inserted_per_s_of_its_own_cpu_time": round(rate * shard.per_served),
        "resident_mb": {"first": resident[0], "last": resident[-1], "largest": max(resident)},
        "seconds_by_part": {name: round(part, 3) for name, part in shard.seconds.items()}}


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    return round(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6, 1)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shard = Shard(arguments)
    before, start, filled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), 0
    while filled < 1.2 * arguments.size:
        filled += shard.insert()
    filled_rate = filled / (time.perf_counter() - start)
    print(f"filled at {filled_rate:.0f} transitions/s", file=sys.stderr)
    rates = serve(shard, arguments.seconds)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    pictures, storage = arguments.size * PICTURE * PICTURE, shard.storage
    counters = storage.counters
    return {
        **rates, "dropped": counters["inserted"] - counters["resident"] - counters["evicted"],
        "stale_priorities": counters["stale_priorities"], "filled_per_s": round(filled_rate),
        "bytes": storage.num_bytes,
        "bytes_over_single_pictures": round(storage.num_bytes / pictures, 4),
        "peak_memory_growth_over_single_pictures": round(growth / pictures, 4), "drawable": storage.num_items}


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
    print_result({**measure(arguments), "options": vars(arguments), "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
