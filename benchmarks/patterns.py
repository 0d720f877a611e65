"""Train in each of the sixteen patterns, and check that the agent learns, the ledger balances, and the scheme stops.

    python benchmarks/patterns.py [--runtime ray|threads] [--steps 150000] [--seeds 3] [--patterns central-sync/...]

The name of a pattern, e.g. `parallel-async/central-sync`, states the execution and communication of collection, and
after the slash those of gradients. Each run trains PPO on CartPole-v1 until an evaluation of 20 episodes reaches the
goal, or for `--steps` env steps at most. The script prints one line of JSON per run. `leftovers` are threads and child
processes of this process that the run started and that still exist after `stop()`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from typing import Any

import torch
from process_table import descendants, running_processes
from results import print_result

from pytorchrl import ASYNC, PPO, SYNC, GAEBuffer, OnPolicyActor, Scheme, VecEnv, linear

NUM_WORKERS = 2
ROUND_STEPS = 1024
"""Env steps per round of training, in every pattern."""
PATTERNS = {
    f"{'parallel' if col else 'central'}-{'async' if col_async else 'sync'}/"
    f"{'parallel' if grad else 'central'}-{'async' if grad_async else 'sync'}": {
        "num_col_workers": NUM_WORKERS if col else 1, "col_communication": ASYNC if col_async else SYNC,
        "num_grad_workers": NUM_WORKERS if grad else 1, "grad_communication": ASYNC if grad_async else SYNC}
    for col, col_async, grad, grad_async in itertools.product((False, True), repeat=4)
}


def build_scheme(pattern: str, *, seed: int, runtime: str, num_envs: int = 4, **options: Any) -> Scheme:
    """Return a scheme of PPO on CartPole in one pattern.

    The length of rollouts is chosen so that a round has the same number of steps in every pattern.

    Args:
        pattern: A key of `PATTERNS`.
        seed: Seed of the scheme.
        runtime: "ray" or "threads".
        num_envs: Number of environments of each collection worker.
        options: Further settings of the scheme.
    """
    settings: dict[str, Any] = dict(PATTERNS[pattern])
    rollouts = 1
    if settings["col_communication"] is SYNC:
        rollouts *= settings["num_col_workers"]
    # These settings minimize the policy lag of asynchronous collection.
    else:
        settings |= {"queue_size": 1, "col_in_flight": 1}
    if settings["grad_communication"] is SYNC:
        rollouts *= settings["num_grad_workers"]
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=num_envs)
    return Scheme(
        PPO.create_factory(lr=linear(1e-3, 1e-4), num_epochs=4, num_mini_batch=4, gamma=0.98, entropy_coef=0.0),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        GAEBuffer.create_factory(max(32, ROUND_STEPS // (rollouts * num_envs)), gae_lambda=0.9), envs,
        VecEnv.create_factory("CartPole-v1", vec_env_size=5), seed=seed, runtime=runtime, **(settings | options))


def run(pattern: str, seed: int, *, runtime: str, max_steps: int, goal: float) -> dict[str, Any]:
    """Train until the goal is reached or `max_steps` env steps are used, stop, and return the results and leftovers."""
    threads, processes = set(threading.enumerate()), child_processes()
    scheme = build_scheme(pattern, seed=seed, runtime=runtime)
    scheme.start(max_steps)
    start, mean, next_evaluation = time.monotonic(), 0.0, 20_000
    try:
        while mean < goal and scheme.ledger()["consumed_unique"] < max_steps:
            scheme.step()
            steps = scheme.ledger()["consumed_unique"]
            if steps >= min(next_evaluation, max_steps):
                next_evaluation = steps + 10_000
                mean = evaluate(scheme)
        seconds, steps = time.monotonic() - start, scheme.ledger()["consumed_unique"]
        lag = scheme.metrics()["policy_lag"]
    finally:
        stopping = time.monotonic()
        ledger = scheme.stop()
    stop_seconds = time.monotonic() - stopping
    places = sum(ledger[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    return {
        "pattern": pattern, "seed": seed, "steps": steps, "return": mean, "reached": mean >= goal,
        "ledger_ok": ledger["collected"] == places + sum(ledger["dropped"].values())
        and ledger["in_flight"] == ledger["queued"] == 0,
        "ledger": ledger, "policy_lag": lag, "seconds": round(seconds, 1), "stop_seconds": round(stop_seconds, 2),
        "leftovers": leftovers(threads, processes)}


def evaluate(scheme: Scheme) -> float:
    """Drain the scheme, and return the mean return of 20 episodes with the current weights."""
    scheme.drain()
    scheme.start_evaluation(20)
    evaluation = scheme.wait_evaluation(120.0)
    assert evaluation is not None
    return evaluation.return_mean


def child_processes() -> set[int]:
    """Return the ids of all descendants of this process, except zombies."""
    return descendants({os.getpid()}, running_processes()) - {os.getpid()}


def leftovers(threads: set[threading.Thread], processes: set[int], patience_s: float = 5.0) -> list[str]:
    """Return the threads and processes that are not in the given sets and do not end within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [thread.name for thread in set(threading.enumerate()) - threads]
        left += [f"process {pid}" for pid in child_processes() - processes]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> int:
    """Run the patterns; return 0 if each run reached the goal, balanced its ledger, and left no thread or process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("ray", "threads"), default="ray")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--goal", type=float, default=400.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    fine = True
    for pattern, seed in itertools.product(arguments.patterns, range(1, arguments.seeds + 1)):
        result = run(pattern, seed, runtime=arguments.runtime, max_steps=arguments.steps, goal=arguments.goal)
        fine &= result["reached"] and result["ledger_ok"] and not result["leftovers"] and result["stop_seconds"] <= 10
        print_result(result, indent=None)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
