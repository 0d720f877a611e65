"""Measure what watching costs a run: pairs of equal runs, one alone, one with records each second and a watcher.

Each pair trains PPO on CartPole-v1 in a random order, by default with asynchronous collection. The watcher is
`pytorchrl watch` in a pseudo-terminal of 200 columns. The script prints the medians of two ratios with 95 % bootstrap
intervals: that of the speeds, and that of the processor times of the runs with their workers, which other programs on
the machine affect less. It also prints the processor time of the watcher, start-up included, per second of its life.

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
         "64", "--num-col-workers", str(options.workers), "--col-communication", options.communication, "--runtime",
         options.runtime, "--target-steps", str(options.steps), "--seed", "1", "--no-progress", "--json", "--log-dir",
         str(run_dir), *flags], stdout=subprocess.PIPE, text=True)


def measured(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Return the speed in env steps per second and the processor time in seconds, both after the run has ended."""
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return float(json.loads(output.splitlines()[-1])["env_steps_per_s"]), usage.ru_utime + usage.ru_stime


def drain(master: int) -> None:
    try:
        while os.read(master, 65536):
            pass
    except OSError:  # the terminal is closed
        return


def watched(run_dir: Path, options: argparse.Namespace) -> tuple[tuple[float, float], float]:
    """Return what `measured` returns for a watched run, and the watcher's processor seconds per second."""
    training = train(run_dir, options, "--log-every-s", "1")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    start = time.perf_counter()
    watcher = subprocess.Popen([sys.executable, "-m", "pytorchrl", "watch", "--wait", str(run_dir)],
                               stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    found = measured(training)
    _, status, usage = os.wait4(watcher.pid, 0)
    watcher.returncode = os.waitstatus_to_exitcode(status)
    assert watcher.returncode == 0
    return found, (usage.ru_utime + usage.ru_stime) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--runtime", default="processes", choices=("processes", "ray", "threads"))
    parser.add_argument("--communication", default="asynchronous", choices=("asynchronous", "synchronous"),
                        help="with synchronous collection, the runs of a pair do the same work")
    parser.add_argument("--smoke", action="store_true", help="one tiny pair")
    options = parser.parse_args()
    if options.smoke:
        options.pairs, options.steps, options.workers, options.runtime = 1, 2000, 1, "threads"
    rng, ratios, shares = random.Random(0), [], []
    for pair in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for arm in rng.sample(("alone", "watched"), 2):
                if arm == "alone":
                    found[arm] = measured(train(Path(folder) / arm, options))
                else:
                    found[arm], share = watched(Path(folder) / arm, options)
                    shares.append(share)
        (alone, alone_s), (with_watcher, with_watcher_s) = found["alone"], found["watched"]
        ratios.append((with_watcher / alone, with_watcher_s / alone_s))
        print(f"pair {pair + 1}: alone {alone:.0f} steps/s and {alone_s:.2f} s, watched {with_watcher:.0f} steps/s and "
              f"{with_watcher_s:.2f} s, watcher {shares[-1]:.3f} s per s", flush=True)
    for name, values in zip(("speed", "processor time"), np.transpose(ratios), strict=True):
        draws = np.median(np.random.default_rng(0).choice(values, (10_000, len(values))), axis=1)
        low, high = np.quantile(draws, (0.025, 0.975))
        print(f"{name}, watched / alone: median {np.median(values):.3f}, 95 % interval {low:.3f} to {high:.3f}")
    print(f"{len(ratios)} pairs; watcher: {np.median(shares):.3f} s of processor time per s")


if __name__ == "__main__":
    main()
