"""Measure the microseconds per step of a vector of environments, for several implementations of the vector.

    python benchmarks/env_backends.py --envs CartPole-v1 --sizes 1 4

The implementations are a loop over single environments, Gymnasium's `SyncVectorEnv`, and `VecEnv` with
`backend="sync"`, `"vector"` (if there is a native vector environment) and `"auto"`. The implementations alternate in
short blocks of steps, so that other load on the machine affects all of them equally. The results are the times of the
fastest block and of the median block. The script prints one line of JSON for each environment and vector size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from results import print_result

from pytorchrl import VecEnv

ENVS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1")
SIZES = (1, 2, 4, 8, 16)
Block = Callable[[int], float]


def bare(name: str, size: int) -> Block:
    """Return a function that steps `size` single environments a given number of times and returns the seconds."""
    envs = [gym.make(name, disable_env_checker=True) for _ in range(size)]
    for index, env in enumerate(envs):
        env.reset(seed=index)
        env.action_space.seed(index)
    action = envs[0].action_space.sample()

    def block(num_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            for env in envs:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return time.perf_counter() - start
    return block


def gymnasium_block(name: str, size: int) -> Block:
    """Return a function that steps Gymnasium's `SyncVectorEnv` a given number of times and returns the seconds."""
    envs = SyncVectorEnv([lambda: gym.make(name)] * size, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    action = envs.action_space.sample()

    def block(num_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            envs.step(action)
        return time.perf_counter() - start
    return block


def ours(name: str, size: int, backend: str) -> Block:
    """Return a function that steps `VecEnv` a given number of times and returns the seconds.

    The time includes work that the other implementations do not do: `VecEnv` counts episodes and checks results.
    """
    env = VecEnv.create_factory(name, vec_env_size=size, backend=backend)(seed=0)
    env.reset()
    env.action_space.seed(0)
    action = np.stack([env.action_space.sample()] * size)

    def block(num_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            env.step(action)
        return time.perf_counter() - start
    return block


def measure(name: str, size: int, num_blocks: int, num_steps: int) -> dict[str, object]:
    """Return the microseconds per vector step of each implementation: the minimum and the median over blocks."""
    blocks = {"bare": bare(name, size), "gymnasium": gymnasium_block(name, size), "sync": ours(name, size, "sync")}
    if gym.spec(name).vector_entry_point is not None:
        blocks["vector"] = ours(name, size, "vector")
    blocks["auto"] = ours(name, size, "auto")
    seconds: dict[str, list[float]] = {kind: [] for kind in blocks}
    for _ in range(num_blocks):
        for kind, block in blocks.items():
            seconds[kind].append(block(num_steps))
    per_step = 1e6 / num_steps
    return {"env": name, "num_envs": size,
            "least_us": {kind: round(per_step * min(found), 2) for kind, found in seconds.items()},
            "median_us": {kind: round(per_step * statistics.median(found), 2) for kind, found in seconds.items()}}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=list(ENVS), metavar="ID")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="N",
                        help="numbers of environments")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of each implementation")
    parser.add_argument("--steps", type=int, default=500, help="vector steps per block")
    args = parser.parse_args()
    for name in args.envs:
        for size in args.sizes:
            print_result(measure(name, size, args.blocks, args.steps), indent=None)


if __name__ == "__main__":
    main()
