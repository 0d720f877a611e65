"""Compare the env steps per second of this source tree and an earlier one, to find the cost of a change.

    git worktree add ../before COMMIT
    python benchmarks/before.py ../before [--seconds 20] [--pairs 3] [--tasks cartpole,dictionary,sleeping,step_one]

`cartpole` is PPO in one process with compiled updates, 8 environments x 128 steps, 4 epochs x 4 minibatches of 256, and
an MLP of 64-64. `halfcheetah` is the same with 1 environment x 2048 steps, 10 epochs x 32 minibatches of 64, and
normalized observations and rewards. `sleeping` is PPO with asynchronous collection on Ray; each of the 8 workers has
one environment, which sleeps 5 ms in each step. `dqn`, `sac` and `td3` learn from replay in one process with one
environment: DQN on CartPole-v1, SAC and TD3 on Pendulum-v1. Their updates are compiled if the tree supports it.

`dictionary` is PPO without compilation on an environment whose observation is a dictionary of numbers, a category and
flags, with 8 environments x 128 steps. `step_one`, `step_eight` and `step_dictionary` only step environments: one or
eight of CartPole-v1, or eight of the environment of `dictionary`.

Each tree runs in its own process with one thread, and start-up and compilation are not measured. Except in `sleeping`,
the two trees take turns of half a second, because the speed of a machine changes from second to second, and a rate is
the number of env steps per second of processor time, because other programs may use the machine. In `sleeping`, the
trees run one after the other, because asynchronous workers cannot be paused; the order changes with each pair of runs.
The script prints one JSON object and asserts nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turns import Child, answer

HERE = Path(__file__).resolve().parents[1]
WORKERS = 8


def cartpole() -> Any:
    """Return the scheme that `throughput.py cartpole --schemes central` measures."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    return Scheme(
        PPO.create_factory(num_epochs=4, num_mini_batch=4, compile=True),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(128), envs,
        seed=1)


def halfcheetah() -> Any:
    """Return PPO on HalfCheetah-v5 in one process, with compiled updates of 64 samples."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    envs = VecEnv.create_factory("HalfCheetah-v5")
    return Scheme(
        PPO.create_factory(num_epochs=10, num_mini_batch=32, entropy_coef=0.0, compile=True),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, normalize_obs=True,
                                     normalize_reward=True),
        GAEBuffer.create_factory(2048), envs, seed=1)


def sleeping() -> Any:
    """Return the scheme that `throughput.py sleeping --workers 8` measures."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import SleepEnv

    envs = VecEnv.create_factory(SleepEnv, {"step_s": 0.005})
    return Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(200), envs,
        num_col_workers=WORKERS, col_communication="asynchronous", broadcast_interval=WORKERS, seed=1)


def dictionary_envs(num_envs: int) -> Any:
    """Return a factory of environments whose observation is a dictionary; an episode has 100 steps."""
    import gymnasium as gym
    import numpy as np

    from pytorchrl import VecEnv

    class Dictionary(gym.Env):  # type: ignore[misc,type-arg]
        observation_space = gym.spaces.Dict({
            "numbers": gym.spaces.Box(-1, 1, (4,)), "category": gym.spaces.Discrete(5),
            "flags": gym.spaces.MultiBinary(3)})
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.num_steps = 0
            self.observation = {"numbers": np.zeros(4, np.float32), "category": 1, "flags": np.zeros(3, np.int8)}
            return self.observation, {}

        def step(self, action: Any) -> Any:
            self.num_steps += 1
            return self.observation, 1.0, self.num_steps == 100, False, {}

    return VecEnv.create_factory(Dictionary, vec_env_size=num_envs)


def dictionary() -> Any:
    """Return PPO on eight environments whose observations are dictionaries."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme

    envs = dictionary_envs(8)
    return Scheme(
        PPO.create_factory(num_epochs=4, num_mini_batch=4, **compiled(PPO, False)),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(128), envs,
        seed=1)


class Stepping:
    """Steps a vector environment, with the methods of a scheme that `serve` needs.

    Args:
        make: Function that returns the factory of the vector environment.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        import numpy as np

        self._env = make()(seed=1)
        self._env.reset()
        self._actions = [np.full(self._env.action_shape, action, np.int64) for action in (0, 1)]
        self.version = 0

    def step(self) -> None:
        """Take 100 steps in each environment."""
        for _ in range(50):
            for action in self._actions:
                self._env.step(action)
        self.version += 1

    def ledger(self) -> dict[str, int]:
        """Return the number of env steps in the form that `used_steps` expects."""
        return {"consumed_unique": 100 * self._env.num_envs * self.version, "resident": 0, "evicted": 0}

    def stop(self) -> None:
        """Close the environments."""
        self._env.close()


def cartpole_envs(num_envs: int) -> Any:
    """Return a factory of environments of CartPole-v1."""
    from pytorchrl import VecEnv

    return VecEnv.create_factory("CartPole-v1", vec_env_size=num_envs)


def compiled(algorithm: Any, value: bool = True) -> dict[str, bool]:
    """Return the option `compile` for an algorithm that has it."""
    return {"compile": value} if hasattr(algorithm.Options, "compile") else {}


def dqn() -> Any:
    """Return DQN on CartPole-v1: one environment, and an update of 64 transitions per 4 env steps."""
    from pytorchrl import DQN, QActor, ReplayBuffer, Scheme, VecEnv

    envs = VecEnv.create_factory("CartPole-v1")
    return Scheme(
        DQN.create_factory(lr=1e-3, mini_batch_size=64, start_steps=1_000, **compiled(DQN)),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(64, 64)),
        ReplayBuffer.create_factory(50_000, rollout_size=4), envs, seed=1)


def continuous(name: str) -> Any:
    """Return SAC or TD3 on Pendulum-v1: one environment, and an update of 256 transitions per env step."""
    import pytorchrl
    from pytorchrl import OffPolicyActor, ReplayBuffer, Scheme, VecEnv

    envs, algorithm = VecEnv.create_factory("Pendulum-v1"), getattr(pytorchrl, name)
    return Scheme(
        algorithm.create_factory(start_steps=1_000, update_every=1, num_updates=1, **compiled(algorithm)),
        OffPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(256, 256),
                                      policy="stochastic" if name == "SAC" else "deterministic"),
        ReplayBuffer.create_factory(100_000, rollout_size=1), envs, seed=1)


# Task -> (function that makes the scheme, number of updates before the measurement, divisor, seconds per turn of a
# source tree). The number of measured updates is divisible by the divisor. If the seconds are None, the trees run one
# after the other.
TASKS: dict[str, Any] = {
    "cartpole": (cartpole, 40, 1, 0.5), "halfcheetah": (halfcheetah, 320, 320, 1.0),
    "sleeping": (sleeping, 4 * WORKERS, WORKERS, None), "dqn": (dqn, 200, 1, 0.5),
    "sac": (partial(continuous, "SAC"), 50, 1, 0.5), "td3": (partial(continuous, "TD3"), 50, 1, 0.5),
    "dictionary": (dictionary, 10, 1, 0.5), "step_one": (partial(Stepping, partial(cartpole_envs, 1)), 10, 1, 0.5),
    "step_eight": (partial(Stepping, partial(cartpole_envs, 8)), 10, 1, 0.5),
    "step_dictionary": (partial(Stepping, partial(dictionary_envs, 8)), 10, 1, 0.5)}


def used_steps(scheme: Any) -> int:
    """Return the number of env steps that updates have used, or that were inserted into replay."""
    ledger = scheme.ledger()
    return int(ledger["consumed_unique"] + ledger["resident"] + ledger["evicted"])


def serve(task: str) -> None:
    """Print the path of the package, and then print the env steps per second for each line of stdin.

    A line contains a number of seconds. The rate is measured over at least that many seconds.
    """
    import pytorchrl

    make, warm_up, turn, seconds = TASKS[task]
    clock = time.perf_counter if seconds is None else time.process_time
    scheme = make()
    while scheme.version < warm_up:
        scheme.step()
    answer({"package": pytorchrl.__file__})
    for line in sys.stdin:
        first, version, start = used_steps(scheme), scheme.version, clock()
        while clock() - start < float(line) or (scheme.version - version) % turn:
            scheme.step()
        answer({"rate": (used_steps(scheme) - first) / (clock() - start)})
    scheme.stop()


def served(tree: Path, task: str) -> Child:
    """Start a process that runs `serve` with the package of one source tree."""
    child = Child([sys.executable, __file__, str(tree), "--serve", task], cwd=tree, env={
        **os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if not Path(package := child.read()["package"]).is_relative_to(tree):
        raise SystemExit(f"{package} is not in {tree}: another package of the same name is first on the path")
    return child


def in_turn(before: Path, task: str, seconds: float) -> Iterator[dict[Path, float]]:
    """Measure the trees alternately, and yield the rates of each pair of turns.

    Both processes stay alive, but only one works at a time.
    """
    children = {tree: served(tree, task) for tree in (before, HERE)}
    for turn in range(round(seconds / TASKS[task][3])):
        order = (before, HERE) if turn % 2 else (HERE, before)
        yield {tree: children[tree].turn(str(TASKS[task][3]))["rate"] for tree in order}
    for child in children.values():
        child.end()


def one_by_one(before: Path, task: str, seconds: float, pairs: int) -> Iterator[dict[Path, float]]:
    """Run one process after the other, and yield the rates of both trees for each pair of runs."""
    for pair in range(pairs):
        rates = {}
        for tree in (before, HERE) if pair % 2 else (HERE, before):
            child = served(tree, task)
            rates[tree] = child.turn(str(seconds))["rate"]
            child.end()
        print(f"{task}: {rates[before]:.0f} steps/s before, {rates[HERE]:.0f} now", file=sys.stderr, flush=True)
        yield rates


def compare(before: Path, task: str, seconds: float, pairs: int) -> dict[str, Any]:
    """Return statistics of the ratio of the rates (this tree / the earlier one), and the median rate of each tree."""
    rates = list(one_by_one(before, task, seconds, pairs) if TASKS[task][3] is None else in_turn(before, task, seconds))
    logs = [math.log(rate[HERE] / rate[before]) for rate in rates]
    import scipy.stats  # imported here, so that the measured processes do not load it

    return {"ratio": math.exp(statistics.mean(logs)), "ratio_median": math.exp(statistics.median(logs)),
            "standard_error": float(scipy.stats.sem(logs)), "turns": len(logs),
            "before": statistics.median(rate[before] for rate in rates),
            "now": statistics.median(rate[HERE] for rate in rates)}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=lambda path: Path(path).resolve(), help="folder of the other tree")
    parser.add_argument("--seconds", type=float, default=20.0,
                        help="seconds of each tree: in total, or per pair for sleeping")
    parser.add_argument("--pairs", type=int, default=3, help="number of pairs for `sleeping`, at least 2")
    parser.add_argument("--tasks", default="cartpole,sleeping", help="tasks, separated by commas")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    from results import print_result  # imported here, because the package of an earlier tree may lack what it needs

    print_result({task: compare(options.before, task, options.seconds, options.pairs)
                  for task in options.tasks.split(",")})


if __name__ == "__main__":
    main()
