"""Compare worker processes without Ray (`runtime="processes"`) with Ray, in alternating runs.

    python benchmarks/processes.py message [--pairs 3]
    python benchmarks/processes.py rates [--pairs 3] [--seconds 10] [--tasks cartpole,pong]
    python benchmarks/processes.py sleeping [--pairs 3] [--seconds 10] [--workers 32,64]

`message` measures the processor time that the learner's process spends to request and receive one rollout: of small
vectors (CartPole-v1, 64 environments x 20 steps), and of images (8 environments x 32 steps of 84 x 84 x 4 uint8).
`rates` measures the env steps per second of PPO with two asynchronous collection workers, on CartPole-v1 and on Pong.
`sleeping` measures PPO with asynchronous collection from environments whose step sleeps for 5 ms, and the rate of the
same number of processes that only step this environment.

Ray's workers run with niceness 0. The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from results import print_result
from throughput import bare_sleeping, measure, sleeping

RUNTIMES = ("processes", "ray")
MESSAGES = {"vectors": (64, 20), "images": (8, 32)}


class Sender:
    """A worker that collects one rollout, and then sends it whenever it is asked."""

    def __init__(self, kind: str) -> None:
        from learner_feed import Pictures

        from pytorchrl import IMPALA, OnPolicyActor, VecEnv, VTraceBuffer
        from pytorchrl.scheme.collection.c_worker import CWorker
        from pytorchrl.scheme.collection.c_worker_set import CWorkerSet

        num_envs, num_steps = MESSAGES[kind]
        envs = VecEnv.create_factory("CartPole-v1" if kind == "vectors" else Pictures, vec_env_size=num_envs)
        recipe = CWorkerSet.create_factory(
            2, IMPALA.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
            VTraceBuffer.create_factory(size=num_steps), envs)
        self._rollout = CWorker(1, recipe).collect()

    def send(self) -> Any:
        """Return the rollout."""
        return self._rollout


def message(runtime_name: str, kind: str, number: int) -> dict[str, float]:
    """Return two times per rollout in the receiving process, in ms: processor time and waiting time."""
    from pytorchrl.runtime import make_runtime, options_of_runtime
    from pytorchrl.scheme.transport.receive import receive

    runtime = make_runtime(options_of_runtime(runtime_name, {}))
    worker = runtime.start_actor(Sender, {"kind": kind}, name="GWorker 0/CWorker 1", resources={"num_cpus": 1})
    for rounds in (number // 5, number):
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            future = worker.submit(Sender.send)
            runtime.wait([future], 60.0)
            receive(runtime.get(future, 60.0), time.perf_counter)
        elapsed, used = time.perf_counter() - start, time.process_time() - cpu
    runtime.close()
    return {"cpu_ms": 1e3 * used / number, "elapsed_ms": 1e3 * elapsed / number}


def rate(runtime: str, task: str, seconds: float) -> dict[str, Any]:
    """Return the env steps per second of PPO with two asynchronous collection workers."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs import atari_factory

    envs = (VecEnv.create_factory("CartPole-v1", vec_env_size=8) if task == "cartpole"
            else atari_factory("ALE/Pong-v5", 8))
    scheme = Scheme(
        PPO.create_factory(num_epochs=4, num_mini_batch=4),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(128), envs,
        num_col_workers=2, col_communication="asynchronous", queue_size=2, col_in_flight=1, seed=1, runtime=runtime)
    return measure(scheme, seconds, warm_up_updates=40 if task == "cartpole" else 8)


def in_process(*arguments: Any) -> Any:
    """Run one measurement in its own process, in which each numerical library uses one thread."""
    done = subprocess.run([sys.executable, __file__, "_measure", *map(str, arguments)], capture_output=True, text=True,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                                            "RAY_worker_niceness": "0"})
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    print(arguments, done.stdout.strip(), file=sys.stderr, flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measured(what: str, *arguments: str) -> Any:
    """Return one measurement of this process."""
    if what == "message":
        return message(arguments[0], arguments[1], int(arguments[2]))
    if what == "rates":
        return rate(arguments[0], arguments[1], float(arguments[2]))
    if arguments[0] == "bare":
        return {"env_steps_per_s": bare_sleeping(int(arguments[1]), float(arguments[2]))}
    return sleeping(int(arguments[1]), float(arguments[2]), arguments[0])


def compared(what: str, case: str, key: str, last: float, pairs: int) -> dict[str, Any]:
    """Measure one case in alternating runs; return the numbers of each runtime, and their medians."""
    sides = (*RUNTIMES, "bare") if what == "sleeping" else RUNTIMES
    rows: dict[str, list[Any]] = {side: [] for side in sides}
    for _ in range(pairs):
        for side in sides:
            rows[side].append(in_process(what, side, case, last))
    medians = {side: statistics.median(row[key] for row in found) if all(key in row for row in found) else None
               for side, found in rows.items()}
    return {"medians": medians, "runs": rows}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        print(json.dumps(measured(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["message", "rates", "sleeping"])
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each side")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument("--rollouts", type=int, default=2000, help="for message: number of rollouts")
    parser.add_argument("--tasks", default="cartpole,pong", help="for rates: tasks, separated by commas")
    parser.add_argument("--workers", default="32,64", help="for sleeping: numbers of workers")
    options = parser.parse_args()
    cases, key, last = {
        "message": (list(MESSAGES), "cpu_ms", options.rollouts),
        "rates": (options.tasks.split(","), "env_steps_per_s", options.seconds),
        "sleeping": (options.workers.split(","), "env_steps_per_s", options.seconds)}[options.what]
    found = {case: compared(options.what, case, key, last, options.pairs) for case in cases}
    print_result({"task": f"processes {options.what}", "unit": key, "results": found})


if __name__ == "__main__":
    main()
