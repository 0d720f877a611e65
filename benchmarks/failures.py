"""What a killed worker costs: seconds until it is noticed, and until another is in its place; on Ray.

    python benchmarks/failures.py [--kills 10] [--workers 4]
    python benchmarks/failures.py --learn

Kills a collection worker (its process, by SIGKILL) so many times while training goes on, then as often a gradient worker
with its collection workers. `--learn`: PPO on CartPole-v1 with four collection workers until an evaluation reaches 475,
once undisturbed and once while every collection worker is killed at a random step again and again.
Prints one JSON object; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import time
from typing import Any

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.scheme.base.worker import Worker


class Noticed(logging.Handler):
    """Notes when the supervisor says that a worker is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.at.append(time.perf_counter())


def agent(num_steps: int = 64) -> tuple[Any, ...]:
    """CartPole and a small network."""
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    return (PPO.create_factory(num_epochs=4, num_mini_batch=4, lr=1e-3, entropy_coef=0.0),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(num_steps), envs)


def kill_and_wait(scheme: Scheme, level: Any, index: int, noticed: Noticed) -> dict[str, float]:
    """Kill one worker by pid; seconds until that is noticed, and until its replacement answers."""
    import ray

    handle = level.remote_workers[index]
    pid = ray.get(handle.native.__ray_call__.remote(lambda _self: os.getpid()), timeout=60)
    before, start = len(noticed.at), time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while level.remote_workers[index] is handle:
        scheme.step()
    ready = level.remote_workers[index].submit(Worker.ready)
    while not scheme.update_worker._runtime.wait([ready], 0.0):
        scheme.step()
    return {"noticed_s": noticed.at[before] - start, "back_s": time.perf_counter() - start}


def kills(count: int, num_workers: int) -> dict[str, Any]:
    """Kill collection workers, then gradient workers with theirs."""
    noticed = Noticed()
    logging.getLogger("pytorchrl.scheme.supervisor").addHandler(noticed)
    result = {}
    for name, settings in (
            ("collection worker", {"num_col_workers": num_workers}),
            ("gradient worker with two collection workers", {"num_grad_workers": 2, "num_col_workers": 2, "grad_communication": ASYNC})):
        scheme = Scheme(*agent(), col_communication=ASYNC, seed=1, col_worker_resources={"num_cpus": 0},
                        **({"grad_worker_resources": {"num_cpus": 0}} if "num_grad_workers" in settings else {}), **settings)
        worker = scheme.start()
        level = worker if "num_grad_workers" in settings else worker.local_worker
        rows = []
        for number in range(count):
            for _ in range(40):
                scheme.step()
            rows.append(kill_and_wait(scheme, level, number % len(level.remote_workers), noticed))
        ledger, restarts = scheme.stop(), scheme.metrics().get("workers_restarted")
        places = ledger["consumed_unique"] + sum(ledger["dropped"].values())
        result[name] = {
            key: {"p50": statistics.median(row[key] for row in rows), "max": max(row[key] for row in rows)} for key in rows[0]
        } | {"kills": count, "restarts": restarts, "steps_lost": ledger["dropped"]["worker_lost"],
             "ledger_exact": ledger["collected"] == places}
    return result


def learn() -> dict[str, Any]:
    """Learn CartPole undisturbed, and under a hail of kills."""
    result = {}
    for name, faults in (("undisturbed", None), ("killed", "kill col.* p=0.0004")):
        scheme = Scheme(*agent(), agent()[-1], num_col_workers=4, seed=1, col_worker_resources={"num_cpus": 0}, faults=faults)
        start = time.perf_counter()
        best, steps = 0.0, 0
        while best < 475 and steps < 400_000:
            scheme.step()
            if scheme.version % 200 == 0:
                scheme.start_evaluation(20)
                best = max(best, scheme.wait_evaluation(120.0).return_mean)  # type: ignore[union-attr]
                steps = scheme.env_steps
        restarts, seconds = scheme.metrics()["workers_restarted"], time.perf_counter() - start
        ledger = scheme.stop()
        result[name] = {"return": best, "env_steps": steps, "seconds": seconds, "env_steps_per_s": steps / seconds,
                        "workers_restarted": restarts,
                        "ledger_exact": ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())}
    return result


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each kind of worker")
    parser.add_argument("--workers", type=int, default=4, help="collection workers while they are killed")
    parser.add_argument("--learn", action="store_true", help="learn while workers are killed")
    options = parser.parse_args()
    print(json.dumps(learn() if options.learn else kills(options.kills, options.workers), indent=1))


if __name__ == "__main__":
    main()
