"""Measure PPO on CartPole over the number of environments, with arrays of NumPy and with tensors: speed and memory.

    python benchmarks/many_envs.py [--envs 8 64 1024 4096] [--kinds numpy tensors compiled adapted] [--seconds 5]

| kind | environments |
|---|---|
| `numpy` | Gymnasium's vector of CartPole, which returns arrays |
| `tensors` | the CartPole of this library in torch, whose tensors are read where they are |
| `compiled` | the same, with a compiled step |
| `adapted` | as `tensors`, in a wrapper that copies results to arrays and actions to tensors, as users had to do |

Each measurement runs in its own process on one core, and does not include start-up, compilation and the first updates.
`env_steps_per_s` counts seconds of the processor. `share` is the rate relative to that of the matrix products alone:
those of the updates and of the actions, for a policy and a value network with two layers of 64 units. `rollout_mb` is
the size of a rollout's tensors, and `grown_mb` is the memory that the run needs beyond a run with the fewest
environments, both in MB of 10^6 bytes. Memory is measured in a process of its own, in which the C library returns all
blocks above 64 KiB to the system at once, because otherwise the figure would vary by 40 MB between equal runs. The
script prints one line of JSON per measurement, and asserts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from results import origin

os.environ.setdefault("OMP_NUM_THREADS", "1")
KINDS = ("numpy", "tensors", "compiled", "adapted")
STEPS = {8: 128}
"""Steps of a rollout for a number of environments; 32 for others. There are 4 epochs of 4 minibatches."""
_UPDATES, _EPOCHS, _LAYERS = 16, 4, (4, 64, 64)
_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def environments(kind: str) -> Any:
    """Return the id or the function of a kind's environments."""
    from pytorchrl.envs.tensors.classic import TorchCartPole

    def adapted(num_envs: int) -> Any:
        import gymnasium as gym
        import torch

        class Adapter(gym.vector.VectorWrapper):
            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                obs, info = self.env.reset(seed=seed, options=options)
                return obs.numpy().copy(), info

            def step(self, actions: Any) -> Any:
                obs, reward, terminated, truncated, info = self.env.step(torch.tensor(actions))
                final = {"final_obs": info["final_obs"].numpy().copy()}
                return (obs.numpy().copy(), reward.numpy().copy(), terminated.numpy().copy(), truncated.numpy().copy(),
                        final)
        return Adapter(TorchCartPole(num_envs, max_episode_steps=500))
    return {"numpy": "CartPole-v1", "adapted": adapted}.get(kind, "pytorchrl/TorchCartPole-v1")


def start(kind: str, num_envs: int) -> Any:
    """Return a scheme that has made its first updates."""
    import torch

    from pytorchrl import Scheme
    from pytorchrl.training.composition import compose

    torch.set_num_threads(1)
    agent, settings, _ = compose("ppo", environments(kind), {
        "env_kwargs": {"compiled": True} if kind == "compiled" else {},
        "num_envs": num_envs, "num_steps": STEPS.get(num_envs, 32), "num_epochs": _EPOCHS, "num_mini_batch": 4,
        "compile": True, "target_steps": 10**9, "seed": 1, "normalize_obs": False, "normalize_reward": False})
    parts = agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory
    scheme = Scheme(*parts, **settings)
    while scheme.version < 3 * _UPDATES:
        scheme.step()
    return scheme


def speed(kind: str, num_envs: int, seconds: float) -> dict[str, Any]:
    """Train for some seconds after the first updates; return the rate and its share of the products' rate."""
    scheme = start(kind, num_envs)
    begin, before = time.process_time(), scheme.ledger()["collected"]
    while time.process_time() - begin < seconds:
        for _ in range(_UPDATES):  # whole rollouts, because reading the processor's time takes as long as a small layer
            scheme.step()
    rate = (scheme.ledger()["collected"] - before) / (time.process_time() - begin)
    scheme.stop()
    return {"env_steps_per_s": round(rate), "share": round(rate / products(num_envs, STEPS.get(num_envs, 32)), 3)}


def memory(kind: str, num_envs: int) -> dict[str, Any]:
    """Return the size of a rollout, and the largest memory of the process in two rollouts after the first updates."""
    scheme = start(kind, num_envs)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # start to measure the largest memory
    for _ in range(2 * _UPDATES):
        scheme.step()
    peak = next(line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM"))
    scheme.stop()
    rows = num_envs * STEPS.get(num_envs, 32)
    return {"rollout_mb": round(rows * (4 * 4 + 8 + 4 * 8 + 4) / 1e6, 2),
            "peak_mb": round(int(peak.split()[1]) * 1024 / 1e6, 1)}


def products(num_envs: int, num_steps: int) -> float:
    """Return the env steps per second that the matrix products alone would allow."""
    import torch

    def seconds_of(rows: int, *, learns: bool) -> float:
        total = 0.0
        for outputs in (2, 1):
            sizes = (*_LAYERS, outputs)
            for index, (inputs, units) in enumerate(itertools.pairwise(sizes)):
                x, weight, grad = torch.randn(rows, inputs), torch.randn(inputs, units), torch.randn(rows, units)
                total += best(lambda x=x, weight=weight: x @ weight)
                if learns:
                    total += best(lambda x=x, grad=grad: x.t() @ grad)
                    total += best(lambda grad=grad, weight=weight: grad @ weight.t()) if index else 0.0
        return total
    rows = num_envs * num_steps
    return rows / (_UPDATES * seconds_of(rows // 4, learns=True) + num_steps * seconds_of(num_envs, learns=False))


def best(function: Any) -> float:
    """Return the seconds of the processor of one call, the lower quartile of several measurements."""
    function()
    start = time.process_time()
    function()
    count = max(1, int(0.01 / max(1e-6, time.process_time() - start)))
    times = []
    for _ in range(9):
        start = time.process_time()
        for _ in range(count):
            function()
        times.append((time.process_time() - start) / count)
    return float(np.quantile(times, 0.25))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 64, 1024, 4096], help="numbers of environments")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of environments")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of the processor of each measurement")
    parser.add_argument("--rounds", type=int, default=1, help="how often all measurements are made, in turns")
    parser.add_argument("--measure", nargs=3, metavar=("WHAT", "KIND", "ENVS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, kind, num_envs = options.measure
        found = memory(kind, int(num_envs)) if what == "memory" else speed(kind, int(num_envs), options.seconds)
        print(json.dumps(found))
        return
    smallest: dict[str, float] = {}
    for number in range(1, options.rounds + 1):
        for num_envs in options.envs:
            for kind in options.kinds:
                found: dict[str, Any] = {}
                for what, environment in (("speed", {}), ("memory", _RETURNS_MEMORY)):
                    result = subprocess.run(
                        [sys.executable, __file__, "--measure", what, kind, str(num_envs), "--seconds",
                         str(options.seconds)],
                        check=True, capture_output=True, text=True, env={**os.environ, **environment})
                    found |= json.loads(result.stdout.splitlines()[-1])
                peak = found.pop("peak_mb")
                found["grown_mb"] = round(peak - smallest.setdefault(kind, peak), 1)
                print(json.dumps({**origin(), "round": number, "kind": kind, "envs": num_envs, **found}), flush=True)


if __name__ == "__main__":
    main()
