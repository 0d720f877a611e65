"""Check that a run recorded on Ray is repeated bit for bit in one process, and measure the cost of recording.

    python benchmarks/replay.py [--runs 3] [--updates 300] [--seconds 120]

The runs train PPO on CartPole-v1 with asynchronous collection (4 collection workers), with asynchronous gradients (2
gradient workers), and with both. In the runs with both, a collection worker is killed. Each run is recorded on Ray and
replayed in this process, and the parameters are compared bit for bit. The cost of recording is the time per update with
recording, divided by the time per update without recording. Both times are measured within one run that turns recording
on and off about ten times per second, because the speed of a machine varies between runs, and even between seconds, by
more than recording costs. The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from results import print_result

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
    """Return the factories of an agent with a small network for CartPole."""
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    return (PPO.create_factory(num_epochs=4, num_mini_batch=4, lr=1e-3),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(64), envs)


def record_and_replay(settings: dict[str, Any], seed: int, updates: int, folder: Path) -> dict[str, Any]:
    """Record one run on Ray, replay it, and compare the parameters."""
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


PHASE_S = 0.1
"""Length of a phase in seconds; recording is on in half of the phases, so that other load affects both halves."""
COINS = random.Random(0).getrandbits(4096)


def is_recording_now() -> bool:
    """Return whether to record in the current phase; recording is on in one phase of each pair, chosen at random.

    The result is the same in all processes. The function is called more often with recording than without, so its time
    must be negligible compared with the measured times.
    """
    pair, second = divmod(int(time.monotonic() / PHASE_S), 2)
    return second == COINS >> pair % 4096 & 1


def switch_records() -> None:
    """Turn off all journals of this process, and the record of the driver, in half of the phases."""
    from pytorchrl.runtime import journal
    from pytorchrl.scheme.updates.u_worker import UWorker

    # While `writing.has_begun` is true, recording stays on, so that the write in progress is completed.
    writing = threading.local()

    def switched(name: str) -> Any:
        recording, resting = getattr(journal.Recording, name), getattr(journal.Journal, name)

        def call(self: Any, *args: Any) -> Any:
            is_on = getattr(writing, "has_begun", False) or is_recording_now()
            return (recording if is_on else resting)(self, *args)
        return call

    for name in ("reading", "writing", "note", "take"):
        setattr(journal.Recording, name, switched(name))
    journal.Recording.is_kept = property(lambda self: is_recording_now())  # type: ignore[assignment, method-assign]
    write = UWorker._write_record

    def write_switched(self: UWorker, failure: BaseException | None = None) -> None:
        if failure is not None or is_recording_now():
            writing.has_begun = True
            write(self, failure)
            writing.has_begun = False

    UWorker._write_record = write_switched  # type: ignore[method-assign]


def cost(settings: dict[str, Any], seconds: float, path: Path) -> dict[str, Any]:
    """Return the ratio of the seconds per update with and without recording, measured in a single run."""
    scheme = Scheme(*agent(), seed=1, record=path, **settings)
    for _ in range(50):
        scheme.step()
    spent: dict[tuple[int, bool], list[float]] = {}  # (pair of phases, recording on) -> seconds of each update
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        phase, is_on = int(time.monotonic() / PHASE_S), is_recording_now()
        scheme.step()
        if int(time.monotonic() / PHASE_S) == phase:
            spent.setdefault((phase // 2, is_on), []).append(time.perf_counter() - start)
    scheme.stop()
    pairs = [(spent[pair, True], spent[pair, False]) for pair, is_on in spent if is_on and (pair, False) in spent]
    ratios = [statistics.fmean(recorded) / statistics.fmean(without) for recorded, without in pairs]
    # A slow phase of the machine increases both means, so it hardly affects their ratio.
    means = [sum(statistics.fmean(pair[i]) for pair in pairs) / len(pairs) for i in (0, 1)]
    import scipy.stats  # imported here, so that the measured processes do not load it

    return {"pairs": len(pairs), "ratio_of_means": means[0] / means[1], "median_of_pairs": statistics.median(ratios),
            "standard_error": float(scipy.stats.sem(ratios)), "ms_per_update": 1e3 * means[1]}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="recorded and replayed runs of each scheme")
    parser.add_argument("--updates", type=int, default=300, help="updates of each of these runs")
    parser.add_argument("--seconds", type=float, default=120.0,
                        help="seconds of the run of each scheme that measures the cost of recording")
    options = parser.parse_args()
    import ray  # one Ray cluster for all runs, because starting Ray takes longer than a run

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
        switch_records()
        ray.shutdown()
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2,
                 runtime_env={"worker_process_setup_hook": switch_records})
        for title, settings in list(SCHEMES.items())[:2]:
            result[title]["time_with_record_over_without"] = cost(settings, options.seconds, folder / f"cost {title}")
            print(title, result[title], file=sys.stderr, flush=True)
    ray.shutdown()
    print_result(result)


if __name__ == "__main__":
    main()
