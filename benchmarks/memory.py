"""Measure the memory of a run over its env steps: of its process together with all processes that it has started.

    python benchmarks/memory.py [--steps 200000] [--runtimes threads processes] [--algorithms ppo dqn]

Each run is `train` on CartPole-v1 with two collection workers, by default except for a replay buffer of 20,000 steps,
in a process of its own. The memory is the proportional share (PSS), which counts memory that several processes share
once, in MB of 10^6 bytes. It is measured every `--every` env steps. `first` and `last` are the medians of the first and
the last tenth of the measurements after the warm-up, a quarter of the run; `slope` is the Theil-Sen slope in MB per
100,000 env steps, with its 95 % interval. The script prints one line of JSON per run, and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from typing import Any

from growth import sample, trend
from process_table import descendants, running_processes
from results import origin

OPTIONS: dict[str, dict[str, Any]] = {"ppo": {}, "dqn": {"replay_size": 20_000}}


def memory_mb() -> float:
    """Return the proportional share of this process and its descendants, in MB."""
    found = (sample(pid) for pid in descendants([os.getpid()], running_processes()))
    return sum(values["pss_mb"] for values in found if values is not None)


def run(algorithm: str, runtime: str, steps: int, every: int) -> dict[str, Any]:
    """Train once, and return the trend of the memory."""
    import pytorchrl
    from pytorchrl.callbacks import Callback

    points: list[tuple[float, float]] = []

    class Sampling(Callback):
        def on_step(self, run: pytorchrl.Learner, info: dict[str, float]) -> None:
            if run.env_steps >= every * (len(points) + 1):
                points.append((run.env_steps, memory_mb()))

    agent = pytorchrl.train(algorithm, "CartPole-v1", target_steps=steps, num_col_workers=2, runtime=runtime, seed=1,
                            progress=False, callbacks=[Sampling()], **OPTIONS[algorithm])
    later = points[len(points) // 4:]
    tenth = max(1, len(later) // 10)
    first, last = (statistics.median(mb for _, mb in part) for part in (later[:tenth], later[-tenth:]))
    fit = trend([env_steps / 1e5 for env_steps, _ in later], [mb for _, mb in later]) or {}
    return {"algorithm": algorithm, "runtime": runtime, "env_steps": agent.summary["env_steps"], "first_mb": first,
            "last_mb": last, "ratio": last / first, "slope": fit.get("slope"), "interval": fit.get("interval"),
            "points": [[env_steps, round(mb, 2)] for env_steps, mb in points]}


def main() -> None:
    """Parse the command line, and measure each run in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--every", type=int, default=2000)
    parser.add_argument("--runtimes", nargs="+", choices=["threads", "processes"], default=["threads", "processes"])
    parser.add_argument("--algorithms", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.is_child:
        warnings.simplefilter("ignore")
        found = run(options.algorithms[0], options.runtimes[0], options.steps, options.every)
        print(json.dumps({**origin(), **found}), flush=True)
        return
    for algorithm in options.algorithms:
        for runtime in options.runtimes:
            subprocess.run(
                [sys.executable, __file__, "--is-child", "--algorithms", algorithm, "--runtimes", runtime,
                 "--steps", str(options.steps), "--every", str(options.every)], check=True)


if __name__ == "__main__":
    main()
