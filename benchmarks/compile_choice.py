"""Compare the processor time of whole runs of `train` by default, compiled and not compiled, and of SBX.

    python benchmarks/compile_choice.py [--cases ppo-cartpole dqn-cartpole] [--pairs 2] [--cache cold]
    python benchmarks/compile_choice.py --cases sac-halfcheetah --variants default sbx --sbx-python VENV/bin/python

A run is one process, from its start to its end: imports, compilation, training and the reading of results. Its time is
the processor time of the process and of all processes that descend from it. The runs of a case follow each other, and
the order changes with each round. With `--together`, they run at the same time, in turns of half a second: all but one
are stopped. Use this on a machine whose speed changes, because other programs use it.

`train` gets nothing but the algorithm, the environment, the number of env steps and a seed. SBX gets the settings of
this library's presets for MuJoCo that matter for the time (networks, batch size, one update per env step, random
actions in the first 5,000 env steps), and one thread. With `--cache cold`, each run begins without compiled code. With
`--cache warm`, each variant is run once before the first round, which is not measured, and the runs then use the code
that it has compiled.

With `--until STEPS`, runs stop early, although their `target_steps` stay the same. The time of a whole run is then
estimated: the time of the stopped run, and for each missing env step the time of an env step in the last quarter of the
stopped run. Choose a number of steps whose last quarter contains no compilation and no random actions. The estimate is
exact enough to tell where compilation begins to pay off: see `break_even` in `report.py`. `--target-steps` replaces the
target of the cases, because the choice of `train` depends on it.

The script prints one line of JSON per run, and appends it to the file `--out`, if it is given. It asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import origin

ROOT = Path(__file__).resolve().parents[1]
CASES: dict[str, tuple[str, str, int]] = {
    "ppo-cartpole": ("ppo", "CartPole-v1", 100_000),
    "dqn-cartpole": ("dqn", "CartPole-v1", 40_000),
    "sac-halfcheetah": ("sac", "HalfCheetah-v5", 50_000),
    "td3-halfcheetah": ("td3", "HalfCheetah-v5", 50_000),
    "ppo-halfcheetah": ("ppo", "HalfCheetah-v5", 300_000)}
"""Name -> algorithm, environment and number of env steps."""
OPTIONS: dict[str, dict[str, bool]] = {"default": {}, "compiled": {"compile": True}, "eager": {"compile": False}}
"""Name of a variant of this library -> options of `train`."""
SBX = "sbx"
TURN_S = 0.5
"""Length of a turn of a run, in seconds."""


class Marks:
    """The processor time of this process at three quarters of a number of env steps, and at this number.

    Args:
        until: The number of env steps.
    """

    def __init__(self, until: int) -> None:
        self._due = [until * 3 // 4, until]
        self._found: list[tuple[int, float]] = []

    def reach(self, env_steps: int) -> bool:
        """Note the time if a mark has been reached, and return whether it is the last one."""
        if env_steps >= self._due[len(self._found)]:
            self._found.append((env_steps, time.process_time()))
        return len(self._found) == len(self._due)

    def figures(self) -> dict[str, Any]:
        """Return the seconds per env step between the marks, and the env steps at the last mark; {} if not reached."""
        if len(self._found) < len(self._due):
            return {}
        (first, start), (last, end) = self._found
        return {"s_per_step": (end - start) / (last - first), "stopped_at": last}


def ours(case: str, variant: str, steps: int, seed: int, until: int, folder: str) -> dict[str, Any]:
    """Train by this library, and return the choice of the run and its figures."""
    import pytorchrl
    from pytorchrl.callbacks import Callback

    algorithm, env, _ = CASES[case]
    marks = Marks(until)

    class Stop(Callback):
        def on_step(self, run: pytorchrl.Learner, info: dict[str, float]) -> None:
            if marks.reach(run.env_steps):
                run.request_stop("the benchmark has measured enough")

    options: dict[str, Any] = {**OPTIONS[variant], **({"callbacks": [Stop()]} if until else {})}
    agent = pytorchrl.train(algorithm, env, target_steps=steps, seed=seed, log_dir=f"{folder}/run", progress=False,
                            **options)
    started = json.loads(Path(folder, "run", "run.json").read_text(encoding="utf-8"))
    return {"is_compiled": started["agent"]["algo_factory"]["options"]["compile"],
            "env_steps": agent.summary["env_steps"], "updates": agent.summary["updates"],
            "return_mean": agent.return_mean, **marks.figures()}


def sbx(case: str, steps: int, seed: int, until: int) -> dict[str, Any]:
    """Train SAC or TD3 by SBX, with the settings of this library's preset for MuJoCo."""
    import importlib.metadata

    import gymnasium
    import numpy
    import torch  # type: ignore[import-not-found,unused-ignore]
    from sbx import SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.noise import NormalActionNoise

    marks = Marks(until)

    class Stop(BaseCallback):  # type: ignore[misc,unused-ignore]
        def _on_step(self) -> bool:
            return not (until and marks.reach(self.num_timesteps))

    torch.set_num_threads(1)
    algorithm, name, _ = CASES[case]
    env = Monitor(gymnasium.make(name))
    settings: dict[str, Any] = {
        "learning_rate": 1e-3, "buffer_size": 1_000_000, "learning_starts": 5000, "batch_size": 256, "tau": 0.005,
        "gamma": 0.99, "train_freq": 1, "gradient_steps": 1, "seed": seed, "policy_kwargs": {"net_arch": [256, 256]}}
    if algorithm == "td3":
        count = env.action_space.shape[0]
        settings["action_noise"] = NormalActionNoise(numpy.zeros(count), 0.1 * numpy.ones(count))
    model = {"sac": SAC, "td3": TD3}[algorithm]("MlpPolicy", env, **settings)
    model.learn(steps, callback=Stop())
    returns = [episode["r"] for episode in model.ep_info_buffer]
    return {"env_steps": model.num_timesteps, "updates": model._n_updates, "return_mean": float(numpy.mean(returns)),
            "versions": {package: importlib.metadata.version(package) for package in ("sbx-rl", "jax")},
            **marks.figures()}


def measured(commands: list[list[str]], envs: list[dict[str, str]]) -> list[tuple[dict[str, Any], float, float]]:
    """Run commands in turns; return the last line of each, a JSON object, its processor time and its duration.

    The processor time includes that of all descendants. Both times are in seconds.
    """
    with contextlib.ExitStack() as stack:
        start = time.perf_counter()
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        running = {}
        for index, (command, env, output) in enumerate(zip(commands, envs, outputs, strict=True)):
            process = subprocess.Popen(command, env=env, stdout=output, start_new_session=True)
            running[process.pid] = index
            if len(commands) > 1:
                os.killpg(process.pid, signal.SIGSTOP)
        times: list[tuple[float, float]] = [(math.nan, math.nan)] * len(commands)
        try:
            while running:
                for pid, index in list(running.items()):
                    if len(commands) == 1:
                        _, status, used = os.wait4(pid, 0)
                    else:
                        os.killpg(pid, signal.SIGCONT)
                        time.sleep(TURN_S)
                        ended, status, used = os.wait4(pid, os.WNOHANG)
                        if not ended:
                            os.killpg(pid, signal.SIGSTOP)
                            continue
                    del running[pid]
                    times[index] = used.ru_utime + used.ru_stime, time.perf_counter() - start
                    if status:
                        raise SystemExit(f"{commands[index]} failed with status {status}")
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
        for output in outputs:
            output.seek(0)
        return [(json.loads(output.read().splitlines()[-1]), *figures)
                for output, figures in zip(outputs, times, strict=True)]


def run(case: str, variants: list[str], steps: int, seed: int, until: int, cache: str | None,
        sbx_python: str | None) -> list[dict[str, Any]]:
    """Measure runs of a case, each in a process of its own.

    Args:
        case: Name of the case.
        variants: Names of the variants; several take turns.
        steps: Env steps of a whole run.
        seed: Seed of the runs.
        until: Env steps after which the runs stop; 0: they do not.
        cache: Directory of compiled code; None: an empty one.
        sbx_python: Interpreter for the variant sbx.
    """
    commands, envs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            python = sbx_python if variant == SBX and sbx_python else sys.executable
            commands.append([python, "-W", "ignore", __file__, "--child", case, variant, str(steps), str(seed),
                             str(until), f"{folder}/{variant}"])
            envs.append({**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                         "TORCHINDUCTOR_CACHE_DIR": cache or f"{folder}/{variant}/cache", "JAX_PLATFORMS": "cpu",
                         "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"})
        load = os.getloadavg()[0]
        results = measured(commands, envs)
    lines = []
    for variant, (found, cpu_s, seconds) in zip(variants, results, strict=True):
        missing = max(0, steps - found.get("stopped_at", steps))
        found["whole_cpu_s"] = round(cpu_s + missing * found.get("s_per_step", 0.0), 2)
        lines.append({"case": case, "target_steps": steps, "variant": variant, "seed": seed,
                      "together": len(variants) > 1, "cpu_s": round(cpu_s, 2), "seconds": round(seconds, 1),
                      "load": round(load, 1), **found})
    return lines


def main() -> None:
    """Parse the command line, measure the runs, and print their results."""
    if sys.argv[1:2] == ["--child"]:
        case, variant, *numbers, folder = sys.argv[2:]
        steps, seed, until = map(int, numbers)
        found = sbx(case, steps, seed, until) if variant == SBX else ours(case, variant, steps, seed, until, folder)
        print("\n" + json.dumps(found), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--variants", nargs="+", choices=[*OPTIONS, SBX], default=list(OPTIONS))
    parser.add_argument("--pairs", type=int, default=1, help="number of rounds, each with its own seed")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--target-steps", type=int, help="env steps of whole runs, instead of those of the cases")
    parser.add_argument("--until", type=int, default=0, help="env steps after which runs stop; 0: they do not")
    parser.add_argument("--cache", choices=["cold", "warm"], default="cold")
    parser.add_argument("--together", action="store_true",
                        help="run the variants of a case at the same time, in turns of half a second")
    parser.add_argument("--sbx-python", help="interpreter with sbx-rl, needed for the variant sbx")
    parser.add_argument("--out", type=Path, help="file to which each line is appended")
    options = parser.parse_args()
    if options.together and options.cache == "warm":
        parser.error("--together needs --cache cold")
    if SBX in options.variants and options.sbx_python is None:
        parser.error("the variant sbx needs --sbx-python")
    with tempfile.TemporaryDirectory() as shared:
        caches = {variant: f"{shared}/{variant}" if options.cache == "warm" else None for variant in options.variants}
        for case in options.cases:
            steps = options.target_steps or CASES[case][2]
            if options.cache == "warm":
                for variant in options.variants:
                    run(case, [variant], steps, options.first_seed, options.until, caches[variant],
                        options.sbx_python)
            for pair in range(options.pairs):
                order = options.variants if pair % 2 == 0 else options.variants[::-1]
                for group in [order] if options.together else [[variant] for variant in order]:
                    found = run(case, group, steps, options.first_seed + pair, options.until, caches[group[0]],
                                options.sbx_python)
                    text = "".join(
                        json.dumps({**origin(), "cache": options.cache, **line}) + "\n" for line in found)
                    print(text, end="", flush=True)
                    if options.out is not None:
                        with options.out.open("a", encoding="utf-8") as file:
                            file.write(text)


if __name__ == "__main__":
    main()
