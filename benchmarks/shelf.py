"""Compare the speed of each algorithm and variant with that of its nearest relative here, and with other libraries.

    python benchmarks/shelf.py [--cases tqc qrdqn] [--compile no yes] [--rounds 5] [--seconds 2]
    python benchmarks/shelf.py --peer-python VENV/bin/python --cases qrdqn-peers tqc-peers [--rounds 5] [--seconds 2]
    python benchmarks/shelf.py --cases insertion

A case trains one task with two or more programs: an algorithm, and the algorithm here that differs in as little as
possible. They have equal networks, batches and numbers of updates, unless the difference is what the case is about.
Cases whose name ends with "-peers" compare this library, compiled and not compiled, with sb3-contrib (PyTorch) and SBX
(JAX) instead, if the interpreter `--peer-python` has them.

Each program is a process of its own, with one thread, on the same core. After its start, compilation and a warm-up, it
trains in turns with the others: the next one begins when a turn of `--seconds` seconds of processor time is over. A
round is one turn of each program. For a case, the script prints one line of JSON: the median rate of each program, in
env steps (or updates) per second of its processor time, and the ratios of the first program's rate to the others' in
the same round: median, smallest and largest. `gflop` counts the matrix products and convolutions of an env step or
update that is not compiled. The script asserts nothing.

`insertion` measures the time that a replay takes to store one step of one environment, within and at the end of an
episode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from results import origin
from turns import Child, answer

ROOT = Path(__file__).resolve().parents[1]
Program = tuple[str, dict[str, Any]]
"""Name of an algorithm or variant of `train`, or of another library and its class; options."""

# Replay on continuous actions: the networks and batches of the papers, on an environment that takes little time.
_BOX: dict[str, Any] = {
    "env": "Pendulum-v1", "num_envs": 1, "num_steps": 1, "replay_size": 100_000, "start_steps": 1000, "update_every": 1,
    "num_updates": 1, "hidden_sizes": (256, 256), "mini_batch_size": 256, "gamma": 0.99}
_CART: dict[str, Any] = {
    "env": "CartPole-v1", "num_envs": 1, "num_steps": 4, "update_every": 4, "num_updates": 1, "replay_size": 50_000,
    "start_steps": 1000, "epsilon_steps": 1000, "hidden_sizes": (64, 64), "mini_batch_size": 64, "gamma": 0.99,
    "polyak": 0.0, "target_update_interval": 125}
_TWENTY = {"num_updates": 20, "policy_delay": 20}  # as in REDQ and DroQ
_WIDE = {"critic_hidden_sizes": (1024, 1024), "policy_delay": 3}  # as in SBX's CrossQ
_PPO: dict[str, Any] = {"env": "CartPole-v1", "num_envs": 8, "num_steps": 128, "num_epochs": 4, "num_mini_batch": 4}
_SEQUENCES = {"length": 16, "burn_in": 8, "period": 8, "replay_size": 50_000}
_DATA = {**_BOX, "dataset": True}
_NOT_OF_DATA = ("num_steps", "replay_size", "start_steps", "update_every", "num_updates", "num_envs")
CASES: dict[str, tuple[Program, ...]] = {
    "redq": (("redq", _BOX | _TWENTY), ("sac", _BOX | _TWENTY)),
    "droq": (("droq", _BOX | _TWENTY), ("sac", _BOX | _TWENTY)),
    "crossq": (("crossq", _BOX | _WIDE), ("sac", _BOX | _WIDE)),
    "tqc": (("tqc", _BOX), ("sac", _BOX | {"num_critics": 5})),
    "sac-c51": (("sac", _BOX | {"distribution": "categorical"}), ("sac", _BOX)),
    "simba": (("sac", _BOX | {"block": "simba"}), ("sac", _BOX)),
    "sac-recurrent": (
        ("sac", _BOX | _SEQUENCES | {"recurrent_net": "gru", "recurrent_size": 64, "hidden_sizes": (64,),
                                     "mini_batch_size": 32}),
        ("sac", _BOX | {"hidden_sizes": (64, 64), "mini_batch_size": 32 * 16})),
    "mpo": (("mpo", _BOX), ("sac", _BOX)),
    "td3": (("td3", _BOX), ("sac", _BOX)),
    "c51": (("c51", _CART | {"num_atoms": 51}), ("dqn", _CART)),
    "qrdqn": (("qrdqn", _CART | {"num_atoms": 200}), ("dqn", _CART)),
    "dqn-per": (("dqn", _CART | {"prioritized": True}), ("dqn", _CART)),
    "rainbow": (("rainbow", {**_CART, "num_atoms": 51, "epsilon_steps": None}), ("c51", _CART | {"num_atoms": 51})),
    "r2d2": (
        ("r2d2", _CART | _SEQUENCES | {"recurrent_net": "gru", "recurrent_size": 64, "hidden_sizes": (64,),
                                       "mini_batch_size": 32, "epsilon_steps": None}),
        ("dqn", _CART | {"mini_batch_size": 32 * 16, "dueling": True})),
    "pqn": (("pqn", _PPO | {"epsilon_steps": 1000, "hidden_sizes": (64, 64), "norm": "layer"}), ("ppo", _PPO)),
    "rnd": (("ppo", _PPO | {"intrinsic_reward": "rnd"}), ("ppo", _PPO)),
    "her": (
        ("dqn", _CART | {"env": "bits", "relabel": "future"}), ("dqn", _CART | {"env": "bits"})),
    "bc": (("bc", _DATA), ("td3", _DATA)),
    "iql": (("iql", _DATA), ("td3", _DATA)),
    "td3-bc": (("td3_bc", _DATA | {"normalize_obs": False}), ("td3", _DATA)),
    "qrdqn-peers": (("qrdqn", _CART | {"num_atoms": 200, "double": False}), ("sb3_contrib.QRDQN", {})),
    "tqc-peers": (("tqc", _BOX | {"num_critics": 2}), ("sb3_contrib.TQC", {}), ("sbx.TQC", {})),
    "crossq-peers": (("crossq", _BOX | _WIDE), ("sb3_contrib.CrossQ", {}), ("sbx.CrossQ", {})),
    "droq-peers": (("droq", _BOX | _TWENTY), ("sbx.SAC", {})),
}
"""Name -> the measured program, and those that it is compared with."""
INSERTION = "insertion"
_WARM_UP_UPDATES = 60


class Turns:
    """The side of a program: it trains while it has a turn, and then waits for the next one.

    Args:
        seconds: Processor time of a turn.
        extra: Figures that the first line contains.
    """

    def __init__(self, seconds: float, extra: Mapping[str, Any]) -> None:
        self._seconds, self._start, self._first = seconds, 0.0, 0
        self._extra, self._has_started = extra, False

    def go_on(self, count: int) -> bool:
        """Count env steps or updates up to now; at the end of a turn, wait, and return whether there is another."""
        if self._has_started:
            used = time.process_time() - self._start
            if used < self._seconds:
                return True
            answer({"rate": (count - self._first) / used})
        else:
            self._has_started = True
            answer(dict(self._extra))
        if not sys.stdin.readline():
            return False
        self._first, self._start = count, time.process_time()
        return True


def ours(name: str, options: dict[str, Any], is_compiled: bool, seconds: float) -> None:
    """Train by this library, in turns."""
    from pytorchrl.training.training import make_learner

    with tempfile.TemporaryDirectory() as folder:
        own, env = _own_options(name, options, Path(folder))
        figures = {} if is_compiled else {"gflop": flops_of(make_learner(name, env, **own, compile=False)[0])}
        learner, _ = make_learner(name, env, **own, compile=is_compiled)
        learner.start()
        steps = _steps_of(learner.scheme)
        count = _warm_up(steps, learner.scheme)
        turns = Turns(seconds, figures)
        while turns.go_on(count):
            count = next(steps)
        learner.stop()


def _own_options(name: str, options: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the options of `train` and the environment of a program."""
    from pytorchrl.training.composition import option_specs

    found = {"target_steps": 10**9, "seed": 1, "progress": False, **options}
    env = found.pop("env")
    if found.pop("dataset", False):
        found = {option: value for option, value in found.items() if option not in _NOT_OF_DATA}
        found["dataset"] = _dataset(env, folder)
    if env == "bits":
        import functools

        from her import bit_flipping

        cls = bit_flipping().BitFlipping
        env = functools.partial(cls, 15)
        if "relabel" in found:
            found["goal_terminated"] = cls.compute_terminated
    specs = option_specs(name)
    return {option: value for option, value in found.items() if value is not None and option in specs}, env


def _dataset(env: str, folder: Path) -> str:
    import pytorchrl
    from pytorchrl.play.dataset import record_dataset

    agent = pytorchrl.train("sac", env, target_steps=0, seed=1, progress=False)
    record_dataset(agent, folder / "data.npz", num_episodes=20, deterministic=False, seed=1)
    return str(folder / "data.npz")


def _steps_of(scheme: Any) -> Iterator[int]:
    """Train up to the end of a batch or rollout again and again, and yield the number of env steps, or of updates."""
    while True:
        scheme.step()
        if scheme.is_between_train_batches:
            yield scheme.env_steps or scheme.version


def _warm_up(steps: Iterator[int], scheme: Any) -> int:
    """Train until enough updates are made, and return the number of env steps, or of updates."""
    while (count := next(steps)) < 0 or scheme.version < _WARM_UP_UPDATES:
        pass
    return count


def flops_of(learner: Any) -> float:
    """Return the 10^9 multiplications and additions of products and convolutions per env step; stop the learner."""
    from torch.utils.flop_counter import FlopCounterMode

    learner.start()
    steps = _steps_of(learner.scheme)
    first = last = _warm_up(steps, learner.scheme)
    with FlopCounterMode(display=False) as counter:
        for _ in range(12):
            last = next(steps)
    learner.stop()
    return round(counter.get_total_flops() / (last - first) / 1e9, 6)


def peer(name: str, case: str, seconds: float) -> None:
    """Train by another library, in turns, with the settings of the case's first program."""
    import importlib

    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    library, _, cls = name.partition(".")
    own = CASES[case][0][1]
    every, starts = own["update_every"], own["start_steps"]
    turns = Turns(seconds, {})

    class Callback(BaseCallback):  # type: ignore[misc,unused-ignore]
        def _on_step(self) -> bool:
            count = self.num_timesteps
            return count < starts + _WARM_UP_UPDATES * every or count % every != 0 or turns.go_on(count)

    settings: dict[str, Any] = {
        "batch_size": own["mini_batch_size"], "buffer_size": own["replay_size"], "learning_starts": starts,
        "gamma": own["gamma"], "train_freq": every, "gradient_steps": 1, "seed": 1}
    network: dict[str, Any] = {"net_arch": list(own["hidden_sizes"])}
    if cls == "QRDQN":
        network["n_quantiles"] = own["num_atoms"]
        settings |= {"target_update_interval": own["target_update_interval"] * every, "exploration_final_eps": 0.05,
                     "exploration_fraction": 1e-6, "max_grad_norm": 10}
    elif cls == "TQC":
        network["n_critics"] = own["num_critics"]
    elif cls == "CrossQ":
        network["net_arch"] = {"pi": [256, 256], "qf": [1024, 1024]}
    elif case == "droq-peers":
        settings |= {"gradient_steps": 20, "policy_delay": 20}
        network |= {"dropout_rate": 0.01, "layer_norm": True}
    if library == "sb3_contrib":
        settings["device"] = "cpu"
    model = getattr(importlib.import_module(library), cls)(
        "MlpPolicy", make_vec_env(own["env"], 1, seed=1), policy_kwargs=network, **settings)
    model.learn(10**9, callback=Callback())


def measure(case: str, are_compiled: list[bool], rounds: int, seconds: float, peer_python: str | None,
            ) -> Iterator[dict[str, Any]]:
    """Yield the figures of a case: for each choice of compilation or, beside other libraries, of all programs."""
    programs = CASES[case]
    if case.endswith("-peers"):
        if peer_python is None:
            raise SystemExit(f"{case} needs --peer-python")
        yield _measured(case, [(0, is_compiled) for is_compiled in are_compiled] + [
            (place, False) for place in range(1, len(programs))], rounds, seconds, peer_python)
        return
    for is_compiled in are_compiled:
        yield _measured(case, [(0, is_compiled), (1, is_compiled)], rounds, seconds, None)


def _measured(case: str, places: list[tuple[int, bool]], rounds: int, seconds: float, peer_python: str | None,
              ) -> dict[str, Any]:
    core = max(os.sched_getaffinity(0))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
           "PYTHONPATH": str(ROOT), "SHELF_CORE": str(core),
           "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    children: dict[str, Child] = {}
    figures: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[float]] = {}
    for place, is_compiled in places:
        name = CASES[case][place][0]
        is_peer = "." in name
        label = name if is_peer else f"{name}{_difference(case, place)}{', compiled' if is_compiled else ''}"
        command = [peer_python if is_peer else sys.executable, "-W", "ignore", __file__, "--child", case, str(place),
                   str(int(is_compiled)), str(seconds)]
        children[label] = Child([str(word) for word in command], env=env)
        figures[label], rates[label] = children[label].read(), []
    for _ in range(rounds):
        for label, child in children.items():
            rates[label].append(child.turn()["rate"])
    for child in children.values():
        child.end()
    first, *others = children
    result: dict[str, Any] = {"case": case, "env": CASES[case][0][1]["env"], "programs": {
        label: {"rate": round(statistics.median(found), 1), **figures[label]} for label, found in rates.items()}}
    firsts = [label for label in children if not any(label.startswith(name) for name in ("sb3_", "sbx."))]
    if peer_python is None:
        firsts = [first]
    result["ratios"] = {
        f"{mine} / {other}": _summary([a / b for a, b in zip(rates[mine], rates[other], strict=True)])
        for mine in firsts for other in others if other not in firsts}
    return result


def _difference(case: str, place: int) -> str:
    """Return the options that make the programs of a case differ, if both have the same algorithm."""
    programs = CASES[case]
    if len({name for name, _ in programs}) == len(programs):
        return ""
    mine, other = (programs[i][1] for i in (place, 1 - place))
    changed = [f"{name}={value}" for name, value in mine.items() if other.get(name) != value]
    return f" ({', '.join(changed)})" if changed else ""


def _summary(ratios: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]


def insertion(num_inserts: int) -> Iterator[dict[str, Any]]:
    """Yield the time of storing one step of one environment in a full replay, in microseconds: the median."""
    import numpy as np
    import torch

    from pytorchrl.agent.data import ActingStep, Step
    from pytorchrl.agent.storages import PERBuffer, ReplayBuffer

    torch.set_num_threads(1)
    no, yes, rng = np.zeros(1, np.bool_), np.ones(1, np.bool_), np.random.default_rng(1)
    for kind in (ReplayBuffer, PERBuffer):
        storage: Any = kind.create_factory(5000, rollout_size=1)(
            actor=SimpleNamespace(initial_states=lambda num_envs: {}), algorithm=SimpleNamespace(gamma=0.99),
            num_envs=1, seed=1)
        times: dict[str, list[float]] = {"within": [], "end": [], "after": []}
        storage.start({"obs": rng.random((1, 17), np.float32)}, None)
        place = "within"
        for number in range(num_inserts + 5000):
            obs, is_end = rng.random((1, 17), np.float32), number % 20 == 19
            action, end = rng.random((1, 6), np.float32), yes if is_end else no
            place = "end" if is_end else "after" if place == "end" else "within"
            storage.insert_transition(ActingStep(action, action, {}, {}), Step(
                {"obs": obs}, np.ones(1, np.float32), no, end, yes, end, np.arange(int(is_end)),
                {"obs": obs[:int(is_end)]}, None, []))
            rollout = storage.get_all_buffer_data(copy=False)
            start = time.perf_counter_ns()
            storage.insert_data_slice([rollout], ["collector"])
            if number >= 5000:
                times[place].append((time.perf_counter_ns() - start) / 1000)
        yield {"case": INSERTION, "storage": kind.__name__,
               "us": {name: round(statistics.median(found), 1) for name, found in times.items()}}


def main() -> None:
    """Parse the command line, measure the cases, and print a line for each."""
    if sys.argv[1:2] == ["--child"]:
        case, place, is_compiled, seconds = sys.argv[2:]
        name, options = CASES[case][int(place)]
        os.sched_setaffinity(0, {int(os.environ["SHELF_CORE"])})
        if "." in name:
            peer(name, case, float(seconds))
        else:
            ours(name, options, is_compiled == "1", float(seconds))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, INSERTION],
                        default=[*(case for case in CASES if not case.endswith("-peers")), INSERTION])
    parser.add_argument("--compile", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="processor time of a turn")
    parser.add_argument("--inserts", type=int, default=20_000, help="number of steps that the case insertion stores")
    parser.add_argument("--peer-python", help="interpreter with sb3-contrib and sbx-rl, for the cases -peers")
    args = parser.parse_args()
    for case in args.cases:
        found = insertion(args.inserts) if case == INSERTION else measure(
            case, [choice == "yes" for choice in args.compile], args.rounds, args.seconds, args.peer_python)
        for result in found:
            print(json.dumps({**origin(), **result}), flush=True)


if __name__ == "__main__":
    main()
