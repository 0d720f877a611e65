"""Compare PPO with memory with RecurrentPPO of sb3-contrib: env steps per second of processor time.

    python benchmarks/recurrent.py [--contrib-python VENV/bin/python] [--tasks cartpole pendulum]
        [--sides gru lstm sb3_contrib] [--units 64] [--rounds 5]
    python benchmarks/recurrent.py --scores [--tasks recall recall24 cartpole pendulum] [--seeds 1 2 3]
        [--steps 100000]

The environments do not show velocities. All programs use 8 environments x 128 steps, 10 epochs x 4 minibatches of 256
steps, a fully connected layer of 64 and a memory of `--units` units, both for the policy and for the value. Except for
the layers, these are the numbers of the preset. A minibatch of this library consists of two whole sequences. One of
sb3-contrib, which cuts sequences at the starts of episodes and pads them, consists of 256 consecutive steps.
sb3-contrib has the layer behind the memory, this library has it before.

The side `carried` is `lstm` with sequences of 16 steps (`sequence_length=16`). Each program runs in its own process
with one thread. In each round, the programs take turns of `--rollouts` rollouts, so that a change of the machine's
speed affects all of them. Imports and the first turn are not measured. The script prints one line of JSON per task, and
asserts nothing. Without sb3-contrib, its entry is "missing".

With `--scores`, this library trains a GRU by whole rollouts of 128 steps and by sequences of 16 steps. A line of JSON
per run contains the mean return of 50 evaluation episodes and the mean return over the training curve (`area`).
`recall` is `pytorchrl/Recall-v0`, whose cue is 8 steps old when it is needed; `recall24` has a delay of 24 steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from turns import Child, answer

ENVS, STEPS, EPOCHS, MINIBATCHES, HIDDEN = 8, 128, 10, 4, 64
TASKS = {"cartpole": ("CartPole-v1", (0, 2)), "pendulum": ("Pendulum-v1", (0, 1))}
"""Name -> id of the environment, and entries of an observation that are shown."""
RECALL = {"recall": 8, "recall24": 24}
"""Name -> steps from the cue to the answer."""
LENGTHS = {"whole": None, "carried": 16}
"""Name -> steps per sequence."""
OURS: dict[str, dict[str, Any]] = {"gru": {}, "lstm": {}, "carried": {"sequence_length": 16}}
OTHER = "sb3_contrib"


class Shown(gym.ObservationWrapper[Any, Any, Any]):
    """Show some entries of each observation."""

    def __init__(self, env: Any, entries: tuple[int, ...]) -> None:
        """Restrict the space of observations to `entries`."""
        super().__init__(env)
        space = env.observation_space
        self._entries = list(entries)
        self.observation_space = gym.spaces.Box(space.low[self._entries], space.high[self._entries], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        """Return the entries that are shown."""
        return observation[self._entries]


def make(task: str) -> Any:
    """Make an environment of a task."""
    if task in RECALL:
        from pytorchrl.envs.memory import Recall

        return Recall(delay=RECALL[task])
    name, entries = TASKS[task]
    return Shown(gym.make(name), entries)


def ours(task: str, side: str, units: int) -> Callable[[], object]:
    """Return a function that collects one rollout and learns from it with this library."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    envs = VecEnv.create_factory(make, {"task": task}, vec_env_size=ENVS)
    actor = OnPolicyActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(HIDDEN,), recurrent_size=units,
        recurrent_net="gru" if side == "gru" else "lstm")
    scheme = Scheme(
        PPO.create_factory(num_epochs=EPOCHS, num_mini_batch=MINIBATCHES, lr=1e-3, gamma=0.98, entropy_coef=0.0),
        actor, GAEBuffer.create_factory(STEPS, gae_lambda=0.9, **OURS[side]), envs, seed=1,
        updates_per_step=EPOCHS * MINIBATCHES)
    scheme.start(10**9)
    return scheme.step


def sb3_contrib(task: str, side: str, units: int) -> Callable[[], object]:
    """Return the same function for sb3-contrib."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Quiet(BaseCallback):
        """A callback that does nothing."""

        def _on_step(self) -> bool:
            return True

    model = RecurrentPPO(
        "MlpLstmPolicy", make_vec_env(make, ENVS, env_kwargs={"task": task}), n_steps=STEPS, n_epochs=EPOCHS,
        batch_size=ENVS * STEPS // MINIBATCHES, learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, device="cpu", seed=1,
        policy_kwargs={"lstm_hidden_size": units, "net_arch": [HIDDEN]})
    _, callback = model._setup_learn(10**9, Quiet())

    def step() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=STEPS)
        model.train()
    return step


def serve(task: str, side: str, units: int, rollouts: int) -> None:
    """Make a turn for each line of the standard input; print the env steps per second of processor time."""
    import torch

    torch.set_num_threads(1)
    step = (sb3_contrib if side == OTHER else ours)(task, side, units)
    answer({})
    for _ in sys.stdin:
        start = time.process_time()
        for _ in range(rollouts):
            step()
        answer({"rate": rollouts * ENVS * STEPS / (time.process_time() - start)})


def has_contrib(python: str) -> bool:
    """Return whether an interpreter can import sb3-contrib."""
    if python == sys.executable:
        return importlib.util.find_spec("sb3_contrib") is not None
    return subprocess.run([python, "-c", "import sb3_contrib"], capture_output=True, check=False).returncode == 0


def measure(task: str, sides: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of all programs in each round, and the medians of their ratios."""
    missing = OTHER in sides and not has_contrib(options.contrib_python)
    sides = [side for side in sides if side != OTHER or not missing]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    children = {side: Child(
        [options.contrib_python if side == OTHER else sys.executable, __file__, "--serve", task, side,
         "--units", str(options.units), "--rollouts", str(options.rollouts)], env=environment) for side in sides}
    for child in children.values():
        child.read()
        child.turn()  # the warm-up
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side in sides:
            rates[side].append(children[side].turn()["rate"])
    for child in children.values():
        child.end()
    medians = {side: round(statistics.median(values)) for side, values in rates.items()}
    ratios = {side: [round(rate / other, 2) for rate, other in zip(values, rates[OTHER], strict=True)]
              for side, values in rates.items() if OTHER in rates and side != OTHER}
    return {"task": task, "units": options.units,
            "env_steps_per_cpu_s": {**medians, **({OTHER: "missing"} if missing else {})},
            "ratio": {side: round(statistics.median(values), 2) for side, values in ratios.items()},
            "ratios": ratios}


def score(task: str, sequences: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once, and return the score."""
    import tempfile
    from itertools import pairwise
    from pathlib import Path

    from pytorchrl import linear, train

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        agent = train(
            "ppo", make, env_kwargs={"task": task}, num_envs=ENVS, num_steps=STEPS, num_epochs=EPOCHS,
            num_mini_batch=MINIBATCHES, lr=linear(1e-3, 0.0), gamma=0.98, gae_lambda=0.9, entropy_coef=0.0,
            recurrent_net="gru", hidden_sizes=(HIDDEN,), recurrent_size=HIDDEN, sequence_length=LENGTHS[sequences],
            target_steps=steps, seed=seed, log_dir=f"{folder}/run", progress=False)
        seconds = time.process_time() - start
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    points = [(record["env_steps"], record["return_mean"]) for record in map(json.loads, lines)
              if record["return_mean"] is not None]
    area = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(points))
    return {"task": task, "sequences": sequences, "seed": seed, "env_steps": steps,
            "return": round(statistics.fmean(agent.evaluate(50).returns), 2),
            "area": round(area / (points[-1][0] - points[0][0]), 2), "cpu_s": round(seconds, 1)}


def main() -> None:
    """Measure the tasks, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contrib-python", default=sys.executable, help="interpreter that has sb3-contrib")
    parser.add_argument("--tasks", nargs="+", choices=[*RECALL, *TASKS], default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=[*OURS, OTHER], default=["gru", "lstm", OTHER])
    parser.add_argument("--units", type=int, default=64, help="units of the memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=2, help="rollouts of 1,024 env steps in a turn")
    parser.add_argument("--scores", action="store_true", help="train, and print scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the runs for scores")
    parser.add_argument("--steps", type=int, default=100_000, help="env steps of a run for scores")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, options.units, options.rollouts)
        return
    from results import print_result  # the interpreter of sb3-contrib may lack this library

    if options.scores:
        for task, seed, sequences in itertools.product(options.tasks, options.seeds, LENGTHS):
            print_result(score(task, sequences, seed, options.steps), indent=None)
        return
    for task in options.tasks:
        print_result(measure(task, options.sides, options), indent=None)


if __name__ == "__main__":
    main()
