"""Measure ranks, which average gradients without a server: env steps per second, and recovery from lost ranks.

    python benchmarks/ranks.py [--ranks 1,2,4,8] [--seconds 20] [--sleep-ms 20] [--kills 3] [--runtime ray]

The algorithm is A2C. Each rank has one environment, which sleeps in each step, and collects 20 steps per update. With
one rank, the scheme is central, and nothing is averaged. The efficiency of n ranks is their steps/s divided by n times
the steps/s of one rank. With Ray, the script then kills (SIGKILL) the ranks of a group of three, one after the other,
at random moments during updates. It measures the time from each kill to the next update with all ranks.

Each measurement runs in its own process, and does not include the start-up. The script prints one JSON object and
asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from results import print_result

ROLLOUT = 20
"""Env steps per gradient of a rank."""


def make(num_ranks: int, step_s: float, runtime: str) -> Any:
    """Return a scheme with `num_ranks` ranks."""
    from pytorchrl import A2C, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import SleepEnv

    envs = VecEnv.create_factory(SleepEnv, {"step_s": step_s})
    settings: dict[str, Any] = {} if num_ranks == 1 else {
        "num_grad_workers": num_ranks, "distribute_gradients": True, "runtime": runtime,
        "grad_worker_resources": {"num_cpus": 0}}
    return Scheme(A2C.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
                  GAEBuffer.create_factory(ROLLOUT), envs, seed=1, **settings)


def rate(num_ranks: int, seconds: float, step_s: float, runtime: str) -> dict[str, Any]:
    """Return the env steps per second, measured after three updates."""
    scheme = make(num_ranks, step_s, runtime)
    while scheme.version < 3:
        scheme.step()
    first, start = scheme.version, time.perf_counter()
    while time.perf_counter() - start < seconds:
        scheme.step()
    elapsed, updates = time.perf_counter() - start, scheme.version - first
    scheme.stop()
    return {"ranks": num_ranks, "updates": updates, "env_steps_per_s": ROLLOUT * num_ranks * updates / elapsed}


def pid_of(handle: Any) -> int:
    """Return the process id of a worker."""
    import ray

    ask = handle.native.__ray_call__
    return int(ray.get(ask.remote(lambda _self: os.getpid()), timeout=60))


def losses(num_ranks: int, kills: int, step_s: float) -> dict[str, Any]:
    """Return the seconds from each loss of a rank to the next update with all ranks."""
    scheme, rng, found = make(num_ranks, step_s, "ray"), random.Random(1), []
    for number in range(kills):
        before = scheme.version
        while scheme.version < before + 5:
            scheme.step()
        pid, killed = pid_of(scheme.update_worker.remote_workers[number % num_ranks]), []

        def kill(pid: int = pid, killed: list[float] = killed) -> None:
            os.kill(pid, signal.SIGKILL)
            killed.append(time.perf_counter())
        threading.Timer(rng.uniform(0.0, 1.5 * ROLLOUT * step_s), kill).start()
        while scheme.metrics()["regroups"] == number:
            scheme.step()
        found.append(time.perf_counter() - killed[0])
    ledger = scheme.stop()
    is_exact = ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    return {"ranks": num_ranks, "kills": kills, "until_next_update_s": {
        "median": statistics.median(found), "max": max(found), "all": found},
        "ledger": "exact" if is_exact else "not exact"}


def in_process(*arguments: object) -> dict[str, Any]:
    """Run one measurement in its own process, in which each numerical library uses one thread."""
    done = subprocess.run([sys.executable, __file__, "_measure", *map(str, arguments)], capture_output=True, text=True,
                          check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if done.returncode:
        return {"arguments": arguments, "error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        what, number, amount, step_s, runtime = sys.argv[2:]
        result = rate(int(number), float(amount), float(step_s), runtime) if what == "rate" else losses(
            int(number), int(amount), float(step_s))
        print(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8",
                        help="numbers of ranks; the first number is the baseline of the comparison")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one measurement")
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="duration of a step of the environment in ms")
    parser.add_argument("--kills", type=int, default=3,
                        help="number of ranks to kill, one after the other, in a group of three")
    parser.add_argument("--runtime", choices=["ray", "threads"], default="ray",
                        help="runtime of the ranks; threads cannot be killed")
    options = parser.parse_args()
    step_s = options.sleep_ms / 1000
    found = [in_process("rate", number, options.seconds, step_s,
                        options.runtime) for number in options.ranks.split(",")]
    for result in found:
        if "error" not in result and "error" not in found[0]:
            one = found[0]["env_steps_per_s"] / found[0]["ranks"]
            result["efficiency"] = result["env_steps_per_s"] / (result["ranks"] * one)
    lost = in_process("losses", 3, options.kills, step_s, "ray") if options.kills and options.runtime == "ray" else None
    print_result({"task": "ranks", "runtime": options.runtime, "sleep_ms": options.sleep_ms,
                  "unit": "env steps per second", "results": found, "lost_ranks": lost})


if __name__ == "__main__":
    main()
