"""Write everything that users see of one source tree as text files, to compare two trees.

    python benchmarks/golden.py --tree ../before --out before
    python benchmarks/golden.py --out now --against before

If two trees show users the same, their texts are equal, and `diff -r before now` prints nothing. The subfolders are:

    help      the help of each command, algorithm and architecture
    run       tiny runs: files, settings, metrics, checkpoints, records, and what other commands print about these runs
    dry_run   the configuration of each algorithm in each suite of environments, and the list of a sweep
    repr      the texts of factories, schemes, schedules and trained agents
    errors    the exit codes and messages of wrong commands, and the errors of wrong calls in Python
    api       the signature of each public name, and of its public members and options

Only the command line and the names that `import pytorchrl` provides are used. Times, rates, checksums of texts that
contain times, addresses, paths and versions are replaced by placeholders. All runs are repeatable: they have seeds, and
asynchronous runs are simulated. To save time, one process imports torch and runs each command in a fork. With
`--against`, the differences from another folder are printed, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parents[1]
TREE = "GOLDEN_TREE"  # set in the process that writes the texts: the tree whose package it imports

ALGORITHMS = ("a2c", "appo", "ddpg", "dqn", "impala", "ppo", "r2d2", "sac", "td3")
# Name of each architecture -> an algorithm that suits it.
ARCHITECTURES = {"a3c": "a2c", "ddppo": "ppo", "microbatch": "ppo", "impala": "impala", "appo": "appo", "apex": "dqn",
                 "r2d2": "r2d2", "rapid": "appo"}
SUITES = ("CartPole-v1", "Pendulum-v1", "ALE/Pong-v5", "HalfCheetah-v5")
COMMANDS = ("train", "watch", "report", "board", "profile", "enjoy", "dataset", "export", "plot", "compare")

# Tiny runs: name -> arguments of `train`.
TINY = "--seed 1 --no-progress --num-envs 2 --hidden-sizes 16"
FILES = "--no-tensorboard --log-every 64"
SIMULATED = f"--env CartPole-v1 --runtime simulated {TINY} {FILES}"
SMALL = "--start-steps 64 --mini-batch-size 16 --replay-size 400"
PENDULUM = f"--env Pendulum-v1 {TINY} {FILES} --target-steps 192"
PPO = f"ppo --env CartPole-v1 {TINY} --num-steps 32 --log-every 128"
IMPALA = f"impala --preset impala {SIMULATED} --num-steps 16 --train-batch-size 64 --target-steps 512"
RUNS = {
    "ppo": f"{PPO} --target-steps 512 --checkpoint-every 256 --eval-every 512 --eval-episodes 3 --normalize-obs "
           "--keep-best-checkpoint",
    "ppo-2": f"{PPO} --target-steps 512 --seed 2 --json",
    "ppo-threads": f"{PPO} --target-steps 512 --num-col-workers 2 --runtime threads --checkpoint-every 256",
    "ppo-gru": f"{PPO} --target-steps 256 --recurrent-net gru --recurrent-size 8 --num-mini-batch 2",
    "ppo-async": f"ppo {SIMULATED} --schedule-seed 3 --num-steps 16 --num-col-workers 2 --target-steps 512 "
                 "--col-communication asynchronous --num-grad-workers 2 --grad-communication asynchronous "
                 "--checkpoint-every 256 --eval-every 128 --eval-episodes 2",
    "agents": f"ppo --env mpe2.simple_speaker_listener_v4 --policies independent {TINY} {FILES} --target-steps 128",
    "impala": f"{IMPALA} --schedule-seed 3 --record impala.jsonl",
    "impala-replay": f"{IMPALA} --replay impala.jsonl",
    "lost-worker": f"{IMPALA} --faults 'kill col.1 @ step 40; delay col.2 2s p=0.1'",
    "ddppo": f"ppo --preset ddppo {SIMULATED} --num-steps 16 --target-steps 512",
    "r2d2": f"r2d2 {SIMULATED} --start-steps 64 --replay-size 800 --target-steps 256",
    "apex": f"dqn --preset apex {SIMULATED} {SMALL} --num-replay-workers 2 --target-steps 384 --checkpoint-every 192",
    "dqn": f"dqn --env CartPole-v1 {TINY} {FILES} {SMALL} --target-steps 256 --checkpoint-every 128",
    "sac": f"sac {PENDULUM} {SMALL} --checkpoint-every 96", "td3": f"td3 {PENDULUM} {SMALL}",
    "a2c": f"a2c {PENDULUM} --num-steps 16",
}
LOADED = " | ".join(f"load('runs/{name}') | load('runs/{name}').evaluate(2)" for name in RUNS)
# Commands that use these runs.
AFTER = {
    "resume": f"train {RUNS['ppo']} --target-steps 768 --log-dir runs/ppo --resume",
    "resume-other": f"train {RUNS['ppo']} --target-steps 768 --gamma 0.5 --log-dir runs/ppo --resume",
    "existing": f"train {PPO} --target-steps 128 --log-dir runs/ppo",
    "overwrite": f"train {PPO} --target-steps 128 --log-dir runs/ppo-gru --overwrite",
    "numbered": f"train {PPO} --target-steps 128 --log-dir runs/",
    "run-json": "train --config runs/dqn/run.json --target-steps 64 --log-dir runs/again --no-progress",
    "fault": f"train {IMPALA} --faults 'raise col.1 @ step 40'",
    "enjoy": "enjoy runs/ppo --episodes 3 --seed 3", "enjoy-json": "enjoy runs/sac --episodes 2 --stochastic --json",
    "enjoy-model": "enjoy runs/ppo --model best", "enjoy-runs": "enjoy runs",
    "watch": "watch runs/impala --once --width 100", "report": "report runs/impala -o report.html",
    "compare": "compare runs/ppo-2 runs/ppo-threads -o comparison.svg", "compare-ends": "compare runs/ppo runs/ppo-2",
    "compare-json": "compare a=runs/ppo-2 b=runs/ppo-threads --json", "plot-y": "plot runs/ppo-2 --y loss",
    "plot": "plot runs/ppo-2 runs/ppo-threads -o curve.svg", "plot-smooth": "plot runs/ppo --smooth 2",
    "dataset": "dataset runs/ppo --out data.npz --episodes 2", "dataset-again": "dataset runs/ppo --out data.npz",
    "export": "export runs/ppo --to safetensors --out policy.safetensors --checks 20",
    "export-again": "export runs/ppo --to safetensors --out policy.safetensors",
}
CONFIGS = {"sweep": "[sweep]\nseed = [1, 2]\n", "wrong-key": "num_epoch = 4\n", "wrong-syntax": "seed = one\n",
           "wrong-type": 'seed = 1\nnum_epochs = "many"\n'}
# Entries of the lists below are separated by " |".
WRONG_COMMANDS = """
 | train | train pppo --env CartPole-v1 | train ppo | train no_module:Nothing --env A | train ppo --env NoSuch-v0 |
train ppo --env nothing.here | train ddpg --env CartPole-v1 | train dqn --env Pendulum-v1 | enjoy | enjoy nowhere |
enjoy nowhere --episodes 0 | export nowhere --to cake | watch nowhere | report nowhere | board nowhere | plot nowhere |
compare | dataset nowhere | sweep | profile ppo --env CartPole-v1 --seconds 0"""
# Flags that are added to a command that is otherwise correct.
WRONG_FLAGS = """
--learning-rate 3 | --lr | --lr linear:1 | --lr fast | --gamma 1.5 | --num-steps 0 | --num-envs two | extra |
--hidden-sizes 64,0 | --activation bent | --runtime cloud | --preset fast | --preset apex | --num-replay-workers 2 |
--preset a3c --num-grad-workers 1 | --num-envs 1 --num-steps 1 | --record a --replay b | --replay missing.jsonl |
--checkpoint-every 100 | --resume | --log-dir runs/ --resume | --faults boom | --costs { | --device cuda:9 |
--compress-weights-to-send topk | --checkpoint missing.pt | --seed -1 | --mini-batch-size 5 --num-mini-batch 2 |
--config wrong-key.toml | --config wrong-type.toml | --config wrong-syntax.toml | --config missing.toml |
--distribute-gradients --grad-communication asynchronous --num-grad-workers 2"""
SETUP = """
import torch, pytorchrl
from pytorchrl import *
envs, box_envs = (VecEnv.create_factory(name, vec_env_size=2) for name in ("CartPole-v1", "Pendulum-v1"))
agents_envs = MultiAgentVecEnv.create_factory("mpe2.simple_speaker_listener_v4", policy_of="independent")
spaces, box = ((one.observation_space, one.action_space) for one in (envs, box_envs))
actor = OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,))
ppo = PPO.create_factory(), actor, GAEBuffer.create_factory(8), envs
dqn = DQN.create_factory(start_steps=40), QActor.create_factory(*spaces), PERBuffer.create_factory(400), envs
vtrace = actor, VTraceBuffer.create_factory(8), envs
sequences = SequenceBuffer.create_factory(400, rollout_size=4, length=4, burn_in=2, period=2)
r2d2 = R2D2.create_factory(start_steps=40), QActor.create_factory(*spaces, recurrent_net="gru"), sequences, envs
"""
EXPRESSIONS = """
envs | box_envs | agents_envs | actor | dqn[1] | r2d2[1] | ppo[2] | dqn[2] | vtrace[1] | sequences | dqn[0] |
[each.create_factory() for each in (A2C, APPO, DDPG, DQN, IMPALA, PPO, R2D2, SAC, TD3)] | exponential(1e-3, 1e-4, 500) |
PPO.create_factory(lr=linear(1e-3, 0), clip_param=piecewise((0, 0.2), (1000, 0.1))) | ReplayBuffer.create_factory(100) |
SAC.create_factory(lr_pi=cosine(1e-3, 1e-4), gamma=0.9) | RolloutSequenceBuffer.create_factory(400, rollout_size=4) |
OnPolicyActor.create_factory(*box, recurrent_net='gru', normalize_obs=True) | OffPolicyActor.create_factory(*box) |
VanillaOnPolicyBuffer.create_factory(8) | (ASYNC, SYNC, CENTRAL, PARALLEL, str(ASYNC), str(CENTRAL)) |
Scheme(*ppo, seed=1) | Scheme.a3c(*ppo, seed=1) | Scheme.ddppo(*ppo, seed=1) | Scheme.microbatch(*ppo, seed=1) |
Scheme.apex(*dqn, seed=1) | Scheme.r2d2(*r2d2, seed=1) | Scheme.impala(IMPALA.create_factory(), *vtrace, seed=1) |
Scheme.appo(APPO.create_factory(), *vtrace, seed=1) | Scheme.rapid(APPO.create_factory(), *vtrace, seed=1) |
multi_agent(agents_envs, PPO.create_factory(), OnPolicyActor.create_factory, GAEBuffer.create_factory(8)) |
(agent := train('ppo', 'CartPole-v1', target_steps=128, num_envs=2, num_steps=32, seed=1, progress=False)) |
(agent.return_mean, sorted(agent.summary)) | agent.evaluate(3) | agent.evaluate(3, deterministic=False) | agent.policy |
agent.act(torch.zeros(4).numpy()) | agent.policy(torch.zeros(2, 4)) | {k: len(v) for k, v in agent.acting_state.items()}
"""
WRONG_EXPRESSIONS = """
pytorchrl.nothing | PPO() | VecEnv('CartPole-v1') | PPO.create_factory(gama=1) | PPO.create_factory(gamma=2) |
PPO.create_factory(lr='fast') | GAEBuffer.create_factory() | GAEBuffer.create_factory(0) | linear(1, 'x') |
QActor.create_factory(*box) | VecEnv.create_factory('NoSuch-v0').action_space | piecewise((0, 1), (0, 2)) |
Scheme(1, 2, 3, 4) | Scheme(*ppo, nothing=1) | Scheme(ppo[0], actor, dqn[2], envs) | Scheme(*ppo, num_col_workers=0) |
Scheme(dqn[0], actor, dqn[2], envs) | Scheme.apex(*ppo) | Scheme.ddppo(*ppo, distribute_gradients=False) |
Learner(Scheme(*ppo)) | Learner(Scheme(*ppo), target_steps=9, eval=1) | train('pppo', 'CartPole-v1') |
train('ppo', 'CartPole-v1', num_epoch=3) | train('ppo', 'CartPole-v1', preset='fast') | load('nowhere') |
train('ppo', 'CartPole-v1', info_keywords=['a']) | multi_agent(envs, ppo[0], actor, ppo[2])"""
# The statements and expressions for each subfolder.
PYTHON = {"run": ("from pytorchrl import load", LOADED), "repr": (SETUP, EXPRESSIONS),
          "errors": (SETUP, WRONG_EXPRESSIONS)}

# Keys whose values depend on time or on the machine. Settings such as `grace_s` do not match.
TIMED = re.compile(r".*(per_s|_time_ms|sha256)|seconds|bytes|started|time_s|versions|machine")
PLACEHOLDERS = [(re.compile(pattern), text) for pattern, text in (
    (r"\b0x[0-9a-f]{6,}", "0x#"), (r"in [\d.,]+ s \([\d.,]+ steps/s\)", "in # s (# steps/s)"),
    (r"(events\.out\.tfevents)[\w.-]+", r"\1.#"), (r"\(largest difference \S+\)", "(largest difference #)"),
    (r'("(?:seconds|env_steps_per_s)": )[\d.e-]+', r"\1#"))]


def normal(text: str) -> str:
    """Replace paths, times, rates and addresses in a text."""
    for path, name in ((os.getcwd(), "SCRATCH"), (sys.prefix, "VENV"), (os.environ[TREE], "TREE")):
        text = text.replace(os.path.realpath(path), name)
    for pattern, placeholder in PLACEHOLDERS:
        text = pattern.sub(placeholder, text)
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n"))


def without_numbers(text: str) -> str:
    """Return a screen or page that shows rates, without its numbers, pictures and bars, and with single spaces."""
    text = re.sub(r"<(svg|style|script)\b.*?</\1>", r"<\1>", text, flags=re.DOTALL).replace("><", ">\n<")
    text = re.sub(r"(?<!exit code )\d+([.,:]\d+)*([kMG]?(?=B/s)|[kMG]\b)?", "#", text)
    return re.sub(r"[█░━]+", "=", re.sub(r" +", " ", text))


def in_fork(action: Callable[[], object]) -> tuple[int | str, str, str]:
    """Execute an action in a fork of this process; return its exit code, standard output and standard error."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        def redirected() -> None:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            action()

        process = multiprocessing.get_context("fork").Process(target=redirected)
        process.start()
        process.join(300)
        code = "timeout" if process.exitcode is None else process.exitcode
        process.kill()
        process.join()
        return code, *(file.read() for file in (out, err) if not file.seek(0))


def output(line: str) -> str:
    """Return what a command prints, and its exit code."""
    def run() -> None:
        sys.argv = ["pytorchrl", *shlex.split(line)]
        runpy.run_module("pytorchrl", run_name="__main__", alter_sys=True)

    code, out, err = in_fork(run)
    return f"$ pytorchrl {line}\nexit code {code}\n--- stdout\n{out}--- stderr\n{err}"


def values(setup: str, expressions: str) -> str:
    """Return the values of Python expressions after some statements, or the errors that they raise."""
    def evaluate() -> None:
        names: dict[str, Any] = {}
        exec(setup, names)
        for expression in listed(expressions):
            print(f">>> {expression}")
            try:
                print(f"{eval(expression, names)!r}\n")
            except Exception as error:  # noqa: BLE001 - errors are part of what users see
                print(f"{type(error).__name__}: {error}\n")

    return "".join(map(str, in_fork(evaluate)[1:]))


def listed(text: str) -> list[str]:
    """Return the entries of one of the lists above."""
    return [entry.strip() for entry in text.split(" |")]


def commands() -> dict[str, dict[str, str]]:
    """Return the commands of each subfolder, by the names of the files that contain their output."""
    helps = [*(f"{name} --help" for name in ("", *COMMANDS, "profile ppo")), "--version"]
    helps += [f"train {name} {flag}" for name in ALGORITHMS for flag in ("--help", "--help-all")]
    helps += [f"train {algorithm} --preset {name} --help-all" for name, algorithm in ARCHITECTURES.items()]
    configured = [f"{name} --env {env}" for name in ALGORITHMS for env in SUITES]
    configured += [f"{algorithm} --env CartPole-v1 --preset {name}" for name, algorithm in ARCHITECTURES.items()]
    configured += ["ppo --env CartPole-v1 --lr linear:1e-3:0 --hidden-sizes 32 32 --costs '{\"step\": 0.1}'"]
    wrong = listed(WRONG_COMMANDS)
    wrong += [f"train ppo --env CartPole-v1 --target-steps 8 {flags}" for flags in listed(WRONG_FLAGS)]
    return {
        "help": {named(line): line for line in helps},
        "run": {**{name: f"train {line} --log-dir runs/{name}" for name, line in RUNS.items()}, **AFTER},
        "dry_run": {named(line): f"train {line} --config sweep.toml --dry-run --save-config {named(line)}.toml"
                    for line in configured},
        "errors": {named(line): line for line in wrong}, "repr": {}, "api": {}}


def named(line: str) -> str:
    """Return the name of the file that contains the output of a command."""
    return re.sub(r"[^A-Za-z0-9]+", "-", line).strip("-") or "no-arguments"


def texts(part: str) -> Iterator[tuple[str, str]]:
    """Yield the name and contents of each file of a subfolder; the working directory must be empty."""
    for name, config in CONFIGS.items():
        Path(f"{name}.toml").write_text(config, encoding="utf-8")
    for name, line in commands()[part].items():
        yield name, without_numbers(normal(output(line))) if name == "watch" else output(line)
    if part == "api":
        yield part, "".join(in_fork(print_names)[1:])
    elif part in PYTHON:
        yield "python", values(*PYTHON[part])
    files = sorted(path for path in Path().rglob("*") if path.is_file())
    yield "files", "\n".join(map(str, files))
    for path in files:
        if "tfevents" not in path.name:
            yield f"files/{path}", file_text(path)


def file_text(path: Path) -> str:
    """Return the contents of a file that a command has written, as text."""
    import torch

    if path.suffix == ".pt":
        return "\n".join(structure(torch.load(path, weights_only=True)))
    if path.suffix in (".npz", ".safetensors"):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".svg":  # matplotlib writes each text as a comment and as outlines
        return "\n".join(re.findall(r"<!-- (.*?) -->", text))
    if path.suffix == ".csv":
        return re.sub(r"(?m)^([^,\n]+,\d+),[\d.]+", r"\1,#", text)
    if path.suffix in (".json", ".jsonl"):
        lines = [text] if path.suffix == ".json" else text.splitlines()
        return "\n".join(structure(joined([json.loads(line) for line in lines])))
    return without_numbers(normal(text)) if path.suffix == ".html" else text


def joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the lines of a record, and omit the newest checkpoint in metrics: both are written at arbitrary times."""
    journals: dict[str, dict[str, list[str]]] = {}
    for worker, incarnation, events, turns in (part for line in lines for part in line.get("parts", ())):
        journal = journals.setdefault(f"{worker}, incarnation {incarnation}", {"events": [], "turns": []})
        journal["events"] += map(str, events)
        journal["turns"] += map(str, turns)
    for line in lines:
        line.pop("checkpoint", None)
    return [line for line in lines if "parts" not in line] + ([journals] if journals else [])


def structure(value: Any, place: str = "", hide: bool = False) -> Iterator[str]:
    """Yield a line for each nested value. It shows the shape, dtype and hash of a tensor, and hides values of time."""
    hide = hide or TIMED.fullmatch(place.rpartition("/")[2]) is not None
    if isinstance(value, (dict, list, tuple)) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from structure(item, f"{place}/{key}", hide)
    elif hasattr(value, "dtype"):
        hashed = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        yield f"{place}: {tuple(value.shape)} {value.dtype} {hashed}"
    else:
        yield f"{place}: {type(value).__name__}" + ("" if hide else f" {value!r}")


def print_names() -> None:
    """Print the signatures of public names and of their public members."""
    import pytorchrl

    print(pytorchrl.__all__)
    for name in pytorchrl.__all__:
        value = getattr(pytorchrl, name)
        print(f"\n{described(name, value)}")
        if isinstance(value, type):
            print("  bases", *(base.__name__ for base in value.__mro__
                               if base.__name__ in pytorchrl.__all__ or base.__module__ == "builtins"))
            for member in dir(value):
                if not member.startswith("_") and not hasattr(Exception, member):
                    kind = type(inspect.getattr_static(value, member)).__name__
                    print(f"  {described(f'{kind} {member}', getattr(value, member))}")


def described(name: str, value: object) -> str:
    """Return the value of a constant, or the signature and the first line of the docstring of anything else."""
    if isinstance(value, (str, int, float, tuple, enum.Enum)):
        return f"{name} = {value!r}"
    try:
        signature = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        signature = ""
    signature = re.sub(r"pytorchrl\.[a-z_.]+\.(?=[A-Z])", "", signature)  # classes may move to other modules
    return f"{name}{signature}: " + (inspect.getdoc(value) or "").split("\n")[0]


def write(folder: Path, parts: list[str]) -> None:
    """Write the texts of the given parts, and remove their earlier texts."""
    import gymnasium  # noqa: F401 - imported before forking, because it takes long to import
    import torch

    found = importlib.util.find_spec("pytorchrl")
    if found is None or not Path(str(found.origin)).is_relative_to(os.environ[TREE]):
        raise SystemExit(f"there is no package pytorchrl in {os.environ[TREE]}")
    torch.set_num_threads(1)
    sys.path[0] = ""  # the working directory instead of the folder of this script
    for part in parts:
        shutil.rmtree(folder / part, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
            os.chdir(scratch)
            for name, text in texts(part):
                path = folder / part / f"{name}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("x", encoding="utf-8") as file:
                    file.write(normal(text))
            os.chdir(os.environ[TREE])


def main() -> int:
    """Parse the command line, write the texts, and compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE, help="source tree whose package to run [this one]")
    parser.add_argument("--out", type=Path, required=True, help="folder for the texts")
    parser.add_argument("--against", type=Path, help="folder of texts to compare with")
    parser.add_argument("--only", nargs="+", choices=commands(), default=list(commands()), help="subfolders [all]")
    options = parser.parse_args()
    if TREE in os.environ:
        write(options.out.resolve(), options.only)
        return 0
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        tree = str(options.tree.resolve())
        environment = {
            **os.environ, TREE: tree, "PYTHONPATH": tree, "PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": scratch,
            "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "100",
            "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "MPLCONFIGDIR": scratch}
        code = subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    if code or options.against is None:
        return code
    return max(subprocess.run(["diff", "-ruN", options.against / part, options.out / part], check=False).returncode
               for part in options.only)


if __name__ == "__main__":
    sys.exit(main())
