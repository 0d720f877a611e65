"""Check whether the sample queue keeps the learner busy: compare its updates per second with and without the queue.

    python benchmarks/learner_feed.py [--pairs 5] [--seconds 20] [--collectors 2] [--only pictures] [--pin]
                                        [--runtime ray]

IMPALA learns in three cases:

- from images (84 x 84 x 4 uint8, Nature CNN); a train batch has two rollouts of 8 x 32 steps and is used once;
- from vectors (CartPole-v1) with networks of 256-256, as in continuous control; a train batch is a rollout of 64 x 80
  steps and is used once;
- from vectors with small networks of 64-64; a train batch is a rollout of 64 x 20 steps and is used four times, because
  the learner uses data faster than two collection workers collect them.

With vectors, 64 environments are stepped together, so that collection takes little processor time from the learner.
Each case is measured in three modes, which alternate:

- through the queue: collection workers (Ray's, or processes without Ray) fill the queue, and the learner thread
  empties it;
- on repeated data: the same scheme runs, but the learner uses its first train batch repeatedly, while the queue is full
  and collectors wait;
- without a scheme: a loop only computes the V-trace targets and the gradient of one train batch and applies the
  update, without statistics and without collectors.

`--pin` reserves the last core for the learner thread; all other threads and processes share the remaining cores. This
imitates a machine on which the learner always has a free core.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from results import CORES as NUM_CORES
from results import print_result

CORES = sorted(os.sched_getaffinity(0))
ALWAYS = 10**9
"""Number of uses of each train batch in measurements on repeated data; larger than the number of updates in any run."""


class Pictures(gym.Env[np.ndarray, np.int64]):
    """Environment that cycles through prepared images, so that steps cost almost no time; an episode has 500 steps."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def __init__(self) -> None:
        self._pictures = np.random.default_rng(0).integers(0, 256, (7, 4, 84, 84), dtype=np.uint8)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        return self._pictures[0], {}

    def step(self, action: np.int64) -> Any:
        """Return the next image."""
        self._t += 1
        return self._pictures[self._t % 7], float(action == self._t % 6), self._t >= 500, False, {}


KINDS: dict[str, dict[str, Any]] = {
    "pictures": {"env": Pictures, "num_envs": 8, "rollout": 32, "item": 512, "num_passes": 1},
    "vectors": {"env": "CartPole-v1", "num_envs": 64, "rollout": 80, "item": 5120, "num_passes": 1,
                "hidden_sizes": (256, 256)},
    "small vectors": {"env": "CartPole-v1", "num_envs": 64, "rollout": 20, "item": 1280, "num_passes": 4},
}


def through_queue(  # noqa: PLR0913
        num_collectors: int, seconds: float, pin: bool, runtime: str, *, env: Any, num_envs: int, rollout: int,
        item: int, num_passes: int, **network: Any) -> tuple[dict[str, Any], Any]:
    """Measure training after a warm-up; return (updates per second and queue statistics, stopped gradient worker)."""
    from pytorchrl import IMPALA, OnPolicyActor, Scheme, VecEnv, VTraceBuffer

    envs = VecEnv.create_factory(env, vec_env_size=num_envs)
    scheme = Scheme.impala(
        IMPALA.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space, **network),
        VTraceBuffer.create_factory(size=rollout), envs, seed=1, num_col_workers=num_collectors, train_batch_size=item,
        num_passes=num_passes, col_worker_resources={"num_cpus": 0}, runtime=runtime)
    scheme.step()
    # All other threads inherited their affinity to the remaining cores from the threads that started them.
    if pin:
        learner = next(thread for thread in threading.enumerate() if thread.name == "UpdaterThread")
        os.sched_setaffinity(learner.native_id, CORES[-1:])
    end = time.perf_counter() + seconds / 4
    while time.perf_counter() < end:
        scheme.step()
    start, first = time.perf_counter(), scheme.version
    while time.perf_counter() < start + seconds:
        scheme.step()
    elapsed, updates, metrics = time.perf_counter() - start, scheme.version - first, scheme.metrics()
    worker = scheme.update_worker.local_worker
    scheme.stop()
    return {"updates_per_s": updates / elapsed, "queue": metrics["queue"]}, worker


def bare(worker: Any, seconds: float) -> float:
    """Train on the worker's latest train batch in a loop without a scheme; return the updates per second."""
    data = [queued.rollout.data for queued in worker.batch_source._current.rollouts]
    algo, storage = worker.algo, worker.storage

    def update() -> int:
        storage.insert_data_slice(data)
        storage.before_gradients()
        num_updates = 0
        for batch in algo.batches(storage):
            algo.compute_gradients(batch)
            algo.apply_gradients()
            num_updates += 1
        return num_updates

    update()
    updates, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        updates += update()
    return updates / (time.perf_counter() - start)


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each case")
    parser.add_argument("--seconds", type=float, default=20.0,
                        help="seconds per measurement, plus a quarter as warm-up")
    parser.add_argument("--collectors", type=int, default=2, help="collection workers")
    parser.add_argument("--only", choices=sorted(KINDS), help="measure this case only")
    parser.add_argument("--pin", action="store_true", help="reserve the last core for the learner thread")
    parser.add_argument("--runtime", choices=["ray", "processes"], default="ray", help="runtime of the workers")
    options = parser.parse_args()
    if options.pin:
        os.sched_setaffinity(0, CORES[:-1])
    import torch

    torch.set_num_threads(1)
    if options.runtime == "ray":  # one Ray cluster for all runs, because starting Ray takes as long as a run
        import ray

        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    result: dict[str, Any] = {"task": "learner_feed", "runtime": options.runtime, "cores": NUM_CORES,
                              "pinned": options.pin, "unit": "updates per second"}
    for name, kind in KINDS.items():
        if options.only not in (None, name):
            continue
        pairs = []
        for _ in range(options.pairs):
            fed, worker = through_queue(options.collectors, options.seconds, options.pin, options.runtime, **kind)
            repeated, _ = through_queue(options.collectors, options.seconds, options.pin, options.runtime,
                                        **{**kind, "num_passes": ALWAYS})
            loop = bare(worker, options.seconds)
            pairs.append({**fed, "repeated_updates_per_s": repeated["updates_per_s"], "bare_updates_per_s": loop,
                          "ratio": fed["updates_per_s"] / repeated["updates_per_s"],
                          "ratio_bare": fed["updates_per_s"] / loop})
            print(name, pairs[-1], file=sys.stderr, flush=True)
        result[name] = {**{key: statistics.median(pair[key] for pair in pairs) for key in ("ratio", "ratio_bare")},
                        "pairs": pairs}
    if options.runtime == "ray":
        ray.shutdown()
    print_result(result)


if __name__ == "__main__":
    main()
