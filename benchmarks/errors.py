"""Make the mistakes that users make, and count the lines that each of them fills in a terminal; print them as JSON.

    python benchmarks/errors.py [--cases env loss ...] [--places process processes ray] [--drivers train ...] [--show]

Each mistake is made by a script of a user, in a new process: in this process only, with two collection workers in
processes, and with two on Ray; by `train`, by a `Learner`, by a loop of `Scheme.step`, and by the command line. The
numbers are lines of 100 columns of standard error. `--show` prints the text instead. The script asserts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from results import print_result

COLUMNS = 100
GIVE_UP_S = 120.0
FILES = {
    "physics.py": '''
import numpy as np

def advance(steps):
    return integrate(steps)

def integrate(steps):
    table = {number: number / 10 for number in range(6)}
    return np.full(3, table[steps], np.float32)
''',
    "mistakes.py": '''
import gymnasium, os, signal, torch
import numpy as np
from pytorchrl import PPO
from pytorchrl.callbacks import Callback
from physics import advance

class Maze(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), 1.0, False, self.steps == 50, {}

class Broken(Maze):
    def step(self, action):
        self.steps += 1
        return advance(self.steps), 1.0, False, False, {}

class Unbuilt(Maze):
    def __init__(self):
        advance(7)

class Dying(Maze):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)

class Continuous(Maze):
    action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

def reward_of(reward):
    return reward / len(advance(9))

def rewarded(env):
    return gymnasium.wrappers.TransformReward(env, reward_of)

class Network(torch.nn.Module):
    def __init__(self, space):
        super().__init__()
        self.layer, self.out_features = torch.nn.Linear(4, 4), 4
    def forward(self, x):
        return self.hidden(x)
    def hidden(self, x):
        return self.layer(x)

class Loss(PPO):
    def terms(self, evaluated, batch, parameters):
        return self.of_advantages(batch)
    def of_advantages(self, batch):
        return batch.advantages.mean()

class Report(Callback):
    def on_step(self, run, info):
        self.write(info)
    def write(self, info):
        open("/nowhere/report.txt", "w")

for name in ("Maze", "Broken", "Unbuilt", "Dying", "Continuous"):
    gymnasium.register(f"{name}-v0", entry_point=f"mistakes:{name}")
''',
    "script.py": '''
import os, signal, sys, subprocess
import pytorchrl
from pytorchrl import PPO, DQN, GAEBuffer, ReplayBuffer, Learner, OffPolicyActor, OnPolicyActor, Scheme, VecEnv
import mistakes

# The function counts as part of the standard library, as the functions do that write files.
FULL = {"__name__": "os"}
exec("def fsync(file): raise OSError(28, 'No space left on device')", FULL)

class EndRay(mistakes.Callback):
    def on_step(self, run, info):
        if run.updates == 1:
            found = subprocess.check_output(["pgrep", "-P", str(os.getpid()), "gcs_server"], text=True)
            os.kill(int(found), signal.SIGKILL)

CASES = {
    "option": dict(num_stps=3),
    "space": dict(algorithm="dqn", env="Continuous"),
    "env": dict(env="Broken", on_env_error="restart"),
    "env raise": dict(env="Broken", on_env_error="raise"),
    "env built": dict(env="Unbuilt"),
    "reward": dict(wrappers=(mistakes.rewarded,), on_env_error="raise"),
    "network": dict(feature_extractor=mistakes.Network),
    "loss": dict(algorithm=mistakes.Loss),
    "callback": dict(callbacks=[mistakes.Report()]),
    "killed": dict(env="Dying", on_worker_failure="raise"),
    "killed again": dict(env="Dying"),
    "no ray": dict(),
    "ray dies": dict(callbacks=[EndRay()]),
    "disk": dict(log_dir="run"),
}

def scheme_of(algorithm="ppo", env="Maze", wrappers=(), on_env_error="auto", feature_extractor=None, **settings):
    envs = VecEnv.create_factory(getattr(mistakes, env), {}, 1, wrappers=wrappers, on_env_error=on_env_error)
    spaces = envs.observation_space, envs.action_space
    if algorithm == "dqn":
        storage = ReplayBuffer.create_factory(100)
        return Scheme(DQN.create_factory(), OffPolicyActor.create_factory(*spaces), storage, envs)
    net = {} if feature_extractor is None else {"feature_extractor": feature_extractor}
    kind = PPO if algorithm == "ppo" else algorithm
    return Scheme(kind.create_factory(num_epochs=1, num_mini_batch=1),
                  OnPolicyActor.create_factory(*spaces, **net), GAEBuffer.create_factory(16), envs, **settings)

def loop(options):
    scheme = scheme_of(**options)
    try:
        for _ in range(4):
            scheme.step()
    finally:
        scheme.stop()

def learn(options):
    of_learner = {name: options.pop(name) for name in ("callbacks", "log_dir") if name in options}
    with Learner(scheme_of(**options), target_steps=400, progress=False, **of_learner) as learner:
        learner.train()

def train(options):
    algorithm, env = options.pop("algorithm", "ppo"), getattr(mistakes, options.pop("env", "Maze"))
    more = {} if algorithm == "dqn" else dict(num_mini_batch=1, num_epochs=1, num_steps=16)
    pytorchrl.train(algorithm, env, target_steps=400, num_envs=1, progress=False, **more, **options)

DRIVERS = {"train": train, "learner": learn, "scheme": loop}

def options_of(case, settings):
    if case == "no ray":
        sys.modules["ray"] = None
    if case == "disk":
        os.fsync = FULL["fsync"]
    return {**CASES[case], **settings}

if __name__ == "__main__":
    DRIVERS[sys.argv[2]](options_of(sys.argv[1], eval(sys.argv[3])))
''',
}
PLACES: dict[str, dict[str, object]] = {
    "process": {},
    "processes": {"num_col_workers": 2, "runtime": "processes"},
    "ray": {"num_col_workers": 2, "runtime": "ray", "col_worker_resources": {"num_cpus": 0}},
}
DRIVERS = ("train", "learner", "scheme", "command")
# The flags that make each mistake on the command line; mistakes that are not listed cannot be made there.
FLAGS: dict[str, list[str]] = {
    "option": ["ppo", "--env", "mistakes:Maze-v0", "--num-stps", "3"],
    "space": ["dqn", "--env", "mistakes:Continuous-v0"],
    "env": ["ppo", "--env", "mistakes:Broken-v0", "--on-env-error", "restart"],
    "env raise": ["ppo", "--env", "mistakes:Broken-v0", "--on-env-error", "raise"],
    "env built": ["ppo", "--env", "mistakes:Unbuilt-v0"],
    "loss": ["mistakes:Loss", "--env", "mistakes:Maze-v0"],
    "killed": ["ppo", "--env", "mistakes:Dying-v0", "--on-worker-failure", "raise"],
    "killed again": ["ppo", "--env", "mistakes:Dying-v0"],
}
CASES = (*FLAGS, "network", "reward", "callback", "no ray", "ray dies", "disk")


def is_possible(case: str, place: str, driver: str) -> bool:
    """Return whether a mistake can be made at a place by a driver."""
    if driver == "command" and case not in FLAGS:
        return False
    if case in ("callback", "ray dies", "disk") and driver == "scheme":
        return False
    if case == "option" and driver in ("scheme", "learner"):
        return place == "process"
    return place == "ray" if case in ("no ray", "ray dies") else not (place == "process" and case.startswith("killed"))


def write_files(folder: Path) -> None:
    """Write the files of the user."""
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip("\n"))


def arguments_of(case: str, place: str, driver: str) -> list[str]:
    """Return the arguments of Python for one mistake."""
    if driver != "command":
        return ["script.py", case, driver, repr(PLACES[place])]
    flags = [] if place == "process" else ["--num-col-workers", "2", "--runtime", place]
    if place == "ray":
        flags += ["--col-worker-resources", '{"num_cpus": 0}']
    common = [] if case == "space" else ["--num-envs", "1", "--num-steps", "16", "--num-mini-batch", "1"]
    return ["-m", "pytorchrl", "train", *FLAGS[case], *common, "--target-steps", "400", "--no-progress", *flags]


def lines_of(text: str) -> list[str]:
    """Return the lines of a text in a terminal of `COLUMNS` columns."""
    return [line[start:start + COLUMNS] for line in text.rstrip("\n").split("\n")
            for start in range(0, max(1, len(line)), COLUMNS)]


def error_of(case: str, place: str, driver: str, folder: str) -> str:
    """Make a mistake in a new process; return what the process wrote to standard error."""
    done = subprocess.run(
        [sys.executable, *arguments_of(case, place, driver)], capture_output=True, text=True, timeout=GIVE_UP_S,
        check=False, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.stderr


def main() -> None:
    """Make the mistakes, and print the numbers of lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=tuple(PLACES))
    parser.add_argument("--drivers", nargs="+", choices=DRIVERS, default=DRIVERS)
    parser.add_argument("--show", action="store_true", help="print the text of each error")
    given = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    for case, place, driver in itertools.product(given.cases, given.places, given.drivers):
        if is_possible(case, place, driver):
            with tempfile.TemporaryDirectory() as folder:
                write_files(Path(folder))
                text = error_of(case, place, driver, folder)
            found.setdefault(case, {})[f"{driver}, {place}"] = len(lines_of(text))
            if given.show:
                print(f"===== {case}: {driver}, {place}: {len(lines_of(text))} lines\n{text}", flush=True)
    print_result({"columns": COLUMNS, "lines": found})


if __name__ == "__main__":
    main()
