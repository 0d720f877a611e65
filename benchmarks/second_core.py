"""Compare training on one core with forms that use two cores: worker processes, threads of a product, or both.

    python benchmarks/second_core.py [--tasks cartpole,pong,dqn,sac,r2d2] [--forms one,worker,threads] [--pairs 5]
                                     [--seconds 10]
    python benchmarks/second_core.py --score-steps 100000 [--tasks cartpole,dqn,r2d2] [--forms ...] [--seeds 3]
                                     [--episodes 100]

The forms are:

- `one`: the whole run is in one process, which is pinned to one core;
- `worker`: one asynchronous collection worker in its own process (`runtime="processes"`), one thread for the learner;
- `ahead`: the same, but two rollouts may wait in the queue, and the worker has two requests;
- `threads`: the whole run is in one process, and products use two threads;
- `learners`: two gradient workers in their own processes, each of which collects, computes gradients and sends them to
  this process, which applies each gradient when it arrives (`grad_communication="asynchronous"`);
- `learners3`: the same with three gradient workers, so that both cores are busy while a worker waits for its weights.

The tasks are PPO and APPO on CartPole-v1 (8 environments x 128 steps, 4 epochs x 4 minibatches of 256), PPO on Pong
(the same sizes, the Nature CNN, and bfloat16 if it is faster on this processor), DQN on CartPole-v1 (an update of 64
transitions per 4 env steps), SAC on HalfCheetah-v5 and, as `pendulum`, on Pendulum-v1 (an update of 256 per env step),
and R2D2 on CartPole-v1 with its preset. Updates are compiled if the algorithm supports it. In each form, the ratio of
updates to env steps is the same. DQN's worker sends rollouts of 64 steps. The gradient workers of SAC share the 1,000
env steps before the first update, so that all forms make the same number of updates.

Each measurement runs in its own process, without start-up and compilation; the forms alternate. For each form, the
script prints env steps and updates per second, the ratio to `one` in the same round, and the lags of data and gradients
(in updates). With `--score-steps`, each form is instead trained for this number of env steps with several seeds, and
the script prints the mean return of the last training episodes of each run, by default 100. It prints one JSON object
and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from typing import Any

from results import print_result

NUM_LEARNERS = {"learners": 2, "learners3": 3}
FORMS = ("one", "worker", "ahead", "threads", *NUM_LEARNERS)


def make(task: str, form: str, seed: int = 1) -> Any:
    """Return the scheme of one task and form."""
    import pytorchrl
    from pytorchrl import GAEBuffer, OffPolicyActor, OnPolicyActor, QActor, ReplayBuffer, Scheme, VecEnv, VTraceBuffer
    from pytorchrl.envs import atari_factory

    settings: dict[str, Any] = {"seed": seed, "num_threads": 2 if form == "threads" else 1}
    has_worker = form in ("worker", "ahead")
    if has_worker:
        ahead = 2 if form == "ahead" else 1
        settings |= {"num_col_workers": 1, "col_execution": "Parallel", "col_communication": "asynchronous",
                     "runtime": "processes", "queue_size": ahead, "col_in_flight": ahead}
    elif form in NUM_LEARNERS:
        settings |= {"num_grad_workers": NUM_LEARNERS[form], "grad_communication": "asynchronous",
                     "runtime": "processes"}
    if task in ("cartpole", "appo"):
        envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
        algorithm = getattr(pytorchrl, "PPO" if task == "cartpole" else "APPO")
        storage = GAEBuffer if task == "cartpole" else VTraceBuffer
        return Scheme(
            algorithm.create_factory(num_epochs=4, num_mini_batch=4, compile=True),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space), storage.create_factory(128), envs,
            **settings)
    if task == "pong":
        envs = atari_factory("ALE/Pong-v5", 8)
        return Scheme(
            pytorchrl.PPO.create_factory(num_epochs=4, num_mini_batch=4, compile=True, mixed_precision="auto"),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(128),
            envs, **settings)
    if task == "dqn":
        envs = VecEnv.create_factory("CartPole-v1")
        return Scheme(
            pytorchrl.DQN.create_factory(lr=1e-3, mini_batch_size=64, start_steps=1_000, compile=True),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(64, 64)),
            ReplayBuffer.create_factory(50_000, rollout_size=64 if has_worker else 4), envs, **settings)
    if task in ("sac", "pendulum"):
        envs = VecEnv.create_factory("HalfCheetah-v5" if task == "sac" else "Pendulum-v1")
        return Scheme(
            pytorchrl.SAC.create_factory(start_steps=1_000 // NUM_LEARNERS.get(form, 1), update_every=1, num_updates=1,
                                         compile=True),
            OffPolicyActor.create_factory(envs.observation_space, envs.action_space, policy="stochastic"),
            ReplayBuffer.create_factory(100_000, rollout_size=1), envs, **settings)
    return _r2d2(settings)


def _r2d2(settings: dict[str, Any]) -> Any:
    from pytorchrl import R2D2, QActor, Scheme, SequenceBuffer, VecEnv

    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    return Scheme(
        R2D2.create_factory(start_steps=1000, update_every=32, num_updates=1, mini_batch_size=32, lr=1e-3,
                            target_update_interval=100),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(64,), dueling=True,
                              recurrent_net="gru", recurrent_size=64),
        SequenceBuffer.create_factory(50_000, rollout_size=8, length=16, burn_in=8, period=8, n_step=3), envs,
        **settings)


def used_steps(scheme: Any) -> int:
    """Return the number of env steps that updates have used, or that were inserted into replay."""
    ledger = scheme.ledger()
    return int(ledger["consumed_unique"] + ledger["resident"] + ledger["evicted"])


def measure(task: str, form: str, seconds: float) -> dict[str, Any]:
    """Return the env steps and updates per second of one form, and its policy lag."""
    if form == "one":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    scheme = make(task, form)
    while scheme.version < 60:
        scheme.step()
    steps, version, start = used_steps(scheme), scheme.version, time.perf_counter()
    while time.perf_counter() - start < seconds:
        scheme.step()
    elapsed = time.perf_counter() - start
    found = {"env_steps_per_s": (used_steps(scheme) - steps) / elapsed,
             "updates_per_s": (scheme.version - version) / elapsed}
    metrics = scheme.metrics()
    scheme.stop()
    lags = {name: {part: metrics[name][part] for part in ("mean", "max")} for name in ("policy_lag", "grad_lag")}
    return found | lags


def score(task: str, form: str, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    """Return the mean return of the last training episodes of a run, its lags and its seconds."""
    if form == "one":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    scheme, returns, start = make(task, form, seed), deque[float](maxlen=episodes), time.perf_counter()
    scheme.start(steps)
    while scheme.env_steps < steps:
        scheme.step()
        returns.extend(episode.env_return for episode in scheme.episodes())
    metrics, seconds = scheme.metrics(), time.perf_counter() - start
    scheme.stop()
    return {"seed": seed, "score": statistics.fmean(returns), "updates": metrics["updates"], "seconds": seconds,
            **{name: metrics[name]["mean"] for name in ("policy_lag", "grad_lag")}}


def in_process(task: str, form: str, *what: object) -> dict[str, Any]:
    """Run one measurement in its own process: `measure(task, form, seconds)`, or `score(task, form, seed, ...)`."""
    threads = "2" if form == "threads" else "1"
    done = subprocess.run([sys.executable, __file__, "_measure", task, form, *map(str, what)], capture_output=True,
                          text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": threads})
    if done.returncode:
        raise SystemExit(done.stderr)
    print(task, form, done.stdout.strip(), file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(task: str, forms: list[str], pairs: int, seconds: float) -> dict[str, Any]:
    """Measure the forms in turns; return the medians and all values."""
    rows: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    for _ in range(pairs):
        for form in forms:
            rows[form].append(in_process(task, form, seconds))
    one = [row["env_steps_per_s"] for row in rows[forms[0]]]
    ratios = {form: [row["env_steps_per_s"] / base for row, base in zip(found, one, strict=True)]
              for form, found in rows.items()}
    return {"median_ratio": {form: statistics.median(found) for form, found in ratios.items()}, "ratios": ratios,
            "runs": rows}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        task, form, *what = sys.argv[2:]
        found = measure(task, form, float(what[0])) if len(what) == 1 else score(task, form, *map(int, what))
        print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cartpole,dqn,sac,r2d2", help="tasks, separated by commas")
    parser.add_argument("--forms", default="one,worker,threads",
                        help="forms, separated by commas; the ratios are relative to the first")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each form")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument("--score-steps", type=int, help="train for this number of env steps, and print scores instead")
    parser.add_argument("--seeds", type=int, default=3, help="for scores: number of seeds, from 1")
    parser.add_argument("--episodes", type=int, default=100, help="for scores: number of episodes at the end of a run")
    options = parser.parse_args()
    forms = options.forms.split(",")
    if unknown := set(forms) - set(FORMS):
        parser.error(f"unknown forms: {', '.join(sorted(unknown))}; known: {', '.join(FORMS)}")
    results: dict[str, Any] = {}
    for task in options.tasks.split(","):
        if options.score_steps is None:
            results[task] = compared(task, forms, options.pairs, options.seconds)
        else:
            results[task] = {form: [in_process(task, form, seed, options.score_steps, options.episodes)
                                    for seed in range(1, options.seeds + 1)] for form in forms}
    print_result({"task": "second core", "results": results})


if __name__ == "__main__":
    main()
