"""Recording on Ray: whether the run is repeated bit for bit in one process, and what recording costs.

    python benchmarks/replay.py [--runs 3] [--updates 300] [--pairs 8] [--seconds 8]

PPO on CartPole-v1 with asynchronous collection (4 collection workers), with asynchronous gradients (2 gradient workers), and
with both while a collection worker is killed. Each is recorded on Ray and replayed in this process, parameters compared
bit for bit. Then training runs go on in pairs, with a record and without, in turn; the ratio of their speeds is what
recording costs. Prints one JSON object; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

FREE: dict[str, Any] = {"num_cpus": 0}
COLLECTION: dict[str, Any] = {"num_col_workers": 4, "col_communication": ASYNC, "col_worker_resources": FREE}
GRADIENTS: dict[str, Any] = {"num_grad_workers": 2, "grad_communication": ASYNC, "grad_worker_resources": FREE}
SCHEMES: dict[str, dict[str, Any]] = {
    "asynchronous collection": COLLECTION,
    "asynchronous gradients": GRADIENTS,
    "both, a collection worker killed": {
        **COLLECTION, **GRADIENTS, "num_col_workers": 2, "faults": "kill col.1.2 @ step 500"},
}


def agent() -> tuple[Any, ...]:
    """CartPole and a small network."""
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    return (PPO.create_factory(num_epochs=4, num_mini_batch=4, lr=1e-3),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(64), envs)


def record_and_replay(settings: dict[str, Any], seed: int, updates: int, folder: Path) -> dict[str, Any]:
    """One run on Ray, and its repetition."""
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    scheme = Scheme(*agent(), seed=seed, record=path, **settings)
    start = time.perf_counter()
    while scheme.version < updates:
        scheme.step()
    restarts, ran_s = scheme.metrics()["workers_restarted"], time.perf_counter() - start
    recorded = scheme.acting_state()
    scheme.stop()
    replay = Scheme(*agent(), seed=seed, replay=path, **settings)
    start = time.perf_counter()
    while not replay.replay_is_over:
        replay.step()
    replayed = replay.acting_state()
    replay.stop()
    return {"equal": all(torch.equal(value, replayed[name]) for name, value in recorded.items()), "updates": updates,
            "workers_restarted": restarts, "bytes_per_update": path.stat().st_size / updates, "ran_s": ran_s,
            "replayed_s": time.perf_counter() - start}


def speed(settings: dict[str, Any], seconds: float, path: Path | None) -> float:
    """Env steps a second that reach the learner, after a warm-up."""
    scheme = Scheme(*agent(), seed=1, record=path, **settings)
    for _ in range(50):
        scheme.step()
    start, before = time.perf_counter(), scheme.ledger()["consumed_unique"]
    while time.perf_counter() - start < seconds:
        scheme.step()
    rate = (scheme.ledger()["consumed_unique"] - before) / (time.perf_counter() - start)
    scheme.stop()
    return rate


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="recorded and replayed runs of each scheme")
    parser.add_argument("--updates", type=int, default=300, help="of each of them")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of runs with and without a record, of each scheme")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each such run")
    options = parser.parse_args()
    import ray  # one for all runs: starting it takes longer than they do

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, settings in SCHEMES.items():
            runs = []
            for seed in range(options.runs):
                runs.append(record_and_replay(settings, seed, options.updates, folder))
                print(title, runs[-1], file=sys.stderr, flush=True)
            result[title] = {"runs": runs}
        for title, settings in list(SCHEMES.items())[:2]:
            ratios = []
            for pair in range(options.pairs):
                path = folder / f"speed {title} {pair}"
                if pair % 2:
                    without, recorded = speed(settings, options.seconds, None), speed(settings, options.seconds, path)
                else:
                    recorded, without = speed(settings, options.seconds, path), speed(settings, options.seconds, None)
                ratios.append(without / recorded)
                print(f"{title}: {without:.0f} steps/s without, {recorded:.0f} with a record", file=sys.stderr, flush=True)
            if ratios:
                result[title]["time_with_record_over_without"] = {
                    "median": statistics.median(ratios), "all": sorted(ratios)}
    ray.shutdown()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
