"""Give what a stranger could send to every reader: nothing is executed or imported, written elsewhere, or hangs."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

import pytorchrl
from pytorchrl.files.tensors import save

# Reads the runs and the configurations in the folder of argument 1, and prints a list of [name, reader, outcome]. Each
# reader may take five seconds of processor time, and the process may take 1 GiB more memory than after its imports.
SCRIPT = '''
import contextlib, io, json, os, resource, signal, sys
from pathlib import Path
import pytorchrl as prl
from pytorchrl import cli
from pytorchrl.errors import PyTorchRLError
from pytorchrl.training.configuration import load_sweep

sys.path.insert(0, "")  # as `python -m` does

def command(*arguments):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(list(arguments))
    if code and "internal error" not in err.getvalue():
        raise PyTorchRLError(err.getvalue())
    if code:
        raise RuntimeError(f"exit code {code}: {err.getvalue()}")

OF_RUNS = {
    "load": lambda: prl.load("."), "evaluate": lambda: prl.load(".").evaluate(1),
    "enjoy": lambda: command("enjoy", ".", "--episodes", "1"),
    "export": lambda: command("export", ".", "--to", "torch", "--checks", "1"),
    "dataset": lambda: command("dataset", ".", "--out", "data.npz", "--episodes", "1"),
    "config": lambda: load_sweep("run.json"), "dry run": lambda: command("train", "--config", "run.json", "--dry-run"),
    "report": lambda: command("report", "."),
}
OF_FILES = {
    "config": lambda: load_sweep("run.toml"), "dry run": lambda: command("train", "--config", "run.toml", "--dry-run"),
    "train": lambda: command("train", "--config", "run.toml"),
}
os.chdir(sys.argv[2])
for read in OF_RUNS.values():  # everything is imported before memory is limited
    read()
known = set(sys.modules)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
for place in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    os.chdir(place)
    readers = OF_FILES if Path("run.toml").exists() else OF_RUNS
    if Path("few").exists():  # the other readers read the same file in the same way
        readers = {name: readers[name] for name in ("load", "enjoy")}
    for name, read in readers.items():
        signal.setitimer(signal.ITIMER_PROF, 5)  # ends the process
        signal.alarm(60)
        try:
            read()
            outcome = "read"
        except PyTorchRLError as error:
            outcome = f"error {str(error)}"
        except BaseException as error:
            outcome = f"raw {type(error).__name__}: {str(error)[:300]}"
        print(json.dumps([place.name, name, outcome[:2000]]), flush=True)
signal.alarm(0)
signal.setitimer(signal.ITIMER_PROF, 0)
print(json.dumps(sorted(name for name, module in sys.modules.items() if name not in known and (
    name.split(".")[0] in ("evil", "antigravity", "this", "idlelib")
    or str(getattr(module, "__file__", "")).startswith(str(Path(sys.argv[1]).parent))))))
'''
TINY = {"num_envs": 1, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (4,), "target_steps": 32,
        "progress": False, "tensorboard": False}
CODE = {"__code__": "evil:Thing"}


def wrapper(name, **arguments):
    return {"__partial__": [{"__code__": f"gymnasium.wrappers:{name}"}, [], arguments]}


def environments(folder):
    """Return name -> options of the environments in `run.json`, and whether `load` accepts them."""
    pipe, large = folder / "pipe", folder / "large"
    os.mkfifo(pipe)
    with open(large, "wb") as file:
        file.truncate(1 << 30)
    return {
        "frames": ({"frame_stack": 10**9}, False), "more frames": ({"frame_stack": 2000}, False),
        "steps": ({"max_episode_steps": 10**15}, False), "played": ({"vec_env_size": 10**7}, False),
        "pipe": ({"env_kwargs": {"xml_file": str(pipe)}}, False),
        "device": ({"env_kwargs": {"a": {"b": ["/dev/zero"]}}}, False),
        "large file": ({"test_env_kwargs": {"xml_file": str(large)}}, False),
        "large number": ({"env_kwargs": {"frame_skip": 10**9}}, False),
        "negative number": ({"env_kwargs": {"size": -10**9}}, False),
        "recorder": ({"wrappers": [wrapper("RecordVideo", video_folder=str(folder / "canary"))]}, False),
        "recorder inside": ({"wrappers": [{"__partial__": [wrapper("RecordVideo", video_folder="c"), [], {}]}]}, False),
        "window": ({"wrappers": [wrapper("HumanRendering")]}, False),
        "no arguments": ({"wrappers": [{"__code__": "gymnasium.wrappers:RecordVideo"}]}, False),
        "limit": ({"wrappers": [wrapper("TimeLimit", max_episode_steps=10**15)]}, False),
        "stack": ({"wrappers": [wrapper("FrameStackObservation", stack_size=10**9)]}, False),
        "skip": ({"wrappers": [wrapper("MaxAndSkipObservation", skip=10**9)]}, False),
        "repeat": ({"wrappers": [wrapper("RepeatAction", num_repeats=10**9)]}, False),
        "delay": ({"wrappers": [wrapper("DelayObservation", delay=10**9)]}, False),
        "small stack": ({"wrappers": [wrapper("TimeLimit", max_episode_steps=5)]}, True),
        "system": ({"wrappers": [{"__code__": "os:system"}]}, False),
        "own wrapper": ({"wrappers": [CODE]}, False),
        "text wrapper": ({"wrappers": ["evil:Thing"]}, False),
        "table wrapper": ({"wrappers": [{"call": "evil:Thing"}]}, False),
        "partial of three": ({"env_fn": {"__partial__": [CODE, [], {}, 4]}}, False),
        "partial of text": ({"env_fn": {"__partial__": ["os.system", ["touch canary"], {}]}}, False),
        "make": ({"env_fn": {"__code__": "gymnasium:make"}, "env_kwargs": {"id": "evil:Thing-v0"}}, False),
        "popen": ({"env_fn": {"__code__": "subprocess:Popen"}, "env_kwargs": {"args": ["touch", "canary"]}}, False),
        "own class": ({"env_fn": CODE}, False), "own id": ({"env_fn": "evil:Thing-v0"}, False),
        "own name": ({"env_fn": "evil:Thing"}, False), "own module": ({"env_fn": "evil"}, False),
        "dotted": ({"env_fn": "evil.sub"}, False), "namespace": ({"env_fn": "evil/Thing-v0"}, False),
        "browser": ({"env_fn": "antigravity:Thing-v0"}, False), "poem": ({"env_fn": "this"}, False),
        "editor": ({"env_fn": "idlelib.idle"}, False),
        "jax": ({"env_fn": "phys2d/CartPole-v0"}, False), "box2d": ({"env_fn": "LunarLander-v3"}, None),
        "monitor": ({"log_dir": str(folder / "canary")}, True), "relative monitor": ({"log_dir": "../canary"}, True),
        "rewards": ({"reward_transform": CODE}, True), "reward text": ({"reward_transform": "evil:f"}, False),
        "bad key": ({"env_kwargs": {"__mapping__": [[["a"], 1]]}}, False),
        "control": ({"env_kwargs": {"\x1b[2J": 1}}, False),
    }


def parts(run):
    """Return name -> contents of `run.json` with other parts than the environments, and whether `load` accepts them."""
    def with_part(part, **options):
        agent = json.loads(json.dumps(run["agent"]))
        agent[part]["options"] |= options
        return agent

    def of_class(part, name):
        agent = json.loads(json.dumps(run["agent"]))
        agent[part]["__factory__"] = name
        return agent

    linear = {"__partial__": [{"__code__": "torch.nn.modules.linear:Linear"}, [10**5, 10**5], {}]}
    return {
        "layers": (with_part("actor_factory", hidden_sizes=[3000] * 3000), False),
        "thin layers": (with_part("actor_factory", hidden_sizes=[1] * 9000), False),
        "many layers": (with_part("actor_factory", hidden_sizes=[1] * 10**6), False),
        "memory": (with_part("actor_factory", recurrent_net="lstm", recurrent_size=10**6), False),
        "linear": (with_part("actor_factory", feature_extractor=linear), False),
        "own network": (with_part("actor_factory", feature_extractor=CODE), False),
        "own checkpoint": (with_part("actor_factory", checkpoint="/dev/zero"), True),
        "own optimizer": (with_part("algo_factory", optimizer=CODE), True),
        "own schedule": (with_part("algo_factory", lr={"__code__": "os:abort"}), True),
        "own algorithm": (of_class("algo_factory", "evil:Thing"), False),
        "own actor": (of_class("actor_factory", "evil:Thing"), False),
        "own storage": (of_class("storage_factory", "evil:Thing"), False),
        "no part": (of_class("storage_factory", "torch.nn.modules.linear:Linear"), False),
        "storage": (with_part("storage_factory", size=10**15), True),
    }


def models(state):
    """Return name -> contents of a hostile `model.pt`."""
    def shared(kind, levels=60):
        value = kind((1, 2))
        for _ in range(levels):
            value = kind((value, value))
        return value

    endless = []
    endless.append(endless)
    good = {"format": 1, "version": 0, "acting_state": state}
    data = torch.zeros(10**5)
    key = shared(tuple, 12)  # more levels would hang when this file is written
    return {
        "shared lists": {**good, "more": shared(list)}, "shared in state": {**good, "acting_state": shared(list)},
        "shared format": {**good, "format": shared(list)}, "endless": {**good, "more": endless},
        "shared tuples": {**good, "more": shared(tuple)}, "key": {**good, "more": {key: 1}},
        "negative": {**good, "acting_state": {name: torch._neg_view(value) for name, value in state.items()}},
        "many views": {**good, "acting_state": {**state, **{f"more {index}": data for index in range(10**4)}}},
        "nan": {**good, "acting_state": {name: value * float("nan") for name, value in state.items()}},
        "names": {**good, "acting_state": {f"\x1b{name}": value for name, value in state.items()}},
        "expanded": {**good, "acting_state": {name: torch.zeros(1).expand(10**12) for name in state}},
    }


HEAD = 'algorithm = "ppo"\nenv = "CartPole-v1"\n'
FILES = {
    "algorithm": 'algorithm = "evil:Thing"\nenv = "CartPole-v1"\n',
    "stdlib": 'algorithm = "antigravity:A"\nenv = "a"\n',
    "env id": 'algorithm = "ppo"\nenv = "evil:Thing-v0"\n', "env name": 'algorithm = "ppo"\nenv = "evil:Thing"\n',
    "env module": 'algorithm = "ppo"\nenv = "evil"\n', "env dotted": 'algorithm = "ppo"\nenv = "evil.sub"\n',
    "env popen": 'algorithm = "ppo"\nenv = "subprocess:Popen"\nenv_kwargs = {args = ["touch", "canary"]}\n',
    **{f"option {index}": HEAD + line for index, line in enumerate((
        'wrappers = ["evil:Thing"]', 'feature_extractor = "evil:Thing"', 'optimizer = "evil:Thing"',
        'lr = "evil:Thing"', 'callbacks = ["evil:Thing"]', 'reward_transform = "evil:Thing"', 'policies = "evil:Thing"',
        'wrappers = [{call = "os:system", command = "touch canary"}]', 'callbacks = ["os:abort"]',
        'callbacks = [{call = "pytorchrl.callbacks:WandbLog", dir = "canary"}]',
        'wrappers = [{call = "gymnasium.wrappers:RecordVideo", video_folder = "canary"}]',
        'wrappers = [{"__code__" = "evil:Thing"}]', 'optimizer = {"__partial__" = [{"__code__" = "os:abort"}, [], {}]}',
        'env_kwargs = {a = {"__code__" = "evil:Thing"}}', f"num_steps = {'9' * 10**5}", "lr = nan",
        "env_kwargs = " + "{a = " * 500 + "1" + "}" * 500, f"env_kwargs.{'a.' * 5000}b = 1",
        "[sweep]\n" + "".join(f"{name} = {list(range(1, 101))}\n" for name in (
            "lr", "gamma", "seed", "num_envs", "num_steps")),
        '[sweep]\nwrappers = [["evil:Thing"]]', '[sweep]\noptimizer = ["evil:Thing", "adam"]'))},
}


def make_files(good, folder):
    """Write a folder for each hostile file, and return the names of those that `load` must accept."""
    accepted = {}
    run = json.loads((good / "run.json").read_text(encoding="utf-8"))
    del run["sha256"]
    for name, (options, is_read) in environments(folder.parent).items():
        agent = json.loads(json.dumps(run["agent"]))
        for part in ("train_envs_factory", "test_envs_factory"):
            agent[part]["options"] |= options
        accepted[f"envs {name}"] = (agent, is_read)
    accepted |= {f"part {name}": entry for name, entry in parts(run).items()}
    for name, (agent, _) in accepted.items():
        shutil.copytree(good, folder / name)
        (folder / name / "run.json").write_text(json.dumps({**run, "agent": agent}), encoding="utf-8")
    state = torch.load(good / "model.pt", weights_only=True)["acting_state"]
    for name, content in models(state).items():
        shutil.copytree(good, folder / f"model {name}")
        save(folder / f"model {name}" / "model.pt", content)
        accepted[f"model {name}"] = None, name.startswith(("shared lists?",))
    for place in folder.iterdir():
        (place / "few").touch()
    for name in ("envs own id", "part own actor", "part own schedule", "model endless"):
        (folder / name / "few").unlink()
    for name, content in FILES.items():
        (folder / f"file {name}").mkdir()
        (folder / f"file {name}" / "run.toml").write_text(content, encoding="utf-8")
    return {name: is_read for name, (_, is_read) in accepted.items()}


@pytest.mark.timeout(400)
def test_nothing_that_a_stranger_sends_is_executed_written_elsewhere_or_hangs(tmp_path, run_forked):
    good, folder = tmp_path / "good", tmp_path / "downloads"
    pytorchrl.train("ppo", "CartPole-v1", log_dir=good, max_episode_steps=20, **TINY)
    folder.mkdir()
    expected = make_files(good, folder)
    evil = f"import pathlib\npathlib.Path({str(tmp_path / 'canary')!r}).touch()\nclass Thing: pass\n"
    places = list(folder.iterdir())
    assert len(places) > 90
    for place in (tmp_path, *places):
        # The script's own folder is on Python's path, and is not that of a stranger.
        for name in ("evil", "jax", "Box2D") if place != tmp_path else ("evil",):
            (place / f"{name}.py").write_text(evil, encoding="utf-8")
    (tmp_path / "read.py").write_text(SCRIPT, encoding="utf-8")
    before = sorted(path for path in tmp_path.rglob("*") if folder not in path.parents)
    result = run_forked("read.py", folder, good, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stdout[-1500:] + result.stderr[-3000:]
    # Packages of environments may print lines of their own when they are imported.
    *found, imported = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert imported == []
    raw = [entry for entry in found if entry[2].startswith("raw") or entry[2] == "error "]
    assert raw == [], "\n".join(map(str, raw))
    assert max(len(entry[2].splitlines()) for entry in found) <= 25
    assert not list(tmp_path.rglob("canary"))
    written = set(tmp_path.rglob("*")) - set(before)
    assert {path for path in written if folder not in path.parents} <= {good / "report.html", good / "policy.pt2",
                                                                        good / "data.npz"}
    outcomes = {(name, reader): outcome for name, reader, outcome in found}
    for name, is_read in expected.items():
        if is_read is not None:
            assert (outcomes[name, "load"] == "read") == is_read, (name, outcomes[name, "load"])
    assert all(outcomes[f"file {name}", "train"] != "read" for name in FILES)
