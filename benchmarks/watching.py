"""Measure what watching costs a run: pairs of equal runs, one alone, one with records each second and a watcher.

Each pair trains PPO on CartPole-v1 with asynchronous collection, in a random order. The watcher is
`pytorchrl watch` in a pseudo-terminal of 200 columns. The script prints the median of the ratios of the speeds with a
95 % bootstrap interval, and the processor time of the watcher, start-up included, per second of its life.

    python benchmarks/watching.py --pairs 10
    python benchmarks/watching.py --smoke
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import numpy as np


def train(run_dir: Path, options: argparse.Namespace, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytorchrl", "train", "ppo", "--env", "CartPole-v1", "--num-envs", "4", "--num-steps",
         "64", "--num-col-workers", str(options.workers), "--col-communication", "asynchronous", "--runtime",
         options.runtime, "--target-steps", str(options.steps), "--seed", "1", "--no-progress", "--json", "--log-dir",
         str(run_dir), *flags], stdout=subprocess.PIPE, text=True)


def speed_of(process: subprocess.Popen[str]) -> float:
    output, _ = process.communicate()
    return float(json.loads(output.splitlines()[-1])["env_steps_per_s"])


def drain(master: int) -> None:
    try:
        while os.read(master, 65536):
            pass
    except OSError:  # the terminal is closed
        return


def watched(run_dir: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the speed of a watched run, and the watcher's processor seconds per second."""
    training = train(run_dir, options, "--log-every-s", "1")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    start = time.perf_counter()
    watcher = subprocess.Popen([sys.executable, "-m", "pytorchrl", "watch", "--wait", str(run_dir)],
                               stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    speed = speed_of(training)
    _, status, usage = os.wait4(watcher.pid, 0)
    watcher.returncode = os.waitstatus_to_exitcode(status)
    assert watcher.returncode == 0
    return speed, (usage.ru_utime + usage.ru_stime) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--runtime", default="processes", choices=("processes", "ray", "threads"))
    parser.add_argument("--smoke", action="store_true", help="one tiny pair")
    options = parser.parse_args()
    if options.smoke:
        options.pairs, options.steps, options.workers, options.runtime = 1, 2000, 1, "threads"
    rng, ratios, shares = random.Random(0), [], []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            speeds = {}
            for arm in rng.sample(("alone", "watched"), 2):
                if arm == "alone":
                    speeds[arm] = speed_of(train(Path(folder) / arm, options))
                else:
                    speeds[arm], share = watched(Path(folder) / arm, options)
                    shares.append(share)
        ratios.append(speeds["watched"] / speeds["alone"])
        print(f"pair {pair + 1}: alone {speeds['alone']:.0f}, watched {speeds['watched']:.0f} steps/s, "
              f"ratio {ratios[-1]:.3f}, watcher {shares[-1]:.3f} s per s", flush=True)
    draws = np.median(np.random.default_rng(0).choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    print(f"watched / alone: median {np.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}, "
          f"{len(ratios)} pairs; watcher: {np.median(shares):.3f} s of processor time per s")


if __name__ == "__main__":
    main()
