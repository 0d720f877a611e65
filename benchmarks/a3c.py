"""Measure updates per second and gradient lags of asynchronous gradient workers whose environments sleep.

    python benchmarks/a3c.py [--workers 1,2,4,8,16] [--seconds 20] [--sleep-ms 5] [--runtime ray]

The algorithm is A2C. Each worker has one environment, which sleeps in each step, and computes each gradient from 20
steps. With one worker, the scheme is central and has no asynchronous gradients. The ideal rate is workers /
(20 x 5 ms). It ignores the time that workers spend waiting for the single process that applies all updates.

Each measurement runs in its own process, and does not include the start-up. The script prints one JSON object and
asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from results import print_result

ROLLOUT = 20
"""Env steps per gradient."""


def measure(num_workers: int, seconds: float, step_s: float, runtime: str) -> dict[str, Any]:
    """Return the update rate and the gradient lags of one scheme.

    The measurement starts once the workers have sent two gradients each, on average.
    """
    from pytorchrl import A2C, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import SleepEnv

    envs = VecEnv.create_factory(SleepEnv, {"step_s": step_s})
    agent = (A2C.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
             GAEBuffer.create_factory(ROLLOUT), envs)
    scheme = (Scheme(*agent, seed=1) if num_workers == 1 else
              Scheme.a3c(*agent, num_grad_workers=num_workers, updates_per_step=num_workers, runtime=runtime, seed=1))
    while scheme.version < 2 * num_workers:
        scheme.step()
    before, first, start = scheme.metrics(), scheme.version, time.perf_counter()
    while time.perf_counter() - start < seconds:
        scheme.step()
    elapsed, metrics = time.perf_counter() - start, scheme.metrics()
    updates = scheme.version - first
    scheme.stop()
    by_worker = Counter(metrics["grads_by_worker"])
    by_worker.subtract(before["grads_by_worker"])
    return {"workers": num_workers, "updates": updates, "updates_per_s": updates / elapsed,
            "env_steps_per_s": ROLLOUT * updates / elapsed,
            "share_of_ideal": updates / elapsed * ROLLOUT * step_s / num_workers,
            "grad_lag": metrics["grad_lag"], "gradients_by_worker": dict(by_worker),
            "time_ms": {name: metrics[f"{name}_time_ms"] for name in ("wait", "apply", "push")}}


def in_process(num_workers: str, seconds: float, step_s: float, runtime: str) -> dict[str, Any]:
    """Run one measurement in its own process, in which each numerical library uses one thread."""
    done = subprocess.run([sys.executable, __file__, "_measure", num_workers, str(seconds), str(step_s), runtime],
                          capture_output=True,
                          text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if done.returncode:
        return {"workers": int(num_workers), "error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        print(json.dumps(measure(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4,8,16",
                        help="numbers of gradient workers; the first number is the baseline of the comparison")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one measurement")
    parser.add_argument("--sleep-ms", type=float, default=5.0, help="duration of a step of the environment in ms")
    parser.add_argument("--runtime", choices=["ray", "threads"], default="ray", help="runtime of the gradient workers")
    options = parser.parse_args()
    found = [in_process(number, options.seconds, options.sleep_ms / 1000,
                        options.runtime) for number in options.workers.split(",")]
    for result in found:
        if "error" not in result and "error" not in found[0]:
            result["speed_up"] = result["updates_per_s"] / found[0]["updates_per_s"]
    print_result({"task": "a3c", "runtime": options.runtime, "sleep_ms": options.sleep_ms, "unit": "updates per second",
                  "results": found})


if __name__ == "__main__":
    main()
