"""Measure the peak memory and the time of a PPO update on images, for the whole batch and for microbatches.

    python benchmarks/microbatch.py [--steps 2048] [--microbatch-sizes 0,512,128,32] [--device cpu] [--updates 3]

Observations have 84 x 84 x 4 bytes, as in Atari games, and the network is the library's default for images. Size 0
means the whole batch in one backward pass. Each size is measured in its own process. `peak_mb` is the peak memory
during the update minus the memory in use before it. On a GPU, torch's allocator measures it; on a CPU, it is the peak
resident size that Linux records for the process. `update_s` is the median time of all updates except the first. The
script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results import print_result

NUM_ENVS = 16


def measure(steps: int, microbatch_size: int, device: str, updates: int) -> dict[str, Any]:
    """Measure one microbatch size in this process."""
    import gymnasium as gym
    import numpy as np
    import torch

    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    calls = []

    class CountedPPO(PPO):
        def compute_gradients(self, batch: Any) -> Any:
            calls.append(batch.num_samples)
            return super().compute_gradients(batch)

    class Frames(gym.Env[Any, Any]):
        """Environment whose observations are random images; an episode has 100 steps."""

        observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        action_space = gym.spaces.Discrete(6)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return self.frame(), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return self.frame(), 0.0, False, self.t == 100, {}

        def frame(self) -> Any:
            return self.np_random.integers(0, 255, (4, 84, 84), np.uint8)

    envs = VecEnv.create_factory(Frames, None, NUM_ENVS)
    scheme = Scheme(
        CountedPPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        GAEBuffer.create_factory(steps // NUM_ENVS), envs, seed=1, device=device,
        microbatch_size=microbatch_size or None)
    worker = scheme.start().local_worker
    peaks, seconds = [], []
    for _ in range(updates + 1):
        # The batch is collected before the measurement, so that only the update is measured.
        worker.get_data()
        before = reset_peak(device)
        start = time.perf_counter()
        worker.get_grads()
        worker.apply_gradients()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peaks.append(peak(device) - before)
    scheme.stop()
    return {"microbatch_size": microbatch_size or None, "backward_passes": len(calls) // (updates + 1),
            "peak_mb": round(max(peaks) / 2**20, 1), "update_s": round(statistics.median(seconds[1:]), 4)}


def reset_peak(device: str) -> int:
    """Reset the peak memory, and return the number of bytes in use."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
        return status("VmRSS")
    import torch

    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def peak(device: str) -> int:
    """Return the peak memory in bytes since the reset."""
    if device == "cpu":
        return status("VmHWM")
    import torch

    return int(torch.cuda.max_memory_allocated())


def status(field: str) -> int:
    """Return a field of `/proc/self/status` in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    args = parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.steps, args.one, args.device, args.updates)))
        return
    results = []
    for size in [int(text) for text in args.microbatch_sizes.split(",")]:
        command = [sys.executable, os.path.abspath(__file__), "--one", str(size), "--steps", str(args.steps),
                   "--device", args.device, "--updates", str(args.updates)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(answer.stdout.splitlines()[-1]))
    print_result({"steps": args.steps, "device": args.device, "updates": args.updates, "results": results})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and time of an update in microbatches.")
    parser.add_argument("--steps", type=int, default=2048, help="env steps per update")
    parser.add_argument("--microbatch-sizes", default="0,512,128,32", help="env steps per backward pass; 0: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--updates", type=int, default=3, help="measured updates, after a first update")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
