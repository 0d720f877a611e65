"""Compare central inference with workers that choose their own actions, in alternating runs.

    python benchmarks/central_inference.py rates [--cases sleeping,cartpole,images] [--pairs 3] [--seconds 10]
    python benchmarks/central_inference.py scores [--seeds 3] [--steps 100000]

`rates` trains IMPALA with asynchronous collection in worker processes (`runtime="processes"`):

- `sleeping`: 32 workers with one environment each, whose step sleeps for 5 ms; MLP of 64-64;
- `cartpole`: 2 workers with 8 environments of CartPole-v1 each; MLP of 64-64;
- `images`: 8 workers with one environment each, whose step sleeps for 20 ms and returns 84 x 84 x 4 uint8; Nature CNN.

For each side, the script prints env steps per second, the mean policy lag (in updates), the private memory of a worker
in MB, and the processor time of all processes per env step in microseconds. With central inference, it also prints the
mean number of environments in a batch of actions, and the mean lag of the weights that chose the actions.

`scores` trains APPO on CartPole-v1 with either inference, and prints the mean return of the last 100 episodes.

The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from growth import sample
from learner_feed import Pictures
from process_table import descendants, running_processes
from results import print_result

SIDES = ("worker", "central")


class SleepingPictures(Pictures):
    """Images from an environment whose step sleeps for 20 ms."""

    def step(self, action: Any) -> Any:
        """Sleep, and then take one step."""
        time.sleep(0.02)
        return super().step(action)


def make(case: str, inference: str) -> Any:
    """Return the scheme of one case."""
    from pytorchrl import IMPALA, OnPolicyActor, Scheme, VecEnv, VTraceBuffer
    from pytorchrl.envs.testing import SleepEnv

    env_fn, kwargs, num_envs, workers, size = {
        "sleeping": (SleepEnv, {"step_s": 0.005}, 1, 32, 100), "cartpole": ("CartPole-v1", {}, 8, 2, 64),
        "images": (SleepingPictures, {}, 1, 8, 32)}[case]
    envs = VecEnv.create_factory(env_fn, kwargs, num_envs)
    return Scheme(
        IMPALA.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        VTraceBuffer.create_factory(size), envs, num_col_workers=workers, col_communication="asynchronous",
        broadcast_interval=4, inference=inference, runtime="processes", seed=1)


def private_mb() -> float:
    """Return the median private memory of this process's descendants in MB of 2^20 bytes; NaN if there are none."""
    measured = map(sample, descendants({os.getpid()}, running_processes()) - {os.getpid()})
    found = [values["uss_mb"] * 1e6 / 2**20 for values in measured if values is not None]
    return statistics.median(found) if found else float("nan")


def rate(case: str, inference: str, seconds: str) -> dict[str, Any]:
    """Return the rate, lags and costs of one case."""
    scheme = make(case, inference)
    while scheme.version < 40:
        scheme.step()
    used, start = scheme.ledger()["consumed_unique"], time.perf_counter()
    while time.perf_counter() - start < float(seconds):
        scheme.step()
    elapsed, used = time.perf_counter() - start, scheme.ledger()["consumed_unique"] - used
    metrics, memory, total = scheme.metrics(), private_mb(), scheme.ledger()["collected"]
    scheme.stop()
    cpu = sum(getattr(resource.getrusage(who), field) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
              for field in ("ru_utime", "ru_stime"))
    return {"env_steps_per_s": used / elapsed, "policy_lag_mean": metrics["policy_lag"]["mean"],
            "worker_mb": memory, "cpu_us_per_step_with_start": 1e6 * cpu / total,
            "batch_mean": metrics["inference_batch_mean"], "inference_lag_mean": metrics["inference_lag_mean"]}


def score(inference: str, seed: str, steps: str) -> dict[str, Any]:
    """Train APPO, and return the mean return of the last 100 episodes."""
    import pytorchrl

    learner = pytorchrl.train(
        "appo", "CartPole-v1", target_steps=int(steps), seed=int(seed), num_col_workers=2, inference=inference,
        col_communication="asynchronous", runtime="processes", max_policy_lag=4)
    return {"return_mean": learner.return_mean}


def in_process(*arguments: Any) -> dict[str, Any]:
    """Run one measurement in its own process, in which each numerical library uses one thread."""
    done = subprocess.run([sys.executable, __file__, "_measure", *map(str, arguments)], capture_output=True, text=True,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stderr)
    print(*arguments, done.stdout.strip().splitlines()[-1], file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        what, *arguments = sys.argv[2:]
        measure = rate if what == "rates" else score
        print(json.dumps(measure(*arguments)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "scores"])
    parser.add_argument("--cases", default="sleeping,cartpole,images", help="for rates: cases, separated by commas")
    parser.add_argument("--pairs", type=int, default=3, help="for rates: measurements of each side")
    parser.add_argument("--seconds", type=float, default=10.0, help="for rates: length of one measurement")
    parser.add_argument("--seeds", type=int, default=3, help="for scores: number of seeds, from 1")
    parser.add_argument("--steps", type=int, default=100_000, help="for scores: env steps of a run")
    options = parser.parse_args()
    if options.what == "scores":
        results: dict[str, Any] = {
            side: [in_process("scores", side, seed, options.steps) for seed in range(1, options.seeds + 1)]
            for side in SIDES}
    else:
        results = {}
        for case in options.cases.split(","):
            results[case] = {side: [] for side in SIDES}
            for _ in range(options.pairs):
                for side in SIDES:
                    results[case][side].append(in_process("rates", case, side, options.seconds))
    print_result({"task": f"central inference, {options.what}", "results": results})


if __name__ == "__main__":
    main()
