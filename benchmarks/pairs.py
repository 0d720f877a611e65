"""Decide for each pair of switches and each algorithm whether they combine: train and resume, or be refused by name.

    python benchmarks/pairs.py [--algorithms sac dqn] [--sample 300] [--seed 0] [--jobs 2] [--known FILE]
    python benchmarks/pairs.py --group FILE > docs/benchmarks/pairs.jsonl

A switch is a set of options. A pair combines if 200 env steps of training have the same result, bit for bit, whether
the run is interrupted after 100 steps and resumed or not. It is refused if an error names one of its options before
anything starts. Every other outcome is a defect. Two switches that give the same option different values are no pair.
Each switch is also tried alone. A run that learns from a data set makes 40 updates in place of env steps.

One line of JSON is printed per case. `--group` prints the cases of such a file in groups with equal outcomes, from
which `report.py` makes a table. A whole run takes 15 minutes of one core.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import itertools
import json
import multiprocessing
import random
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from results import origin

from pytorchrl import errors, train
from pytorchrl.agent.algorithms.registry import registered
from pytorchrl.play.dataset import record_dataset
from pytorchrl.training.composition import option_specs

SWITCHES: dict[str, dict[str, Any]] = {
    "prioritized": {"prioritized": True},
    "n_step": {"n_step": 3},
    "critics": {"num_critics": 5},
    "subset": {"num_critics": 3, "critic_subset": 2},
    "policy_delay": {"policy_delay": 2},
    "layer norm": {"critic_norm": "layer"},
    "dropout": {"critic_dropout": 0.1},
    "CrossQ": {"critic_norm": "batch", "target_networks": False},
    "categorical": {"distribution": "categorical"},
    "quantile": {"distribution": "quantile"},
    "dueling": {"dueling": True},
    "noisy": {"noisy": True},
    "double": {"double": False},
    "norm": {"norm": "layer"},
    "exact dual": {"dual_solver": "exact"},
    "memory": {"recurrent_net": "gru", "recurrent_size": 8},
    "simba": {"block": "simba", "hidden_sizes": (16, 16), "activation": "relu"},
    "weight decay": {"optimizer": "adamw", "weight_decay": 0.01},
    "goals": {"relabel": "future"},
    "RND": {"intrinsic_reward": "rnd"},
    "normalized": {"normalize_obs": True},
    "groups": {"obs_groups": {"actor": ["observation"]}},
    "masks": {},
    "gradient limit": {"max_grad_norm": 0.5},
    "TD3+BC": {"bc_alpha": 2.5},
    "shared layers": {"shared_policy_value_network": True},
    "correction": {"correction": "decoupled"},
    "clipped values": {"use_clipped_value_loss": True},
    "exploration by worker": {"epsilon_per_worker": True},
    "OU noise": {"noise": "ou"},
    "data set": {"dataset": "of random actions"},
}
"""Name of each switch -> the options that turn it on. "masks" uses environments with action masks."""
Case = tuple[str, ...]
"""An algorithm, a kind of actions, and one or two switches."""
SHORT: dict[str, Any] = {
    "start_steps": 40, "mini_batch_size": 8, "update_every": 20, "num_updates": 1, "replay_size": 400, "num_steps": 10,
    "num_envs": 2, "hidden_sizes": (16, 16), "num_epochs": 1, "num_mini_batch": 2, "length": 8, "burn_in": 2,
    "period": 4, "lr": 1e-3}
"""Options of all runs, of which an algorithm uses those that it has."""


class Place(gym.Env):
    """Move to a goal on a line within 12 steps; observations are a dictionary with the state and both goals."""

    def __init__(self, actions: str = "discrete", masks: bool = False) -> None:
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = gym.spaces.Dict({name: gym.spaces.Box(-9, 9, (1,), np.float32) for name in names})
        self._masks = masks
        if masks:
            self.observation_space["action_mask"] = gym.spaces.MultiBinary(3)
        self.action_space = (
            gym.spaces.Discrete(3) if actions == "discrete" else gym.spaces.Box(-1.0, 1.0, (1,), np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._goal, self._time = np.zeros(1, np.float32), self.np_random.uniform(-2, 2, 1), 0
        return self._observe(), {}

    def step(self, action):
        move = action - 1 if isinstance(self.action_space, gym.spaces.Discrete) else action
        self._place = np.clip(self._place + 0.5 * move, -9, 9).astype(np.float32)
        self._time += 1
        reward = float(self.compute_reward(self._place, self._goal, {}))
        return self._observe(), reward, False, self._time == 12, {}

    def compute_reward(self, achieved, desired, info):
        return -(np.abs(achieved - desired) > 0.5).astype(np.float32).all(-1).astype(np.float32)

    def _observe(self):
        seen = {"observation": self._place, "achieved_goal": self._place,
                "desired_goal": self._goal.astype(np.float32)}
        if self._masks:
            seen["action_mask"] = np.array([self._place[0] > -2, 1, 1], np.int8)
        return {name: np.array(value) for name, value in seen.items()}


def kinds_of(algorithm: str) -> tuple[str, ...]:
    """Return the kinds of actions that an algorithm supports."""
    found = registered()[algorithm]
    names = [{space.__name__ for space in spaces} for part in (found.algorithm, found.actor)
             if (spaces := getattr(part, "action_spaces", ()))]
    return tuple(kind for kind, space in (("discrete", "Discrete"), ("continuous", "Box"))
                 if all(space in own for own in names))


def pairs(algorithms: list[str]) -> list[Case]:
    """Return all cases: an algorithm, a kind of actions, and one switch or two whose options it has and that agree."""
    found: list[Case] = []
    for name in algorithms:
        if registered()[name].environments is not None:
            continue  # it does not learn from the environments below
        known = option_specs(name)
        own = [switch for switch, options in SWITCHES.items() if options.keys() <= known.keys()]
        chosen = [(switch,) for switch in own] + [pair for pair in itertools.combinations(own, 2) if _agree(*pair)]
        found += [(name, kind, *switches) for kind in kinds_of(name) for switches in chosen
                  if kind == "discrete" or "masks" not in switches]
    return found


def _agree(one: str, other: str) -> bool:
    """Return whether no option has different values in two switches."""
    first, second = SWITCHES[one], SWITCHES[other]
    return all(first[option] == second[option] for option in first.keys() & second.keys())


@functools.cache
def dataset(kind: str, masks: bool) -> str:
    """Return a file with 10 episodes of random actions, which is deleted when the process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    untrained = train("sac", Place, target_steps=0, env_kwargs={"actions": kind, "masks": masks}, seed=1,
                      progress=False, log_dir=folder)
    record_dataset(untrained, f"{folder}/data.npz", num_episodes=10, deterministic=False, seed=1)
    return f"{folder}/data.npz"


def options_of(case: Case) -> dict[str, Any]:
    """Return the options of `train` for a case."""
    name, kind, *switches = case
    chosen = {option: value for switch in switches for option, value in SWITCHES[switch].items()}
    known = option_specs(name).keys()
    is_offline = "dataset" in chosen or getattr(registered()[name].algorithm, "needs_dataset", False)
    without = {"mini_batch_size"} if "num_mini_batch" in known else set()
    if "start_steps" not in known:
        without |= {"replay_size"}
    if "recurrent_net" not in chosen and name != "r2d2":
        without |= {"length", "burn_in", "period"}
    if is_offline and "start_steps" in known:
        without |= {"start_steps", "update_every", "num_updates", "num_envs", "num_steps"}
        chosen["dataset"] = dataset(kind, "masks" in switches)
    return {**{key: value for key, value in SHORT.items() if key in known - without}, **chosen, "seed": 1,
            "progress": False, "env_kwargs": {"actions": kind, "masks": "masks" in switches}}


def decide(case: Case) -> dict[str, Any]:
    """Train with the switches of a case, and return the outcome: "trains", "refused" or "defect", with the reason."""
    name, kind, *switches = case
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options = options_of(case)
    chosen = [option for switch in switches for option in SWITCHES[switch]]
    # A run from a data set counts updates, and makes one for each step; other runs make far fewer.
    steps = 40 if options.get("dataset") else 200
    start = time.process_time()
    outcome, reason = "trains", ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            options |= {"checkpoint_every": steps // 2, "eval_every": None, "tensorboard": False}
            whole = train(name, Place, target_steps=steps, log_dir=f"{folder}/whole", **options)
            train(name, Place, target_steps=steps // 2, log_dir=f"{folder}/halves", **options)
            halves = train(name, Place, target_steps=steps, log_dir=f"{folder}/halves", resume=True, **options)
        if not _equal(whole.acting_state, halves.acting_state):
            outcome, reason = "defect", "the two halves differ from the whole"
        elif whole.summary["updates"] == 0:
            outcome, reason = "defect", "no update was made"
    except errors.ConfigError as error:
        outcome, reason = "refused", _first(str(error))
        if not any(option in str(error) for option in chosen) and "mask" not in str(error):
            outcome = "defect"
    except Exception as error:  # noqa: BLE001 - any other error is a defect, which the table shows
        outcome, reason = "defect", f"{type(error).__name__}: {_first(str(error))}"
    return {"algorithm": name, "actions": kind, "switches": switches, "outcome": outcome, "reason": reason,
            "cpu_s": round(time.process_time() - start, 2)}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _first(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip())[:400]


def grouped(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each algorithm, kind of actions, outcome and reason, with the switches of all its cases."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        head = {key: value for key, value in line.items() if key not in ("switches", "cpu_s")}
        found.setdefault(json.dumps(head), {**head, "cases": []})["cases"].append(line["switches"])
    return list(found.values())


def lines_of(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if there is no path."""
    return [] if path is None else [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Decide the cases, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(registered()))
    parser.add_argument("--sample", type=int, help="number of cases, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--known", type=Path, help="leave out the cases whose results are in this file")
    parser.add_argument("--group", type=Path, help="train nothing, and print the results of this file in groups")
    options = parser.parse_args()
    if options.group:
        for line in grouped(lines_of(options.group)):
            print(json.dumps(line))
        return
    known = [(line["algorithm"], line["actions"], *line["switches"]) for line in lines_of(options.known)]
    cases = [case for case in pairs(options.algorithms) if case not in known]
    if options.sample:
        cases = random.Random(options.seed).sample(cases, min(options.sample, len(cases)))
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for found in pool.imap(decide, cases):
            print(json.dumps({**origin(), **found}), flush=True)


if __name__ == "__main__":
    main()
