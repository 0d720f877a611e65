"""Tests of the descriptions of agents in `run.json`: round trips, code that is named, and files from strangers."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import pytorchrl
from pytorchrl.files.atomic import read_json
from pytorchrl import (
    DQN,
    PPO,
    SAC,
    GAEBuffer,
    Learner,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    Scheme,
    VecEnv,
)
from pytorchrl.agent.env.vec_env import EnvFactory
from pytorchrl.cli import main
from pytorchrl.agent.option_values.descriptions import find_by_import, find_imported, from_json, to_json
from pytorchrl.errors import CheckpointError
from pytorchrl.scheme.options.base import as_keywords
from pytorchrl.training.training import load

STRANGE = "strange_parts"
MODULE = '''
import gymnasium as gym
from pytorchrl import OnPolicyActor

print("executed")

class Wide(OnPolicyActor):
    """A class that no test imports before it is needed."""

def make_env(**kwargs):
    return gym.make("CartPole-v1", **kwargs)

class Tagged(gym.Wrapper):
    pass
'''
SCRIPT = '''
import gymnasium as gym
import pytorchrl as prl

def make_env():
    return gym.make("CartPole-v1")

if __name__ == "__main__":
    prl.train("ppo", make_env, log_dir="run", num_envs=1, num_steps=8, num_mini_batch=1, target_steps=8, progress=False)
'''


OWN_CLASS = '''
import gymnasium as gym
import pytorchrl as prl

class Wide(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))

if __name__ == "__main__":
    prl.train(
        "ppo", Wide, log_dir="run", num_envs=1, num_steps=8, num_mini_batch=1, target_steps=8, progress=False)
    print(prl.load("run").agent.test_envs_factory.options.env_fn.__name__)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return the folder of a module `strange_parts` that is on Python's path and not imported."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "strange_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("strange_parts", None)


def falling(progress_remaining):
    return 1e-3 * progress_remaining


def described(value):
    return json.loads(json.dumps(to_json(value), allow_nan=False))


@pytest.mark.parametrize(("value", "expected"), [
    (None, None), (True, True), (3, 3), (0.1, 0.1), (float("inf"), float("inf")), ("text", "text"),
    ((1, 2), (1, 2)), ([1, (2, 3)], (1, (2, 3))), (np.float32(0.5), 0.5), (np.bool_(False), False),
    (Path("a/b"), os.fspath(Path("a/b"))), ({"a": [1, (2, [3])]}, {"a": [1, (2, [3])]}),
    ({1: "a", (2, 3): "b"}, {1: "a", (2, 3): "b"}), ({"schedule": 3}, {"schedule": 3}), ({}, {}),
    ({"__code__": "os:system"}, {"__code__": "os:system"}), (torch.nn.Tanh, torch.nn.Tanh),
    (pytorchrl.linear(1e-3, 0.0), pytorchrl.linear(1e-3, 0.0)), (PPO, PPO),
], ids=str)
def test_values_are_built_again(value, expected):
    built = from_json(described(value))
    assert built == expected
    assert type(built) is type(expected)


def test_values_are_built_again_with_lists_if_tuples_are_not_kept():
    value = {"a": (1, [2, (3,)]), "b": {(4, 5): (6,)}}
    assert from_json(described(value)) == value
    assert from_json(to_json(value, keep_tuples=False)) == {"a": [1, [2, [3]]], "b": {(4, 5): [6]}}


def test_functions_need_an_import():
    partial = functools.partial(torch.optim.Adam, betas=(0.8, 0.9))
    built = from_json(described(partial))
    assert (built.func, built.args, built.keywords) == (torch.optim.Adam, (), {"betas": (0.8, 0.9)})
    for value in (falling, {"nested": [falling]}):
        with pytest.raises(CheckpointError, match=r"test_descriptions:falling is a function, or a class that"):
            from_json(described(value))
        assert from_json(described(value), find_by_import) == value


@pytest.mark.parametrize(("value", "message"), [
    (lambda: 0, "was defined inside a function, so it cannot be imported"), (open, "builtins:open|_io:open|io:open"),
    (object(), "no value can be built from <object"),
    (np.array([["many", "lines"]] * 200, dtype=object), r"^no value can be built from array.{60,80}\.\.\.; when you"),
])
def test_a_value_without_a_place_in_a_module_is_refused_by_name(value, message):
    with pytest.raises(CheckpointError, match=message):
        from_json({"x": described(value)}, find_imported if value is open else find_by_import)


def test_a_script_is_named_by_its_file(tmp_path, run_forked):
    (tmp_path / "own_script.py").write_text(SCRIPT)
    trained = run_forked("own_script.py", timeout=300)
    assert trained.returncode == 0, trained.stderr
    run = read_json(tmp_path / "run" / "run.json")
    assert run["agent"]["train_envs_factory"]["options"]["env_fn"] == {"__code__": "own_script:make_env"}
    code = "import sys; sys.path.insert(0, ''); import pytorchrl as prl; print(prl.load('run', trust=True).evaluate(1))"
    found = run_forked("-c", code, timeout=300)
    assert "return_mean=" in found.stdout, found.stderr


def test_a_script_loads_a_class_that_it_defines_itself(tmp_path, run_forked):
    script = tmp_path / "own_script.py"
    script.write_text(OWN_CLASS)
    found = run_forked(script, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "Wide"


def agents():
    cartpole = VecEnv.create_factory("CartPole-v1", vec_env_size=2, env_kwargs={"sutton_barto_reward": True})
    pendulum = VecEnv.create_factory("Pendulum-v1", vec_env_size=2, frame_stack=2)
    spaces = {"cartpole": (cartpole.observation_space, cartpole.action_space),
              "pendulum": (pendulum.observation_space, pendulum.action_space)}
    return {
        "ppo": (PPO.create_factory(lr=falling, num_epochs=1, num_mini_batch=1, optimizer=torch.optim.NAdam),
                OnPolicyActor.create_factory(*spaces["cartpole"], hidden_sizes=(8, 4), recurrent_net="gru",
                                             normalize_obs=True), GAEBuffer.create_factory(8), cartpole),
        "dqn": (DQN.create_factory(start_steps=8, mini_batch_size=4, epsilon_steps=100),
                QActor.create_factory(*spaces["cartpole"], hidden_sizes=(8,), dueling=True),
                PERBuffer.create_factory(64, rollout_size=4), cartpole),
        "sac": (SAC.create_factory(start_steps=8, mini_batch_size=4),
                OffPolicyActor.create_factory(*spaces["pendulum"], hidden_sizes=(8,)),
                ReplayBuffer.create_factory(64, rollout_size=4), pendulum)}


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_an_agent_composed_in_python_is_loaded_and_acts_as_before(tmp_path, name):
    algorithm, actor, storage, envs = agents()[name]
    scheme = Scheme(algorithm, actor, storage, envs, envs, seed=4)
    with Learner(scheme, target_steps=32, log_dir=tmp_path, progress=False, log_every_s=9.0) as learner:
        learner.train()
        learner.save_model()
        expected = learner.evaluate(3)
    for trust in (False, True):
        agent = load(tmp_path, trust=trust)
        parts = agent.agent
        assert (parts.actor_factory, parts.storage_factory, parts.train_envs_factory) == (actor, storage, envs)
        assert parts.algo_factory.cls is algorithm.cls
        assert (parts.algo_factory == scheme.agent.algo_factory) == (trust or name != "ppo")
        assert agent.evaluate(3, seed=4).returns == expected.returns
    assert agent.seed == 4
    run = read_json(tmp_path / "run.json")
    assert run["learner"]["log_every_s"] == 9.0
    assert run["recipe"] == {}
    for part, factory in scheme.agent.as_dict().items():
        names = set(as_keywords(factory.options)) - ({"log_dir"} if isinstance(factory, EnvFactory) else set())
        assert set(run["agent"][part]["options"]) == names


def trained(folder, envs, actor_class, **options):
    actor = actor_class.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))
    scheme = Scheme(PPO.create_factory(num_epochs=1, num_mini_batch=1), actor, GAEBuffer.create_factory(8), envs, envs,
                    seed=1, **options)
    with Learner(scheme, target_steps=8, log_dir=folder, progress=False) as learner:
        learner.train()
        learner.save_model()


def test_own_code_is_imported_only_if_the_run_is_trusted(tmp_path, module, capsys):
    strange_parts = importlib.import_module(STRANGE)
    envs = VecEnv.create_factory(strange_parts.make_env, wrappers=(strange_parts.Tagged,))
    trained(tmp_path / "run", envs, strange_parts.Wide)
    expected = load(tmp_path / "run", trust=True).evaluate(2).returns
    del sys.modules["strange_parts"], strange_parts, envs
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"strange_parts:make_env is a function.*trust=True.*--trust"):
        load(tmp_path / "run")
    assert capsys.readouterr().out == ""
    agent = load(tmp_path / "run", trust=True)
    assert capsys.readouterr().out == "executed\n"
    assert agent.agent.actor_factory.cls is sys.modules["strange_parts"].Wide
    assert agent.evaluate(2).returns == expected
    export = ["export", str(tmp_path / "run"), "--to", "torch", "--checks", "1"]
    assert [main(export), main([*export, "--trust"])] == [2, 0]
    (module / "strange_parts.py").unlink()
    del sys.modules["strange_parts"]
    with pytest.raises(CheckpointError, match=r"strange_parts:make_env cannot be imported.*run from the folder"):
        load(tmp_path / "run", trust=True)


@pytest.mark.parametrize("env", ["strange_parts:CartPole-v1", "strange_parts"])
def test_an_environment_beside_the_run_is_not_imported(tmp_path, module, capsys, env):
    trained(tmp_path / "run", VecEnv.create_factory("CartPole-v1"), OnPolicyActor)
    run = read_json(tmp_path / "run" / "run.json")
    run["agent"]["train_envs_factory"]["options"]["env_fn"] = env
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    with pytest.raises(CheckpointError, match="is code in the module 'strange_parts', which this process has not"):
        load(tmp_path / "run")
    assert "strange_parts" not in sys.modules
    if ":" in env:  # the module registers nothing, so that Gymnasium finds its own environment
        load(tmp_path / "run", trust=True)
        assert capsys.readouterr().out == "executed\n"


@pytest.mark.parametrize("code", ["os:system", "builtins:eval", "subprocess:Popen", "pytorchrl.training.training:load"])
def test_functions_are_never_found_without_an_import(tmp_path, code):
    trained(tmp_path, VecEnv.create_factory("CartPole-v1"), OnPolicyActor)
    run = read_json(tmp_path / "run.json")
    run["agent"]["train_envs_factory"]["options"]["env_fn"] = {"__partial__": [{"__code__": code}, ["false"], {}]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(CheckpointError, match=f"{code} is a function, or a class that this process has not imported"):
        load(tmp_path)


def test_a_checkpoint_from_which_training_started_is_not_needed_to_load(tmp_path):
    options = {"num_envs": 1, "num_steps": 8, "num_mini_batch": 1, "hidden_sizes": (4,), "target_steps": 8,
               "progress": False}
    path = pytorchrl.train("ppo", "CartPole-v1", **options).save(tmp_path / "start.pt")
    agent = pytorchrl.train("ppo", "CartPole-v1", checkpoint=path, log_dir=tmp_path / "run", **options)
    expected = agent.evaluate(2).returns
    Path(path).unlink()
    assert load(tmp_path / "run").evaluate(2).returns == expected


def test_code_of_a_class_is_found_by_the_name_of_the_class():
    assert find_imported("gymnasium.wrappers.common:RecordEpisodeStatistics") is gym.wrappers.RecordEpisodeStatistics
    with pytest.raises(CheckpointError, match="not imported"):
        find_imported("gymnasium.wrappers.common:gym")
