"""Tests of user-defined algorithms, suites and presets: in memory, in files and on the command line."""

from __future__ import annotations

import json
import sys
import textwrap

import gymnasium as gym
import pytest

import pytorchrl
from pytorchrl.files.atomic import read_json
from pytorchrl.training import presets
from pytorchrl import A2C, VecEnv
from pytorchrl.agent.algorithms import algorithm, registry
from pytorchrl.agent.options import option
from pytorchrl.cli import main
from pytorchrl.training.composition import option_specs
from pytorchrl.envs import make_factory, suite, suites
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.training.training import load, train

TINY = {"num_envs": 2, "num_steps": 16, "target_steps": 64, "progress": False, "tensorboard": False, "seed": 3}
FILE = """
    from dataclasses import dataclass
    from pytorchrl import A2C, VTraceBuffer
    from pytorchrl.agent.algorithms import IMPALA, algorithm
    from pytorchrl.agent.options import option

    @algorithm("{module}", storage=VTraceBuffer)
    class Own(IMPALA):
        @dataclass(frozen=True, kw_only=True)
        class Options(IMPALA.Options):
            bonus: float = option(0.25, help="A bonus of its own.", low=0.0)
"""


@pytest.fixture(autouse=True)
def _own_registrations(monkeypatch):
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(presets, "_presets", dict(presets._presets))
    monkeypatch.setattr(suites, "_by_name", dict(suites._by_name))


@pytest.fixture
def own_module(tmp_path, monkeypatch, request):
    """Write a module with an algorithm to the current directory, which is not on the Python path; return its name."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(FILE.format(module=name)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield name
    sys.modules.pop(name, None)


class Louder(A2C):
    """A subclass of A2C without changes."""


def test_a_class_without_a_registration_trains_saves_and_loads(tmp_path):
    agent = train(Louder, "CartPole-v1", log_dir=f"{tmp_path}/", **TINY)
    assert agent.log_dir.name == "Louder-CartPole-v1-1"
    assert agent.agent.algo_factory.cls is Louder
    recipe = json.loads((agent.log_dir / "run.json").read_text())["recipe"]
    assert recipe["algorithm"] == f"{__name__}:Louder"
    assert recipe["options"]["gae_lambda"] == 1.0  # the preset of A2C has this value
    loaded = load(agent.log_dir)
    assert loaded.agent.algo_factory.cls is Louder
    assert loaded.evaluate(2).returns == agent.evaluate(2).returns


def test_a_file_of_the_current_directory_trains_and_plays_on_the_command_line(capsys, tmp_path, own_module):
    flags = ["--env", "CartPole-v1", "--target-steps", "64", "--num-envs", "2", "--num-steps", "16", "--bonus", "0.5",
             "--no-progress", "--no-tensorboard", "--num-col-workers", "2",
             "--col-communication", "asynchronous", "--runtime", "threads"]
    assert main(["train", f"{own_module}:Own", *flags, "--log-dir", "run"]) == 0
    assert f"  pytorchrl enjoy run --algorithm {own_module}:Own\n" in capsys.readouterr().out
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["recipe"]["options"]["bonus"] == 0.5
    assert main(["enjoy", "run", "--episodes", "2", "--algorithm", f"{own_module}:Own"]) == 0
    assert "mean return of 2" in capsys.readouterr().out


@pytest.mark.parametrize("words", [
    ["{}:Own", "--env", "X-v0"], ["--env", "X-v0", "{}:Own"], ["--env=X-v0", "{}:Own"],
    ["--no-progress", "{}:Own", "--env", "X-v0"], ["--json", "{}:Own", "--env", "X-v0"],
    ["--env", "some.module:Maze", "{}:Own"],
])
def test_the_algorithm_is_found_among_the_arguments(own_module, words):
    from pytorchrl.cli.train import parse
    assert parse("train", "Train", [word.format(own_module) for word in words]).algorithm == f"{own_module}:Own"


def test_a_scheme_preset_is_not_mistaken_for_the_algorithm():
    from pytorchrl.cli.train import parse
    given = parse("train", "Train", ["--preset", "impala", "appo", "--env", "X-v0"])
    assert (given.algorithm, given.preset) == ("appo", "impala")


def test_help_shows_the_options_of_the_class(capsys, own_module):
    assert main(["train", f"{own_module}:Own", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Train Own." in out
    assert "--bonus NUMBER a bonus of its own [0.25]" in out
    assert "--rho-bar" not in out
    assert main(["train", f"{own_module}:Own", "--help-all"]) == 0
    assert "--rho-bar" in capsys.readouterr().out


def test_opening_a_run_imports_no_algorithm(capsys, tmp_path, own_module):
    sys.path.insert(0, str(tmp_path))
    train(f"{own_module}:Own", "CartPole-v1", log_dir=tmp_path / "run", **TINY)
    del sys.modules[own_module]
    recipe = tmp_path / "run" / "run.json"
    canary = tmp_path / "canary.py"
    canary.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nfrom pytorchrl import A2C\nclass Own(A2C): pass\n")
    recipe.write_text(json.dumps(read_json(recipe)).replace(f"{own_module}:Own", "canary:Own"))
    with pytest.raises(CheckpointError, match=r"canary:Own is .* class that this process has not imported.*algorithm="):
        load(tmp_path / "run")
    assert main(["enjoy", str(tmp_path / "run")]) == 2
    assert "--algorithm module:Class" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
    assert load(tmp_path / "run", algorithm=f"{own_module}:Own").evaluate(1).returns
    assert not (tmp_path / "imported").exists()


def test_a_wrong_algorithm_of_a_run_is_refused(tmp_path):
    train(Louder, "CartPole-v1", log_dir=tmp_path, **TINY)
    with pytest.raises(ConfigError, match="derives from Algorithm"):
        load(tmp_path, algorithm=dict)
    with pytest.raises(ConfigError, match="cannot be imported"):
        load(tmp_path, algorithm="nothing_here:Own")
    with pytest.raises(CheckpointError, match="does not describe an agent of this version"):
        load(tmp_path, algorithm="dqn")


def test_an_option_of_another_part_is_refused():
    from dataclasses import dataclass

    class Own(A2C):
        @dataclass(frozen=True, kw_only=True)
        class Options(A2C.Options):
            num_steps: int = option(1, help="A name of the storage.")

    with pytest.raises(ConfigError, match="'num_steps' is an option of the storage and of the algorithm; rename it"):
        option_specs(Own)

    class Renamed(A2C):
        @dataclass(frozen=True, kw_only=True)
        class Options(A2C.Options):
            num_own_steps: int = option(1, help="A name of its own.")

    assert "num_own_steps" in option_specs(Renamed)


def test_a_missing_option_has_its_name_in_train():
    cls = algorithm("own", storage=pytorchrl.GAEBuffer)(type("Own", (A2C,), {}))
    with pytest.raises(ConfigError, match=r"^GAEBuffer needs num_steps$"):
        train(cls, "CartPole-v1", target_steps=64, progress=False)


def test_user_defined_presets_apply_unless_options_are_given():
    algorithm("own", storage=pytorchrl.GAEBuffer)(type("Own", (A2C,), {}))
    presets.register("own", "classic", {"num_steps": 7, "lr": 0.5})
    assert presets.preset("own", "classic") == {"num_steps": 7, "lr": 0.5}
    assert presets.preset("own", "atari") == {}
    agent, _, _ = pytorchrl.training.composition.compose("own", "CartPole-v1", {"lr": 0.25})
    assert (agent.storage_factory.options.size, agent.algo_factory.options.lr) == (7, 0.25)
    presets.register("own", "classic", {"num_stps": 7})
    with pytest.raises(ConfigError, match="no option 'num_stps'; did you mean 'num_steps'"):
        pytorchrl.training.composition.compose("own", "CartPole-v1", {})


def test_user_defined_suites_create_their_environments():
    asked = []

    @suite("short", has=lambda env_id: env_id.startswith("short/"))
    def short_factory(env_id, vec_env_size=8, **options):
        asked.append((env_id, vec_env_size, options))
        name = env_id.removeprefix("short/")
        return VecEnv.create_factory(
            lambda: gym.make(name, max_episode_steps=5), vec_env_size=vec_env_size, **options)

    presets.register("a2c", "short", {"num_envs": 3, "num_steps": 4, "target_steps": 24})
    agent = train("a2c", "short/CartPole-v1", progress=False, frame_stack=2)
    assert asked == [("short/CartPole-v1", 3, {"frame_stack": 2})]
    assert agent.summary["env_steps"] == 24
    assert set(agent.evaluate(3).lengths) == {5}

    suite("shorter", has=lambda env_id: env_id == "short/Pendulum-v1")(lambda env_id, vec_env_size, **options: "taken")
    assert make_factory("short/Pendulum-v1") == "taken"  # the suite that was registered last has precedence
    assert suites.suite_of("short/CartPole-v1").make_factory is short_factory
