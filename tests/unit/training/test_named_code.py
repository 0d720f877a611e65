"""Tests of code that is named "module:name": on the command line, in configuration files, in sweeps and in Python."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch

import pytorchrl
from pytorchrl import ConfigError
from pytorchrl.cli import main
from pytorchrl.support.code import Code, Trust, is_installed
from pytorchrl.training.configuration import load_config, load_sweep, save_config

MODULE = '''
"""A project of one's own."""
import gymnasium as gym
import torch
from pathlib import Path
from pytorchrl import PPO
from pytorchrl.callbacks.base import Callback

Path("imported").touch()

class Mine(PPO):
    """An algorithm."""

class Scaled(gym.Wrapper):
    def __init__(self, env, scale=2.0):
        super().__init__(env)
        self.scale = scale

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        return obs, reward * self.scale, *rest

class Net(torch.nn.Module):
    def __init__(self, space, width=4):
        super().__init__()
        self.layer, self.out_features = torch.nn.Linear(space.shape[0], width), width

    def forward(self, x):
        return self.layer(x)

class Tracker(Callback):
    def __init__(self, name="track"):
        self.name = name

    def on_record(self, run, record):
        with Path(f"{self.name}.txt").open("a") as file:
            file.write(f"{run.log_dir.name} {run.env_steps}\\n")
        if Path("kill").exists() and run.env_steps >= 64:
            raise KeyboardInterrupt

def falling(progress_remaining):
    return 1e-3 * progress_remaining

def halved(rewards):
    return rewards / 2

def make_env(**kwargs):
    return gym.make("CartPole-v1", **kwargs)
'''
TINY = ('target_steps = 128\nnum_envs = 2\nnum_steps = 16\nnum_epochs = 1\nnum_mini_batch = 1\ntensorboard = false\n'
        'progress = false\nhidden_sizes = [4]\n')
FLAGS = ["--target-steps", "32", "--num-envs", "2", "--num-steps", "16", "--num-epochs", "1", "--num-mini-batch", "1",
         "--no-tensorboard", "--no-progress", "--hidden-sizes", "4"]
OPTIONS = {"target_steps": 32, "num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1,
           "tensorboard": False, "progress": False, "hidden_sizes": (4,)}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Make an empty working directory with the module `mine`, which is neither imported nor on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    yield tmp_path
    sys.modules.pop("mine", None)


def options_of(log_dir):
    run = json.loads(Path(log_dir, "run.json").read_text(encoding="utf-8"))
    return run, {**run["agent"]["algo_factory"]["options"], **run["agent"]["actor_factory"]["options"],
                 **run["agent"]["train_envs_factory"]["options"]}


# Option -> its value on the command line, and its description in `run.json`.
NAMED = {
    "wrappers": ("mine:Scaled", [{"__code__": "mine:Scaled"}]),
    "feature_extractor": ("mine:Net", {"__code__": "mine:Net"}),
    "optimizer": ("torch.optim:NAdam", {"__code__": "torch.optim.nadam:NAdam"}),
    "lr": ("mine:falling", {"__code__": "mine:falling"}),
    "reward_transform": ("mine:halved", {"__code__": "mine:halved"}),
    "env_fn": ("mine:make_env", {"__code__": "mine:make_env"}),
}


def test_flags_name_code_of_the_working_directory(capsys):
    flags = [word for name, (text, _) in NAMED.items() if name != "env_fn"
             for word in (f"--{name.replace('_', '-')}", text)]
    command = ["train", "ppo", "--env", "mine:make_env", *FLAGS, *flags, "--callbacks", "mine:Tracker"]
    assert main([*command, "--log-dir", "a", "--save-config", "saved.toml"]) == 0, capsys.readouterr().err
    run, found = options_of("a")
    assert {name: found[name] for name in NAMED} == {name: described for name, (_, described) in NAMED.items()}
    assert run["recipe"]["env"] == "mine:make_env"
    assert Path("track.txt").read_text(encoding="utf-8").startswith("a ")
    # The saved configuration, and the run itself, name the same code; both are files, so they need --trust.
    saved = load_config("saved.toml", trust=True)
    assert {name: saved[name] for name in ("callbacks", "feature_extractor", "env")} == {
        "callbacks": (Code("mine:Tracker"),), "feature_extractor": Code("mine:Net"), "env": Code("mine:make_env")}
    for number, file in enumerate(("saved.toml", "a/run.json")):
        capsys.readouterr()
        assert main(["train", "--config", file, "--log-dir", f"b{number}"]) == 2
        assert "not imported, or no part of an agent; if you trust the author" in capsys.readouterr().err
        assert main(["train", "--config", file, "--trust", "--log-dir", f"b{number}"]) == 0
        weights = [torch.load(f"{place}/model.pt")["acting_state"]["all"] for place in ("a", f"b{number}")]
        assert weights[0].shape == weights[1].shape
        assert options_of(f"b{number}")[1]["wrappers"] == found["wrappers"]


def test_python_names_code_with_and_without_arguments(monkeypatch, project):
    monkeypatch.syspath_prepend(project)
    agent = pytorchrl.train(
        "mine:Mine", "CartPole-v1", **OPTIONS, wrappers=("mine:Scaled", {"call": "mine:Scaled", "scale": 3.0}),
        feature_extractor={"call": "mine:Net", "width": 6}, callbacks=[{"call": "mine:Tracker", "name": "other"}],
        log_dir="run")
    first, second = agent.agent.train_envs_factory.options.wrappers
    assert (first.__name__, second.keywords) == ("Scaled", {"scale": 3.0})
    assert agent.agent.actor_factory.options.feature_extractor.keywords == {"width": 6}
    assert Path("other.txt").exists()
    for value, message in (("mine:Nothing", "optimizer: module 'mine' has no class or function 'Nothing'; it defines:"),
                           ("nothing:X", "optimizer: nothing:X cannot be imported .*run from the folder"),
                           ({"call": "os"}, r'optimizer: call must name code as "module:name"')):
        with pytest.raises(ConfigError, match=message):
            pytorchrl.train("ppo", "CartPole-v1", **OPTIONS, optimizer=value)
    with pytest.raises(ConfigError, match=r"callbacks: .*cannot be built"):
        pytorchrl.train("ppo", "CartPole-v1", **OPTIONS, callbacks=[{"call": "mine:Tracker", "title": 1}])


# What a file names -> the error of `train --config` without --trust.
REFUSED = {
    'algorithm = "theirs:Mine"\nenv = "CartPole-v1"\n': "run.toml, line 1: 'theirs:Mine' is code in the module",
    'algorithm = "ppo"\nenv = "theirs:Maze-v0"\n': "run.toml, line 2: 'theirs:Maze-v0' is code in the module 'theirs",
    'algorithm = "ppo"\nenv = "theirs:make_env"\n': "line 2: 'theirs:make_env' is code in the module",
    'algorithm = "ppo"\nenv = "theirs.make_env"\n': "line 2: 'theirs.make_env' is code in the module",
    'algorithm = "ppo"\nenv = "subprocess:Popen"\n': "line 2: 'subprocess:Popen'.*|subprocess:Popen is a function",
    **{f'algorithm = "ppo"\nenv = "CartPole-v1"\n{line}\n': message for line, message in {
        'wrappers = ["theirs:Scaled"]': "wrappers: 'theirs:Scaled' is code in the module 'theirs'.*lies in the working",
        'feature_extractor = "theirs:Net"': "feature_extractor: 'theirs:Net' is code",
        'optimizer = "theirs:Net"': "optimizer: 'theirs:Net' is code",
        'lr = "theirs:falling"': "lr: 'theirs:falling' is code",
        'callbacks = ["theirs:Tracker"]': "callbacks: 'theirs:Tracker' is code",
        'policies = "theirs:falling"': "policies: 'theirs:falling' is code",
        'wrappers = ["os:system"]': "wrappers: os:system is a function, or a class that.*pass trust=True",
        'wrappers = ["antigravity:fly"]': "wrappers: 'antigravity:fly' is code",
        'callbacks = [{call = "os:system", command = "touch imported"}]': "callbacks: os:system is a function",
        'wrappers = [{call = "gymnasium.wrappers:RecordVideo", video_folder = "imported"}]':
            "wrappers: .*RecordVideo with arguments of the file could write other files",
        'callbacks = [{call = "pytorchrl.callbacks:WandbLog", dir = "imported"}]': "WandbLog with arguments",
    }.items()},
}


def test_a_file_imports_nothing_of_the_working_directory_without_trust(project, capsys):
    Path("mine.py").rename("theirs.py")  # a module of which no other test has imported classes
    for content, message in REFUSED.items():
        Path("run.toml").write_text(content + TINY, encoding="utf-8")
        assert main(["train", "--config", "run.toml", "--dry-run"]) in (0, 2)
        capsys.readouterr()
        try:
            options = load_config("run.toml")
            with pytest.raises(ConfigError):
                pytorchrl.train(**options)
        except ConfigError:
            pass
        assert main(["train", "--config", "run.toml"]) == 2, content
        error = " ".join(capsys.readouterr().err.split())
        assert re.search(message, error), f"{content}: {error}"
        assert not Path("imported").exists(), content
        assert "theirs" not in sys.modules


def test_a_file_names_parts_of_installed_packages(capsys):
    Path("run.toml").write_text(
        'algorithm = "ppo"\nenv = "gymnasium.envs.classic_control:CartPoleEnv"\n' + TINY +
        'wrappers = [{call = "gymnasium.wrappers:TimeLimit", max_episode_steps = 9}, '
        '"gymnasium.wrappers:TimeAwareObservation"]\noptimizer = "torch.optim:NAdam"\n'
        'callbacks = ["pytorchrl.callbacks:CsvLog", {call = "pytorchrl.callbacks:StopAtScore", score = 400}]\n',
        encoding="utf-8")
    options = load_config("run.toml")
    assert options["env"] == Code("gymnasium.envs.classic_control:CartPoleEnv", {}, Trust.INSTALLED)
    assert main(["train", "--config", "run.toml", "--log-dir", "a"]) == 0, capsys.readouterr().err
    assert Path("a/metrics.csv").exists()
    assert options_of("a")[1]["optimizer"] == {"__code__": "torch.optim.nadam:NAdam"}


def test_code_is_saved_by_its_name():
    options = {"optimizer": torch.optim.NAdam, "wrappers": (Code("mine:Scaled", {"scale": 2}), Code("mine:Scaled"))}
    save_config("saved.toml", "ppo", "CartPole-v1", options)
    assert load_config("saved.toml", trust=True) == {
        "algorithm": "ppo", "env": "CartPole-v1", "optimizer": Code("torch.optim.nadam:NAdam"),
        "wrappers": options["wrappers"]}


SWEEP = ('algorithm = "mine:Mine"\nenv = "CartPole-v1"\n' + TINY + 'checkpoint_every = 32\nlog_every = 32\n'
         'wrappers = ["mine:Scaled"]\ncallbacks = ["mine:Tracker"]\n[sweep]\nseed = [1, 2]\n'
         'feature_extractor = ["mine:Net", "mlp"]\n')


def test_a_sweep_with_own_code_is_killed_and_resumed(capsys):
    Path("sweep.toml").write_text(SWEEP, encoding="utf-8")
    command = ["train", "--config", "sweep.toml", "--log-dir", "sw"]
    assert main([*command, "--trust", "--dry-run"]) == 0
    listed = capsys.readouterr().err
    assert not Path("imported").exists()
    assert not Path("sw").exists()
    assert main(command) == 2
    assert "line 1: 'mine:Mine' is code in the module 'mine'" in capsys.readouterr().err
    Path("kill").touch()
    assert main([*command, "--trust"]) == 130
    Path("kill").unlink()
    assert main([*command, "--trust"]) == 0, capsys.readouterr().err
    names = sorted(os.listdir("sw"))
    assert names == sorted(f"Mine-CartPole-v1-seed={seed}-feature_extractor={net}" for seed in (1, 2)
                           for net in ("mine-Net", "mlp"))
    assert all(name in listed for name in names)
    records = [line.split() for line in Path("track.txt").read_text(encoding="utf-8").splitlines()]
    # The run that was killed continues from its checkpoint, and is not started again.
    assert [int(steps) for name, steps in records if name == names[0]].count(32) == 1
    for name in names:
        assert options_of(Path("sw", name))[1]["wrappers"] == [{"__code__": "mine:Scaled"}]
    assert {run["seed"] for run in load_sweep("sweep.toml", trust=True)} == {1, 2}


def test_a_sweep_is_counted_before_it_is_built(capsys):
    values = ", ".join(f"{number}e-5" for number in range(1, 101))
    names = ("lr", "gamma", "gae_lambda", "clip_param", "entropy_coef")
    Path("sweep.toml").write_text('algorithm = "ppo"\nenv = "CartPole-v1"\n[sweep]\n' + "".join(
        f"{name} = [{values}]\n" for name in names), encoding="utf-8")
    for flags in ([], ["--dry-run"]):
        assert main(["train", "--config", "sweep.toml", *flags]) == 2
        assert "line 3: the sweep has 100 x 100 x 100 x 100 x 100 = 10,000,000,000 runs" in " ".join(
            capsys.readouterr().err.split())
    Path("sweep.toml").write_text('algorithm = "ppo"\nenv = "CartPole-v1"\n[sweep]\nseed = [1, 2, 3]\n')
    assert main(["train", "--config", "sweep.toml", "--dry-run", "--max-runs", "2"]) == 2
    assert main(["train", "--config", "sweep.toml", "--dry-run", "--max-runs", "3"]) == 0
    assert len(load_sweep("sweep.toml", max_runs=3)) == 3


def test_a_dry_run_starts_nothing_without_a_sweep_too(capsys):
    Path("run.toml").write_text('algorithm = "ppo"\nenv = "CartPole-v1"\n' + TINY, encoding="utf-8")
    assert main(["train", "--config", "run.toml", "--dry-run", "--log-dir", "a"]) == 0
    assert "run 1 of 1: a" in capsys.readouterr().err
    assert not Path("a").exists()
    assert main(["train", "ppo", "--env", "CartPole-v1", "--trust"]) == 2
    assert "needs --config" in capsys.readouterr().err


def test_a_sweep_checks_its_code_before_the_first_run(capsys):
    Path("sweep.toml").write_text('algorithm = "ppo"\nenv = "CartPole-v1"\n' + TINY +
                                  '[sweep]\noptimizer = ["adam", "mine:Nothing"]\nwrappers = [["mine:Scaled"], []]\n')
    assert main(["train", "--config", "sweep.toml", "--dry-run"]) == 0
    assert "ppo-CartPole-v1-optimizer=mine-Nothing-wrappers=mine-Scaled\n" in capsys.readouterr().err
    assert main(["train", "--config", "sweep.toml", "--trust"]) == 2
    assert "optimizer: module 'mine' has no class or function 'Nothing'" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_environment_that_the_program_registered_is_loaded_although_its_module_is_local(project, monkeypatch):
    (project / "mazes.py").write_text(MODULE.replace("imported", "mazes-imported"), encoding="utf-8")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    gym.register("Maze-v7", "mazes:make_env")
    try:
        expected = pytorchrl.train("ppo", "Maze-v7", log_dir="run", **OPTIONS).evaluate(1, seed=1).returns
        del sys.modules["mazes"]
        assert pytorchrl.load("run").evaluate(1, seed=1).returns == expected
    finally:
        del gym.registry["Maze-v7"]


def test_the_command_imports_no_file_of_the_working_directory_in_place_of_a_module(project, run_python):
    for name in ("difflib", "traceback", "numpy"):
        (project / f"{name}.py").write_text('print("executed")\n', encoding="utf-8")
    found = run_python("-m", "pytorchrl", "--version", cwd=project)
    assert (found.returncode, found.stdout) == (0, f"pytorchrl {pytorchrl.__version__}\n"), found.stderr


def test_missing_and_local_modules_have_one_text_for_all_readers(capsys, project):
    pytorchrl.train("ppo", "CartPole-v1", log_dir="run", **OPTIONS)
    run = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    del run["sha256"]
    for module, state in (("mine", "which lies in the working"), ("nowhere", "which belongs to no installed package")):
        for part in ("train_envs_factory", "test_envs_factory"):
            run["agent"][part]["options"]["env_fn"] = f"{module}:Maze-v0"
        Path("run/run.json").write_text(json.dumps(run), encoding="utf-8")
        Path("run.toml").write_text(f'algorithm = "ppo"\nenv = "{module}:Maze-v0"\n', encoding="utf-8")
        text = f"'{module}:Maze-v0' is code in the module '{module}', which this process has not imported and {state}"
        for words in (["enjoy", "run"], ["export", "run", "--to", "torch"], ["dataset", "run", "--out", "a.npz"],
                      ["train", "--config", "run.toml"], ["train", "--config", "run.toml", "--dry-run"]):
            capsys.readouterr()
            assert main(words) == 2, words
            assert text in capsys.readouterr().err, words
        for read in (lambda: pytorchrl.load("run"), lambda: load_config("run.toml")):
            with pytest.raises(pytorchrl.PyTorchRLError, match=re.escape(text)):
                read()
    assert main(["train", "ppo", "--env", "nowhere:Maze-v0"]) == 2  # the user's own word
    assert "nowhere:Maze-v0 cannot be imported (No module named 'nowhere'); run from" in capsys.readouterr().err


def test_a_module_is_installed_if_it_belongs_to_an_installed_package(tmp_path, monkeypatch):
    site, source = tmp_path / "lib" / "site-packages", tmp_path / "source"
    (site / "edited-1.dist-info").mkdir(parents=True)
    (site / "edited-1.dist-info" / "METADATA").write_text("Name: edited\nVersion: 1\n")
    (site / "edited-1.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///x"}')
    (site / "edited-1.dist-info" / "top_level.txt").write_text("edited_code\n")
    source.mkdir()
    for folder, name in ((site, "installed_code"), (source, "edited_code"), (source, "other_code")):
        (folder / f"{name}.py").write_text("raise SystemExit('executed')")
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(site), str(source)])
    found = {name: is_installed(name) for name in (
        "gymnasium", "pytorchrl.callbacks.trackers", "installed_code", "edited_code", "other_code", "mine", "json",
        "antigravity", "nowhere", "nowhere.x", "edited_code.sub")}
    assert [name for name, installed in found.items() if installed] == [
        "gymnasium", "pytorchrl.callbacks.trackers", "installed_code", "edited_code", "edited_code.sub"]
