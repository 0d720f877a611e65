"""Measure how much throughput and score change if stragglers stop early; one of eight workers is slow.

    python benchmarks/preemption.py [--runtime threads] [--seconds 20] [--step-ms 10] [--fractions 0.25,0.2,0.1]
    [--no-scores]

Throughput is the number of env steps per second in synchronous rounds. It is measured with `col_fraction_workers=0.75`
and each value of `fraction_samples`, and compared with rounds that wait for all workers. Environments sleep in each
step, and one of the eight collection workers is ten times slower than the others.

The output also contains the ideal throughput. Let a rollout have T steps of s seconds, let one worker be k times
slower, and let f be `fraction_samples`. Then a round has 7 T + n env steps and takes max(T, k n) s seconds, with
n = max(f T, T / k). Without preemption, a round has 8 T env steps and takes k T s seconds.

Scores are measured with PPO on CartPole-v1 in the simulated runtime, with and without preemption, for three seeds.
Again, one of the eight workers is ten times slower. A score is the mean return of the hundred most recent training
episodes after a given number of env steps. The output also contains the virtual seconds that these steps took.

The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from results import print_result

from pytorchrl import A2C, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import SleepEnv

NUM_WORKERS, NUM_STEPS, TIMES_SLOWER, FRACTION_WORKERS = 8, 40, 10, 0.75
WARM_UP_ROUNDS = 2
STATISTICS = ("preempted_by_worker", "preempted_steps_share", "episode_length_preempted", "episode_length_full")


def preemption(fraction_samples: float | None) -> dict[str, Any]:
    """Return the settings of a scheme with `fraction_samples`; with None, rounds wait for all workers."""
    told = {} if fraction_samples is None else {"col_fraction_workers": FRACTION_WORKERS,
                                                "fraction_samples": fraction_samples}
    return {"num_col_workers": NUM_WORKERS, **told}


def ideal(fraction_samples: float | None, step_s: float) -> float:
    """Return the env steps per second of an ideal scheme, in which only the steps of environments take time."""
    steps = NUM_STEPS if fraction_samples is None else max(round(fraction_samples * NUM_STEPS),
                                                           NUM_STEPS / TIMES_SLOWER)
    return ((NUM_WORKERS - 1) * NUM_STEPS + steps) / (max(NUM_STEPS, TIMES_SLOWER * steps) * step_s)


def throughput(fraction_samples: float | None, seconds: float, step_s: float, runtime: str) -> dict[str, Any]:
    """Return the ledger of one scheme, and its env steps per second, measured after the start-up."""
    envs = VecEnv.create_factory(SleepEnv, {"step_s": step_s})
    resources = {"col_worker_resources": {"num_cpus": 0}} if runtime == "ray" else {}
    scheme = Scheme(
        A2C.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                           hidden_sizes=(16,)),
        GAEBuffer.create_factory(NUM_STEPS), envs, seed=1, runtime=runtime, queue_timeout_s=120.0,
        faults=f"delay col.{NUM_WORKERS} {(TIMES_SLOWER - 1) * step_s}s", **preemption(fraction_samples), **resources)
    while scheme.version < WARM_UP_ROUNDS:
        scheme.step()
    first, rounds, start = scheme.ledger()["consumed_unique"], scheme.version, time.perf_counter()
    while time.perf_counter() - start < seconds:
        scheme.step()
    elapsed, metrics = time.perf_counter() - start, scheme.metrics()
    used, rounds = scheme.ledger()["consumed_unique"] - first, scheme.version - rounds
    ledger = scheme.stop()
    return {"fraction_samples": fraction_samples, "rounds": rounds, "env_steps_per_s": used / elapsed,
            "ideal": ideal(fraction_samples, step_s),
            "ledger_exact": ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values()),
            "steps_lost": sum(ledger["dropped"].values()), **{name: metrics[name] for name in STATISTICS}}


def score(fraction_samples: float | None, seed: int, env_steps: int) -> dict[str, Any]:
    """Train PPO on CartPole-v1 on a virtual clock, and return the score."""
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    scheme = Scheme(
        PPO.create_factory(num_epochs=4, num_mini_batch=4, lr=1e-3),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(32), envs,
        seed=seed,
        runtime="simulated", costs={"step": 0.005, f"step@*/CWorker {NUM_WORKERS}": 0.005 * TIMES_SLOWER},
        **preemption(fraction_samples))
    returns: list[float] = []
    while scheme.env_steps < env_steps:
        scheme.step()
        returns += [episode.env_return for episode in scheme.episodes()]
    metrics, seconds = scheme.metrics(), scheme.runtime.now() if scheme.runtime is not None else None
    ledger = scheme.stop()
    return {"fraction_samples": fraction_samples, "seed": seed, "env_steps": ledger["collected"],
            "return": statistics.fmean(returns[-100:]),
            "virtual_s": seconds, **{name: metrics[name] for name in STATISTICS}}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=["threads", "ray"], default="threads",
                        help="runtime of the collection workers")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one measurement")
    parser.add_argument("--step-ms", type=float, default=10.0, help="duration of a step of the environment in ms")
    parser.add_argument("--fractions", default="0.25,0.2,0.1", help="values of fraction_samples")
    parser.add_argument("--env-steps", type=int, default=100_000, help="length of a learning run")
    parser.add_argument("--seeds", type=int, default=3, help="number of learning runs of each kind")
    parser.add_argument("--no-scores", action="store_true", help="throughput only")
    options = parser.parse_args()
    fractions = [None, *(float(text) for text in options.fractions.split(","))]
    rates, scores = [], []
    for fraction in fractions:
        rates.append(throughput(fraction, options.seconds, options.step_ms / 1000, options.runtime))
        rates[-1]["times_as_fast"] = rates[-1]["env_steps_per_s"] / rates[0]["env_steps_per_s"]
        print(json.dumps(rates[-1]), file=sys.stderr, flush=True)
    for fraction in [] if options.no_scores else fractions:
        for seed in range(1, options.seeds + 1):
            scores.append(score(fraction, seed, options.env_steps))
            print(json.dumps(scores[-1]), file=sys.stderr, flush=True)
    print_result({
        "task": "preemption", "runtime": options.runtime, "step_ms": options.step_ms,
        "workers": NUM_WORKERS, "times_slower": TIMES_SLOWER,
        "col_fraction_workers": FRACTION_WORKERS,
        "rollout_steps": NUM_STEPS, "unit": "env steps per second", "throughput": rates, "scores": scores})


if __name__ == "__main__":
    main()
