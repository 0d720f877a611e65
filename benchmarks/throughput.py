"""Measure the env steps per second of training, and compare them with Stable-Baselines3 if it is installed.

    python benchmarks/throughput.py cartpole [--pairs 5] [--schemes central,best]
    python benchmarks/throughput.py pong [--pairs 3]
    python benchmarks/throughput.py sleeping [--workers 2,8,32] [--niceness 0]

`cartpole` is PPO on CartPole-v1 with 8 environments x 128 steps, 4 epochs x 4 minibatches of 256, and an MLP of 64-64.
`pong` is PPO on Pong with 8 environments x 128 steps, 4 epochs x 4 minibatches of 256, the Nature CNN, and 4 stacked
84 x 84 frames. `sleeping` is PPO with asynchronous collection from environments that sleep 5 ms in each step. Its rate
is compared with the ideal rate, workers / 5 ms, and with the rate of the same number of processes that only step the
environment.

Each measurement runs in its own process, and does not include start-up and compilation. The two libraries run one
after the other, so that each ratio compares measurements made within minutes of each other. The script prints one JSON
object and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from results import print_result

STEP_S = 0.005
"""Seconds per step of the sleeping environment."""
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "cartpole": {
        "central": {},
        "central_eager": {"algo": {"compile": False}},
        "async_in_process": {"col_communication": "asynchronous", "queue_size": 1, "col_in_flight": 1},
        "async_2_collectors": {"num_col_workers": 2, "col_communication": "asynchronous", "queue_size": 2,
                               "col_in_flight": 1, "num_envs": 8},
        "parallel_sync_2_collectors": {"num_col_workers": 2, "num_envs": 4},
    },
    "pong": {
        "central_1_thread": {},
        "central_2_threads": {"num_threads": 2},
        "async_2_threads": {"col_communication": "asynchronous", "queue_size": 1, "col_in_flight": 1, "num_threads": 2},
        "parallel_gradients": {"num_grad_workers": 2, "num_envs": 4},
        "decentralized": {"num_grad_workers": 2, "num_envs": 4, "distribute_gradients": True},
    },
}
BEST = {"cartpole": "async_2_collectors", "pong": "async_2_threads"}


def ours(task: str, name: str, seconds: float) -> dict[str, Any]:
    """Return the env steps per second of this library in one scheme, and each part's share of the time."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs import atari_factory

    settings = dict(OURS[task][name])
    num_envs = settings.pop("num_envs", 8)
    algo: dict[str, Any] = {"num_epochs": 4, "num_mini_batch": 4, "compile": True,
                            "mixed_precision": "auto" if task == "pong" else False} | settings.pop("algo", {})
    envs = (VecEnv.create_factory("CartPole-v1", vec_env_size=num_envs) if task == "cartpole"
            else atari_factory("ALE/Pong-v5", num_envs))
    scheme = Scheme(
        PPO.create_factory(**algo), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        GAEBuffer.create_factory(128), envs, seed=1, **settings)
    return measure(scheme, seconds, warm_up_updates=40 if task == "cartpole" else 8)


def measure(scheme: Any, seconds: float, warm_up_updates: int, multiple: int = 1) -> dict[str, Any]:
    """Return the env steps used per second after a warm-up.

    The number of measured updates is a multiple of `multiple`, so that the rollouts of all workers are used equally
    often. Otherwise, one additional rollout of a slow worker would change the rate by several percent.
    """
    while scheme.version < warm_up_updates:
        scheme.step()
    times = scheme.metrics()["time_s"]
    first, start, version = scheme.ledger()["consumed_unique"], time.perf_counter(), scheme.version
    while time.perf_counter() - start < seconds or (scheme.version - version) % multiple:
        scheme.step()
    elapsed = time.perf_counter() - start
    used = scheme.ledger()["consumed_unique"] - first
    metrics = scheme.metrics()
    shares = {level: {part: round((seconds - times[level][part]) / elapsed, 3) for part, seconds in parts.items()}
              for level, parts in metrics["time_s"].items()}
    stopped = time.perf_counter()
    scheme.stop()
    return {"env_steps_per_s": used / elapsed, "share_of_time": shares,
            "policy_lag_mean": metrics["policy_lag"]["mean"],
            "stop_s": round(time.perf_counter() - stopped, 2)}


def sleeping(num_workers: int, seconds: float, runtime: str = "ray") -> dict[str, Any]:
    """Return the env steps per second of asynchronous training with one sleeping environment per worker."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import SleepEnv

    envs = VecEnv.create_factory(SleepEnv, {"step_s": STEP_S})
    scheme = Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(200), envs,
        num_col_workers=num_workers, col_communication="asynchronous", broadcast_interval=num_workers, seed=1,
        runtime=runtime)
    result = measure(scheme, seconds, warm_up_updates=4 * num_workers, multiple=num_workers)
    ideal = num_workers / STEP_S
    return result | {"workers": num_workers, "ideal": ideal, "share_of_ideal": result["env_steps_per_s"] / ideal}


def beside_bare(num_workers: int, seconds: float) -> dict[str, Any]:
    """Return the rate of `sleeping`, and the rate of processes that only step the environment."""
    result, bare = sleeping(num_workers, seconds), bare_sleeping(num_workers, seconds)
    return result | {"bare_env_steps_per_s": bare, "share_of_bare": result["env_steps_per_s"] / bare}


def bare_sleeping(num_workers: int, seconds: float) -> float:
    """Return the env steps per second of `num_workers` processes that only step the same environment."""
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        return sum(pool.map(_step_bare_env, [seconds] * num_workers, chunksize=1))


def _step_bare_env(seconds: float) -> float:
    from pytorchrl.envs.testing import SleepEnv

    env = SleepEnv(step_s=STEP_S)
    env.reset()
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        env.step(0)
        steps += 1
    return steps / elapsed


def stable_baselines3(task: str, seconds: float) -> dict[str, Any]:
    """Return the env steps per second of Stable-Baselines3's PPO with the same settings and one torch thread."""
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    torch.set_num_threads(1)
    if task == "cartpole":
        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 8), n_steps=128, batch_size=256, n_epochs=4, seed=1,
                    policy_kwargs={"net_arch": [64, 64]}, device="cpu")
    else:
        import ale_py

        gymnasium.register_envs(ale_py)
        envs = VecFrameStack(make_atari_env("PongNoFrameskip-v4", 8, seed=1), 4)
        model = PPO("CnnPolicy", envs, n_steps=128, batch_size=256, n_epochs=4, clip_range=0.1, device="cpu")

    class Clock(BaseCallback):
        """Callback that measures the rate between the start of the second rollout and the start of a later one."""

        def __init__(self) -> None:
            super().__init__()
            self.rollouts, self.start, self.first, self.rate = 0, 0.0, 0, 0.0

        def _on_rollout_start(self) -> None:
            self.rollouts += 1
            if self.rollouts == 2:
                self.start, self.first = time.perf_counter(), self.num_timesteps
            elif self.rollouts > 2:
                self.rate = (self.num_timesteps - self.first) / (time.perf_counter() - self.start)

        def _on_step(self) -> bool:
            return self.rollouts < 3 or time.perf_counter() - self.start < seconds

    clock = Clock()
    model.learn(10**9, callback=clock)
    return {"env_steps_per_s": clock.rate}


def in_process(arguments: list[str]) -> dict[str, Any]:
    """Run one measurement in its own process, in which each numerical library uses one thread."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if "num_threads" in json.dumps(OURS.get(arguments[1], {}).get(arguments[-1], {})):
        threads = {}
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, **threads})
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def compare(task: str, schemes: list[str], pairs: int, seconds: float) -> dict[str, Any]:
    """Measure this library and Stable-Baselines3 in pairs; return the ratios of the rates, and their medians."""
    names = [BEST[task] if name == "best" else name for name in schemes]
    result: dict[str, Any] = {}
    for name in names:
        rows = []
        for _ in range(pairs):
            mine = in_process(["_measure", task, str(seconds), name])
            theirs = in_process(["_measure", task, str(seconds), "stable-baselines3"])
            rows.append((mine, theirs))
            print(json.dumps({name: mine, "stable-baselines3": theirs}), file=sys.stderr, flush=True)
        good = [(a, b) for a, b in rows if "env_steps_per_s" in a and b.get("env_steps_per_s")]
        ratios = sorted(a["env_steps_per_s"] / b["env_steps_per_s"] for a, b in good)
        result[name] = {
            "ratio_median": statistics.median(ratios) if ratios else None, "ratios": [round(r, 2) for r in ratios],
            "ours_median": statistics.median(a["env_steps_per_s"] for a, _ in good) if good else None,
            "theirs_median": statistics.median(b["env_steps_per_s"] for _, b in good) if good else None,
            "share_of_time": rows[-1][0].get("share_of_time"), "errors": [a for a, _ in rows if "error" in a]}
    return result


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:2] == ["_measure"]:
        task, seconds, name = sys.argv[2], float(sys.argv[3]), sys.argv[4]
        result = (beside_bare(int(name), seconds) if task == "sleeping" else
                  stable_baselines3(task, seconds) if name == "stable-baselines3" else ours(task, name, seconds))
        print(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["cartpole", "pong", "sleeping"])
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument("--schemes", default="central,best", help="schemes, separated by commas; 'all' for all schemes")
    parser.add_argument("--workers", default="2,8,32", help="for sleeping: numbers of workers")
    parser.add_argument("--niceness", type=int,
                        default=int(os.environ.get("RAY_worker_niceness", "15")),  # noqa: SIM112 - Ray's name
                        help="niceness of Ray's workers; default: RAY_worker_niceness, or Ray's own default of 15")
    options = parser.parse_args()
    os.environ.update(RAY_worker_niceness=str(options.niceness))
    if options.task == "sleeping":
        found: Any = [in_process(["_measure", "sleeping", str(options.seconds), n]) for n in options.workers.split(",")]
    else:
        chosen = list(OURS[options.task]) if options.schemes == "all" else options.schemes.split(",")
        if options.task == "pong":
            chosen = [name.replace("central", "central_1_thread") if name == "central" else name for name in chosen]
        found = compare(options.task, chosen, options.pairs, options.seconds)
    print_result({"task": options.task, "niceness": options.niceness,
                  "unit": "env steps used for learning per second", "results": found})


if __name__ == "__main__":
    main()
