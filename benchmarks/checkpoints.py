"""Measure what checkpoints cost, their size, and the seconds from resuming to the first update.

    python benchmarks/checkpoints.py [--times 5] [--capacity 100000] [--seconds 4]

The cases are PPO in one process, PPO with two collection workers on Ray, and DQN with a full replay buffer of stacked
84 x 84 images. Each pair has two checkpoints: a background thread writes one, as with the option `checkpoint_every`,
and training waits for the other. The pause is the time that the call takes. The lost time is the time of the call and
of a fixed number of updates, minus the time of as many updates without a checkpoint: it includes what the background
thread takes away from training. Then a new scheme resumes from the newest checkpoint and makes its first update.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import gymnasium as gym
import numpy as np
from results import print_result

from pytorchrl import DQN, PPO, GAEBuffer, Learner, OnPolicyActor, QActor, ReplayBuffer, Scheme, VecEnv


class Pictures(gym.Env[Any, Any]):
    """Environment whose observations are stacks of random images; an episode has 500 steps."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and return a stack of three black images and one random image."""
        super().reset(seed=seed)
        self._stack, self._t = np.zeros((4, 84, 84), np.uint8), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Add a random image to the stack."""
        self._t += 1
        return self._seen(), 0.0, self._t == 500, False, {}

    def _seen(self) -> np.ndarray:
        picture = self.np_random.integers(0, 256, (1, 84, 84), np.uint8)
        self._stack = np.concatenate([self._stack[1:], picture])
        return self._stack


def schemes(capacity: int) -> dict[str, Any]:
    """Return a map from the name of each case to a function that makes its scheme."""
    vectors = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    actor = OnPolicyActor.create_factory(vectors.observation_space, vectors.action_space)
    ppo = PPO.create_factory(), actor, GAEBuffer.create_factory(64), vectors
    pictures = VecEnv.create_factory(Pictures, vec_env_size=8)
    dqn = (DQN.create_factory(start_steps=capacity, update_every=100, mini_batch_size=32),
           QActor.create_factory(pictures.observation_space, pictures.action_space),
           ReplayBuffer.create_factory(capacity, rollout_size=100, stacked_frames=4), pictures)
    return {"ppo": lambda: Scheme(*ppo, seed=1),
            "ppo, 2 collectors on ray": lambda: Scheme(*ppo, seed=1, num_col_workers=2),
            f"dqn, {capacity} pictures": lambda: Scheme(*dqn, seed=1)}


def measure(make: Any, times: int, seconds: float) -> dict[str, Any]:
    """Return the cost of checkpoints and of resuming for one scheme; `seconds` is the duration of the updates."""
    with tempfile.TemporaryDirectory() as directory:
        names = [f"{kind}_{how}" for kind in ("pause", "lost") for how in ("waiting", "meanwhile")]
        costs: dict[str, list[float]] = {name: [] for name in names}
        with Learner(make(), 10**9, directory, progress=False, tensorboard=False) as learner:
            learner.step()  # fills the replay buffer
            learner.save_checkpoint()
            num_updates, start = 0, time.perf_counter()
            while time.perf_counter() < start + seconds:
                learner.step()
                num_updates += 1
            for pair in range(times):
                alone = timed(learner, num_updates)
                for wait in (True, False) if pair % 2 else (False, True):
                    how, start = "waiting" if wait else "meanwhile", time.perf_counter()
                    learner.save_checkpoint(wait=wait)
                    pause = time.perf_counter() - start
                    costs[f"pause_{how}"].append(pause)
                    costs[f"lost_{how}"].append(pause + timed(learner, num_updates) - alone)
                    learner._files.wait()  # usually, the file has been written
            learner.save_checkpoint()
            written = learner.get_metrics()["checkpoint"]
        start = time.perf_counter()
        with Learner(make(), 10**9, directory, progress=False, tensorboard=False, resume=True) as learner:
            learner.step()
            resumed = time.perf_counter() - start
    return {**{f"seconds_{name}": statistics.median(values) for name, values in costs.items()}, "updates": num_updates,
            "seconds_until_written": written["seconds"], "bytes": written["bytes"], "seconds_to_resume": resumed}


def timed(learner: Learner, num_updates: int) -> float:
    """Make updates and return the seconds that they take."""
    start = time.perf_counter()
    for _ in range(num_updates):
        learner.step()
    return time.perf_counter() - start


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="number of pairs of checkpoints of each scheme")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of updates after each checkpoint")
    parser.add_argument("--capacity", type=int, default=100_000, help="number of images in replay")
    options = parser.parse_args()
    results = {}
    for name, make in schemes(options.capacity).items():
        results[name] = measure(make, options.times, options.seconds)
        print(name, results[name], file=sys.stderr, flush=True)
    print_result({"task": "checkpoints", "results": results})


if __name__ == "__main__":
    main()
