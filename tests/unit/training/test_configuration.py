"""Tests of configuration files: equality with flags, every error with its line, and hostile files."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pytorchrl.training import presets

from pytorchrl import ConfigError, linear, piecewise
from pytorchrl.cli import main
from pytorchrl.training.configuration import load_config, load_sweep, save_config

TINY = 'target_steps = 64\nnum_envs = 2\nnum_steps = 16\nnum_epochs = 1\ntensorboard = false\n'
HEAD = 'algorithm = "ppo"\nenv = "CartPole-v1"\n'
FLAGS = ["--target-steps", "64", "--num-envs", "2", "--num-steps", "16", "--num-epochs", "1", "--no-tensorboard",
         "--no-progress"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into the current directory, which is empty."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name
    return write


def weights(path):
    return torch.load(f"{path}/model.pt", weights_only=True)["acting_state"]


def assert_equal_runs(first, second):
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_from_a_file_equals_the_run_by_flags(write):
    write(HEAD + TINY + 'lr = "linear:1e-3:0"\nhidden_sizes = [8, 8]\nseed = 3\nprogress = false\n')
    assert main(["train", "--config", "run.toml", "--log-dir", "a"]) == 0
    assert main(["train", "ppo", "--env", "CartPole-v1", *FLAGS, "--lr", "linear:1e-3:0", "--hidden-sizes", "8,8",
                 "--seed", "3", "--log-dir", "b", "--save-config", "saved.toml"]) == 0
    assert_equal_runs("a", "b")
    assert main(["train", "--config", "saved.toml", "--log-dir", "c"]) == 0
    assert_equal_runs("a", "c")
    assert main(["train", "--config", "a/run.json", "--log-dir", "d"]) == 0
    assert_equal_runs("a", "d")


def test_flags_override_the_file(write, capsys):
    write(HEAD + TINY + "seed = 3\nnormalize_obs = true\n")
    assert main(["train", "a2c", "--config", "run.toml", "--env", "Acrobot-v1", "--seed", "4", "--no-normalize-obs",
                 "--json", "--no-progress", "--log-dir", "a"]) == 0
    run = json.loads(Path("a/run.json").read_text(encoding="utf-8"))
    assert (run["recipe"]["algorithm"], run["recipe"]["env"], run["seed"]) == ("a2c", "Acrobot-v1", 4)
    assert run["recipe"]["options"]["normalize_obs"] is False


def test_values_have_the_types_of_the_options(write):
    options = load_config(write(HEAD + """
target_steps = 1e5
lr = [[0, 1e-3], [100, 0.0]]
gamma = 0.5
eval_every = "none"
hidden_sizes = [8, 4]
env_kwargs = {render_mode = "rgb_array", sutton_barto_reward = true}
col_worker_resources = {num_cpus = 0.5}
device = "cpu"
"""))
    assert options == {
        "algorithm": "ppo", "env": "CartPole-v1", "target_steps": 100_000, "lr": [(0, 1e-3), (100, 0.0)], "gamma": 0.5,
        "eval_every": None, "hidden_sizes": (8, 4), "device": "cpu", "col_worker_resources": {"num_cpus": 0.5},
        "env_kwargs": {"render_mode": "rgb_array", "sutton_barto_reward": True}}
    assert isinstance(options["target_steps"], int)


@pytest.mark.parametrize(("algorithm", "suite"), sorted(presets.registered()))
def test_every_preset_survives_a_round_trip(write, algorithm, suite):
    options = {"target_steps": 7, **presets.registered()[algorithm, suite]}
    save_config("saved.toml", algorithm, "CartPole-v1", options)
    found = load_config("saved.toml")
    assert found == {"algorithm": algorithm, "env": "CartPole-v1", **options}
    assert all(type(found[name]) is type(value) for name, value in options.items())


def test_all_kinds_of_values_survive_a_round_trip(write):
    options = {
        "lr": piecewise((0, 1e-3), (50, 2.5e-4)), "clip_param": linear(0.2, 0.0, 1000), "max_grad_norm": None,
        "hidden_sizes": (), "env_kwargs": {'a "quoted" key\n': [1, {"deep": True}]}, "normalize_obs": True,
        "keep_bad_batches": "a \\ path\twith \u00e9"}
    save_config("saved.toml", "ppo", "CartPole-v1", {**options, "log_dir": "runs/a", "resume": True})
    assert load_config("saved.toml") == {"algorithm": "ppo", "env": "CartPole-v1", **options}


@pytest.mark.parametrize("text", ["\U0001f600", "a\x7fb", "\x00\x1f\x85\u2028"])
def test_any_character_survives_a_round_trip(write, text):
    options = {"keep_bad_batches": text, "env_kwargs": {text: [text]}}
    save_config("saved.toml", "ppo", text, options)
    assert load_config("saved.toml") == {"algorithm": "ppo", "env": text, **options}


def test_numbers_of_numpy_survive_a_round_trip(write):
    options = {"lr": np.float64(1e-3), "env_kwargs": {"a": [np.float64(0.5), np.float64("inf")]}}
    save_config("saved.toml", "ppo", "CartPole-v1", options)
    assert '{"a" = [0.5, inf]}' in Path("saved.toml").read_text(encoding="utf-8")
    assert load_config("saved.toml") == {"algorithm": "ppo", "env": "CartPole-v1", **options}


@pytest.mark.parametrize(("env_kwargs", "message"), [
    ({"a": None}, "env_kwargs contains None, which TOML cannot express"),
    ({"a": [1, None]}, "env_kwargs contains None, which TOML cannot express"),
    ({"a": "\ud800"}, "cannot be written to 'saved.toml': .*surrogates not allowed")])
def test_values_that_toml_cannot_express_are_not_saved(write, env_kwargs, message):
    with pytest.raises(ConfigError, match=message):
        save_config("saved.toml", "ppo", "CartPole-v1", {"env_kwargs": env_kwargs})
    assert not os.path.exists("saved.toml")


@pytest.mark.parametrize("options", [
    {"lr": lambda progress_remaining: 1e-3}, {"optimizer": functools.partial(lambda params, lr: None, x=1)},
    {"env_kwargs": {"reward": len}}])
def test_code_without_a_name_cannot_be_saved(write, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}.*cannot be written"):
        save_config("saved.toml", "ppo", "CartPole-v1", options)


@pytest.mark.parametrize(("text", "message"), [
    (HEAD + "\nnum_epoch = 3\n", "run.toml, line 4: there is no option 'num_epoch'; did you mean 'num_epochs'?"),
    (HEAD + "n_steps = 3\n", "run.toml, line 3: there is no option 'n_steps'; did you mean 'num_steps'"),
    (HEAD + "[actor]\nhidden_sizes = [8]\n", "run.toml, line 3: there is no option 'actor'"),
    (HEAD + 'gamma = "high"\n', "run.toml, line 3: gamma: expected NUMBER, got 'high'"),
    (HEAD + "num_epochs = 1.5\n", "run.toml, line 3: num_epochs: expected INT, got '1.5'"),
    (HEAD + "gamma = 1979-05-27\n", "run.toml, line 3: gamma: expected a string, a number, a list or a table"),
    (HEAD + 'wrappers = "x"\n', "run.toml, line 3: wrappers: expected MODULE:NAME,"),
    (HEAD + 'gamma = "x"\nlr = "y"\n', "line 3: gamma.*line 4: lr"),
    (HEAD + "lr = nan\n", "run.toml, line 3: lr: must be finite, got nan"),
    (HEAD + "lr = [[0, nan], [9, 1.0]]\n", "run.toml, line 3: lr: must be finite, got"),
    (HEAD + "[sweep]\ngamma = [0.9, inf]\n", "run.toml, line 4: gamma: must be finite, got inf"),
    (HEAD + "env_timeout_s = 1e999\n", "run.toml, line 3: env_timeout_s: must be finite, got inf"),
    (HEAD + f"\nnum_steps = {'9' * 100_000}\n", "run.toml, line 4: a number has too many digits; .* at most 64 bits"),
    (HEAD + f"num_steps = 0x{'f' * 5_000}\n", "run.toml, line 3: num_steps: .* at most 64 bits, got one of 20,000"),
    (HEAD + f"hidden_sizes = [{'1_' * 5_000}1]\n", "run.toml, line 3: a number has too many digits"),
    ('algorithm = "pppo"\nenv = "CartPole-v1"\n', "run.toml, line 1: algorithm must be one of"),
    ("algorithm = 3\n", "run.toml, line 1: algorithm must be a string, got 3"),
    (HEAD + 'keep_bad_batches = "a\u2028b"\nlrr = 3\n', "run.toml, line 4: there is no option 'lrr'"),
    (HEAD + "lr = \n", "run.toml is not a TOML file: .*line 3"),
    (HEAD + "lr = 1.0\nlr = 2.0\n", "run.toml is not a TOML file: .*"),
    (HEAD + "sweep = 3\n", "run.toml, line 3: sweep must be a table"),
    (HEAD + "[sweep]\nlr = 0.1\n", r"run.toml, line 4: lr in \[sweep\] must be a list of at least one value, got 0.1"),
    (HEAD + "[sweep]\nlr = []\n", r"run.toml, line 4: lr in \[sweep\] must be a list of at least one value"),
    (HEAD + "[sweep]\nlrr = [1.0]\n", "run.toml, line 4: there is no option 'lrr'; did you mean 'lr'"),
    (HEAD + '[sweep]\nlr = ["x"]\n', "run.toml, line 4: lr: expected NUMBER"),
    (HEAD + "lr = 0.1\n[sweep]\nlr = [0.1]\n", r"run.toml, line 5: lr is set in \[sweep\] and outside it"),
])
def test_wrong_entries_are_refused_with_their_line(write, capsys, text, message):
    write(text)
    assert main(["train", "--config", "run.toml"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


def test_a_value_out_of_range_is_refused_with_its_line(write, capsys):
    write(HEAD + "\nclip_param = -1\n")
    assert main(["train", "--config", "run.toml"]) == 2
    assert "clip_param must be a number > 0.0" in (error := capsys.readouterr().err)
    assert "(clip_param: run.toml, line 4)" in error
    assert main(["train", "--config", "run.toml", "--clip-param", "-2"]) == 2


@pytest.mark.parametrize(("text", "missing"), [("", "algorithm and env"), ('env = "a"\n', "algorithm")])
def test_python_needs_an_algorithm_and_an_environment(write, text, missing):
    with pytest.raises(ConfigError, match=f"run.toml needs {missing}, such as"):
        load_config(write(text))


def test_hostile_files_are_refused_at_once(write, tmp_path):
    (tmp_path / "large.toml").write_bytes(b"#" * 2_000_000)
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000, encoding="utf-8")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    for name, message in (
            ("large", "has more than 1,000,000 bytes"), ("binary", "is not a text file"), ("deep", "not a TOML file"),
            ("fifo", "is not a regular file"), ("folder", "is not a regular file|Is a directory"),
            ("missing", "No such file")):
        with pytest.raises(ConfigError, match=message):
            load_config(f"{name}.toml")
    for name in ("deep", "list"):
        with pytest.raises(ConfigError, match=r"is not the run\.json of a run"):
            load_config(f"{name}.json")


def test_a_run_with_code_without_a_name_is_no_configuration(write):
    recipe = {"algorithm": "ppo", "env": "CartPole-v1", "options": {"wrappers": [{"__code__": "a:f.<locals>.b"}]}}
    write(json.dumps({"format": 1, "recipe": recipe, "seed": 1}), "run.json")
    with pytest.raises(ConfigError, match=r"given code without a name.*: wrappers"):
        load_config("run.json")
    write(json.dumps({"format": 1, "recipe": {}, "seed": 1}), "run.json")
    with pytest.raises(ConfigError, match="was composed in Python"):
        load_config("run.json")


def test_a_sweep_makes_all_combinations(write):
    path = write(HEAD + "gamma = 0.5\n[sweep]\nlr = [1e-3, \"linear:1e-3:0\"]\nhidden_sizes = [[8], [4, 4]]\n")
    runs = load_sweep(path)
    assert [(run["lr"], run["hidden_sizes"]) for run in runs] == [
        (1e-3, (8,)), (1e-3, (4, 4)), (linear(1e-3, 0.0), (8,)), (linear(1e-3, 0.0), (4, 4))]
    assert all(run["gamma"] == 0.5 for run in runs)
    with pytest.raises(ConfigError, match="describes 4 runs; use load_sweep"):
        load_config(path)


def test_a_sweep_is_made_once_and_continues(write, capsys):
    write(HEAD + TINY + "progress = false\n[sweep]\nseed = [1, 2]\n")
    command = ["train", "--config", "run.toml", "--log-dir", "sw"]
    assert main([*command, "--dry-run"]) == 0
    assert not os.path.exists("sw")
    names, listed = ["ppo-CartPole-v1-seed=1", "ppo-CartPole-v1-seed=2"], capsys.readouterr().err
    assert all(name in listed for name in names)
    assert main(command) == 0
    assert sorted(os.listdir("sw")) == names
    table = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[0] for line in table] == names
    assert all(line.split()[2] == "64" for line in table)
    before = [os.stat(f"sw/{name}/model.pt").st_mtime_ns for name in names]
    os.unlink("sw/ppo-CartPole-v1-seed=2/result.json")  # as if the run had been killed
    assert main(command) == 0
    after = [os.stat(f"sw/{name}/model.pt").st_mtime_ns for name in names]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    captured = capsys.readouterr()
    assert "sw/ppo-CartPole-v1-seed=1 (finished earlier)" in captured.err
    assert "2 of 2: sw/ppo-CartPole-v1-seed=2\n" in captured.err


@pytest.mark.parametrize(("flags", "message"), [
    (["--seed", "3"], "seed is swept by the configuration; remove the flag"),
    (["--overwrite", "--log-dir", "a"], "accepts neither overwrite nor resume"),
])
def test_flags_that_contradict_a_sweep_are_refused(write, capsys, flags, message):
    write(HEAD + TINY + "[sweep]\nseed = [1, 2]\n")
    assert main(["train", "--config", "run.toml", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_sweep_cannot_be_profiled(write, capsys):
    write(HEAD + "[sweep]\nseed = [1, 2]\n")
    assert main(["profile", "--config", "run.toml"]) == 2
    assert "profile measures a single run" in capsys.readouterr().err


def test_a_sweep_in_the_home_directory_continues(write, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(HEAD + TINY + "progress = false\n[sweep]\nseed = [1, 2]\n")
    command = ["train", "--config", "run.toml", "--log-dir", "~/sw"]
    assert main(command) == 0
    assert all(line.split()[2] == "64" for line in capsys.readouterr().out.splitlines()[-2:])
    assert main(command) == 0
    assert capsys.readouterr().err.count("(finished earlier)") == 2


@pytest.mark.parametrize("sweep", [
    'record = ["x y.rec", "x-y.rec", "z.rec"]\n',
    f'env_kwargs = [{{text = "{"a" * 200}"}}, {{text = "{"a" * 201}"}}, {{text = "b"}}]\n'])
def test_runs_of_a_sweep_with_equal_names_get_directories_of_their_own(write, capsys, sweep):
    write(HEAD + TINY + f"[sweep]\n{sweep}")
    assert main(["train", "--config", "run.toml", "--log-dir", "sw", "--dry-run"]) == 0
    names = re.findall("sw/(.+)", capsys.readouterr().err)
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 200
    assert [re.search("-[0-9a-f]{8}$", name) is not None for name in names] == [True, True, False]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, encoding):
    """Editors of Windows write the mark; the mark of UTF-16 is not one of UTF-8."""
    path = tmp_path / "file.toml"
    path.write_text('algorithm = "ppo"\nenv = "CartPole-v1"\ngamma = 0.5\n', encoding=encoding)
    if encoding == "utf-16":
        with pytest.raises(ConfigError, match=r"is not a text file in UTF-8.*; save it with the encoding UTF-8"):
            load_config(path)
    else:
        assert load_config(path) == {"algorithm": "ppo", "env": "CartPole-v1", "gamma": 0.5}
