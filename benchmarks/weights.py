"""Measure how long it takes to send weights to collection workers: by reference, as schemes do, or by value.

    python benchmarks/weights.py [--workers 8] [--megabytes 50] [--pushes 20]

A push is complete when all workers have loaded the learner's parameters into their actors. The two methods alternate in
one run on Ray. To send weights by value, the script passes a state dict as an argument of each call. Then the script
times rollouts of the same workers, with and without new weights in each request, in an environment whose steps take
almost no time. It measures both the time of acting inside a rollout and the time from the request to the answer.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from results import print_result


def push_by_reference(worker: Any, runtime: Any, handles: list[Any]) -> None:
    """Make and store one snapshot of the weights; each worker copies the snapshot into its parameters."""
    from pytorchrl.scheme.collection.c_worker import CWorker

    worker.local_worker.version += 1  # only a new version gets a new snapshot
    reference = runtime.put(worker.local_worker.get_weights())
    for outcome in runtime.get_all([handle.submit(CWorker.set_weights, reference) for handle in handles], 60.0):
        outcome.unwrap()


def push_by_value(worker: Any, runtime: Any, handles: list[Any]) -> None:
    """Send the weights by value, as tensors in a separate call to each worker."""
    from pytorchrl.scheme.collection.c_worker import CWorker

    state = worker.algo.acting_state()
    for outcome in runtime.get_all([handle.submit(CWorker.set_weights, state) for handle in handles], 60.0):
        outcome.unwrap()


def rollouts(worker: Any, runtime: Any, handles: list[Any], with_weights: bool) -> dict[str, float]:
    """Collect one rollout per worker concurrently, and return two times in milliseconds.

    `inside_ms` is the mean duration of a rollout; `answer_ms` is the time from the request to the last answer.
    """
    from pytorchrl.scheme.collection.c_worker import CWorker

    worker.local_worker.version += 1
    start = time.perf_counter()
    reference = runtime.put(worker.local_worker.get_weights()) if with_weights else None
    answers = runtime.get_all([handle.submit(CWorker.collect, reference) for handle in handles], 60.0)
    inside = statistics.fmean(outcome.unwrap().collect_s for outcome in answers)
    return {"inside_ms": 1e3 * inside, "answer_ms": 1e3 * (time.perf_counter() - start)}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="collection workers")
    parser.add_argument("--megabytes", type=float, default=50.0, help="size of the weights in MB")
    parser.add_argument("--pushes", type=int, default=20, help="number of pushes by each method")
    options = parser.parse_args()
    import ray

    from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    torch.set_num_threads(1)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    width = int((options.megabytes * 1e6 / 4 / 2) ** 0.5)  # two networks, each dominated by a square matrix
    scheme = Scheme(
        PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                           hidden_sizes=(width, width)),
        GAEBuffer.create_factory(16), envs, seed=1, num_col_workers=options.workers, col_communication=ASYNC,
        col_worker_resources={"num_cpus": 0}, runtime="ray")
    worker = scheme.update_worker.local_worker
    runtime, handles = worker.col_workers.runtime, worker.remote_workers
    size = sum(tensor.numel() * tensor.element_size() for tensor in worker.algo.acting_state().values())
    pairs = []
    for number in range(options.pushes + 1):
        times = []
        for push in (push_by_reference, push_by_value):
            start = time.perf_counter()
            push(worker, runtime, handles)
            times.append(1e3 * (time.perf_counter() - start))
        print(f"push {number}: {times[0]:.0f} ms by reference, {times[1]:.0f} ms by value", file=sys.stderr, flush=True)
        if number:  # the first push is not counted, because the object store is empty at first
            pairs.append(times)
    timed: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(options.pushes + 1):
        for with_weights in (True, False):
            measured = rollouts(worker, runtime, handles, with_weights)
            if number:
                timed[with_weights].append(measured)
    scheme.stop()
    ray.shutdown()
    print_result({
        "task": "weights", "megabytes": size / 1e6, "workers": options.workers,
        "pushes": options.pushes,
        "by_reference_ms": statistics.median(pair[0] for pair in pairs),
        "by_value_ms": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
        "rollouts": {("with new weights" if with_weights else "without"): {
            name: statistics.median(one[name] for one in measured) for name in measured[0]}
            for with_weights, measured in timed.items()}})


if __name__ == "__main__":
    main()
