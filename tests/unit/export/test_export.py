"""Tests of exported policies: files act like the agent in a process without this library, or are not written."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import pytorchrl as prl
from pytorchrl.agent.env.spaces import ObservationReader
from pytorchrl.cli import main
from pytorchrl.errors import ConfigError, ExportError
from pytorchrl.export import checks
from pytorchrl.export.formats import FORMATS
from pytorchrl.export.inputs import describe, example_inputs, sample
from tests.conftest import process_environment
from tests.unit.learner import exported_files
from tests.unit.learner.small_agents import TINY, Mixed, agent_of, make_env

NAMES = ["ppo", "ppo-images", "ppo-gru", "ppo-lstm", "ppo-mixed", "ppo-masked", "ppo-masked-gru", "sac", "sac-gru",
         "dqn", "r2d2"]
POLICIES = {**{name: [""] for name in NAMES}, "independent": ["-speaker_0", "-listener_0"]}
# An export takes a second. Other files of `USUAL` have the parts of these policies: `ppo-lstm` normalizes, `ppo-masked`
# has a discrete policy, and `r2d2` has a GRU and values of actions. `test_all_action_spaces_can_be_exported` has SAC.
RARE_NAMES = {"ppo", "ppo-gru", "ppo-masked-gru", "dqn", "c51", "sac"}
# An export to ONNX takes ten times as long as the others. In these two, all parts of `_write_onnx` and `_open_onnx` are
# used: memory, masks, several inputs, and continuous and discrete actions.
USUAL_ONNX = {"ppo-lstm", "ppo-masked"}
EXPORTS = [(name, to) for name in POLICIES for to in FORMATS]
RARE = [(name, to) for name, to in EXPORTS if name in RARE_NAMES or (to == "onnx" and name not in USUAL_ONNX)]
USUAL = [export for export in EXPORTS if export not in RARE]
STEPS = 40
# Runs a script in a process that has imported the library, but cannot import any of its modules again.
WITHOUT_THE_LIBRARY = """
import runpy, sys
for name in list(sys.modules):
    if name.partition(".")[0] == "pytorchrl":
        sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The files are written once, in one process.
pytestmark = [pytest.mark.xdist_group("export"), pytest.mark.timeout(600)]


def play(name):
    """Return steps of `act` in the environment: observation, is_first, mask, action and reward of each."""
    agent, env = agent_of(name), make_env(name)
    steps, is_over, seed = [], True, 0
    while len(steps) < STEPS:
        is_first = is_over
        if is_over:
            seed += 1
            (obs, info), memory = env.reset(seed=seed), None
        mask = info.get("action_mask")
        action = agent.act(obs, memory, mask=mask)
        if agent.policy.has_memory:
            action, memory = action
        seen = obs
        obs, reward, terminated, truncated, info = env.step(action)
        if name == "r2d2":
            memory["q/previous"][:, -1] = reward
        is_over = terminated or truncated
        steps.append((seen, is_first, mask, action, reward))
    return steps


def play_together():
    """Return agent -> steps of `act` in an environment with several agents."""
    from mpe2 import simple_speaker_listener_v4

    env = simple_speaker_listener_v4.parallel_env()
    steps = {"speaker_0": [], "listener_0": []}
    obs, _ = env.reset(seed=1)
    while env.agents:
        actions = agent_of("independent").act(obs)
        for agent, own in steps.items():
            own.append((obs[agent], not own, None, actions[agent], 0.0))
        obs, *_ = env.step(actions)
    env.close()
    return steps


def files_of(exports):
    """Return file -> (name of the agent, policy) of all files that exports write."""
    return {f"{name}{policy}{FORMATS[to].suffix}": (name, policy) for name, to in exports for policy in POLICIES[name]}


def export_all(folder, exports):
    """Write files to a folder, and return the folder."""
    for name, to in exports:
        files = agent_of(name).export(folder / f"{name}{FORMATS[to].suffix}", to=to, checks=60)
        assert [file.path.name for file in files] == list(files_of([(name, to)]))
        assert all(file.num_observations >= 60 and file.largest_difference <= 1e-5 for file in files)
    return folder


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Let all exports to ONNX share one list of operators, because each would build it again."""
    from torch.onnx._internal.exporter import _registration

    registry = functools.cache(_registration.onnxscript_apis.get_torchlib_ops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_registration.onnxscript_apis, "get_torchlib_ops", registry)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the files of `USUAL`."""
    return export_all(tmp_path_factory.mktemp("exported"), USUAL)


@pytest.fixture(scope="module")
def results(folder, forked_python):
    """Return file -> result of the check in a fork, in which importing any module of the library is an error.

    A fresh process imports torch and `torch.export` for three seconds.
    """
    return check(folder, USUAL, forked_python, "-c", WITHOUT_THE_LIBRARY)


@pytest.fixture(scope="module")
def rare_results(tmp_path_factory):
    """Return file -> result of the check for the files of `RARE`, in a process that has never imported the library."""
    return check(export_all(tmp_path_factory.mktemp("rare"), RARE), RARE, sys.executable)


def check(folder, exports, *python):
    """Check files in a process that `python` starts, and return file -> result."""
    play_once, together = functools.cache(play), play_together()
    recorded = {
        str(folder / file): together[policy[1:]] if policy else play_once(name)
        for file, (name, policy) in files_of(exports).items()}
    (folder / "steps.pickle").write_bytes(pickle.dumps(recorded))
    result = subprocess.run([*python, exported_files.__file__, folder / "steps.pickle"], cwd=folder,
                            env=process_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {Path(path).name: found for path, found in json.loads(result.stdout).items()}


@pytest.mark.parametrize("file", files_of(USUAL))
def test_file_acts_like_the_agent_without_this_library(results, file):
    assert_equal_actions(results, file)


@pytest.mark.thorough
@pytest.mark.parametrize("file", files_of(RARE))
def test_rare_file_acts_like_the_agent_without_this_library(rare_results, file):
    assert_equal_actions(rare_results, file)


def assert_equal_actions(results, file):
    count, num_different, num_distinct = results[file]
    assert count >= 25
    assert num_different == 0
    assert num_distinct > 1 or file.startswith("independent")


def test_nothing_but_the_files_is_written(folder):
    assert {path.name for path in folder.iterdir()} - {"steps.pickle"} == set(files_of(USUAL))


def test_outputs_have_names_and_the_described_shapes(folder):
    """Check the names of an ONNX file's outputs, and the description of a memory with two entries."""
    onnx = pytest.importorskip("onnxruntime").InferenceSession(str(folder / "ppo-lstm.onnx"))
    assert [output.name for output in onnx.get_outputs()] == ["action", "next_memory/policy"]
    assert [found.name for found in onnx.get_inputs()] == ["obs", "memory/policy"]
    policy = agent_of("r2d2").policy
    described = describe("r2d2", policy, example_inputs(policy))
    memory = {name: ["batch", *state.shape[1:]] for name, state in policy.initial_memory(2).items()}
    assert len({str(shape) for shape in memory.values()}) == len(memory) == 2
    for kind, first in (("inputs", "obs"), ("outputs", "action")):
        prefix = "" if kind == "inputs" else "next_"
        shapes = [(entry["name"], entry["shape"]) for entry in described[kind]]
        assert shapes[0][0] == first
        assert shapes[1:] == [(f"{prefix}memory/{name}", shape) for name, shape in memory.items()]


def test_a_file_accepts_batches_of_any_size(folder):
    policy = agent_of("ppo-lstm").policy
    for form in FORMATS.values():
        compute, description = exported_files.OPEN[form.suffix](str(folder / f"ppo-lstm{form.suffix}"))
        for size in (1, 2, 7):
            obs, memory = torch.randn(size, 3), {"policy": torch.randn(size, 10)}
            action, after = compute(obs.numpy(), {"policy": memory["policy"].numpy()}, None)
            expected, states = policy(obs, memory)
            np.testing.assert_allclose(action, expected, atol=1e-5)
            np.testing.assert_allclose(after["policy"], states["policy"], atol=1e-5)
        assert description["inputs"] == [
            {"name": "obs", "dtype": "float32", "shape": ["batch", 3]},
            {"name": "memory/policy", "dtype": "float32", "shape": ["batch", 10]}]
        assert description["outputs"] == [
            {"name": "action", "dtype": "float32", "shape": ["batch", 1]},
            {"name": "next_memory/policy", "dtype": "float32", "shape": ["batch", 10]}]


def test_safetensors_contain_the_weights_under_the_names_of_the_policy(folder):
    from safetensors.torch import load_file

    weights, state = load_file(folder / "ppo-masked.safetensors"), agent_of("ppo-masked").policy.state_dict()
    # To normalize observations, the policy needs only the shift and the scale that follow from their moments.
    used = {key: value for key, value in state.items() if not key.endswith((".count", ".mean", ".m2"))}
    assert {key for key in weights if key.startswith("actor.")} == set(used)
    for key, value in used.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=0)


class Random(gym.Env):
    """An environment with any spaces, whose observations are random."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.left = 5
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.left -= 1
        return self.observation_space.sample(), 0.0, self.left == 0, False, {}


@pytest.mark.parametrize(("algorithm", "options", "space"), [
    ("ppo", {}, spaces.MultiDiscrete([2, 3], start=[1, 5])), ("a2c", {}, spaces.MultiBinary(3)),
    ("td3", {"policy": "deterministic"}, spaces.Box(-3.0, 5.0, (2, 2), np.float64)),
    ("sac", {"block": "simba"}, spaces.Discrete(3, start=-1))])
def test_all_action_spaces_can_be_exported(tmp_path, algorithm, options, space):
    seen = spaces.Tuple((spaces.Box(-1e6, 1e6, (2,), np.float64), spaces.Discrete(3)))
    agent = prl.train(algorithm, lambda: Random(seen, space), target_steps=0, **TINY, **options)
    (file,) = agent.export(tmp_path / "p.safetensors", to="safetensors", checks=100)
    compute, description = exported_files.open_safetensors(str(file.path))
    assert [entry["name"] for entry in description["inputs"]] == ["0", "1"]
    obs = sample(seen, 10, seed=1)
    actions, _ = compute(dict(zip("01", obs, strict=True)), {}, None)
    assert all(space.contains(action.astype(space.dtype)[()]) for action in actions)
    for row, action in enumerate(actions):
        np.testing.assert_allclose(action, agent.act(tuple(leaf[row] for leaf in obs)), atol=1e-5)


# Files that differ are refused


class Contrary(prl.PPO):
    """An algorithm that takes the action that its policy likes least."""

    def acting_step(self, obs, rhs, done, deterministic=False, mask=None):
        step = super().acting_step(obs, rhs, done, deterministic, mask)
        return step._replace(action=1 - step.action, clipped_action=1 - step.clipped_action)


def test_decoders_are_refused(tmp_path):
    agent = prl.train("grpo", "tokens/SortDigits", target_steps=100, seed=1, progress=False, log_dir=tmp_path / "run")
    with pytest.raises(ExportError, match=r"policies of DecoderActor cannot be exported, .*; load the run with"):
        agent.export(tmp_path / "p.pt2", to="torch")
    token, memory = prl.load(tmp_path / "run").act(3)
    assert (token.dtype, memory["length"].item()) == (np.int64, 1)


def test_a_file_with_other_actions_is_not_left(tmp_path):
    agent = agent_of("ppo")
    contrary = prl.TrainedAgent(
        agent=dataclasses.replace(agent.agent, algo_factory=Contrary.create_factory()), acting_state=agent.acting_state,
        seed=1)
    with pytest.raises(ExportError, match=r"p\.pt2 was not written: .* for 20 of 20 observations, by up to 1; if an"):
        contrary.export(tmp_path / "p.pt2", to="torch", checks=20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "size", "num_different"), [
    (0.9e-5, 1.0, 0), (1.1e-5, 1.0, 1), (1.1e-5, 2.0, 0), (0.9e-5, 0.1, 0), (1.1e-5, 0.1, 1), (np.nan, 1.0, 1)])
def test_continuous_actions_may_differ_by_rounding(error, size, num_different):
    action = np.full((3, 1), size)
    other = action + np.array([[0.0], [error], [0.0]])
    steps = [checks.Observed(np.zeros((3, 3), np.float32), None, np.ones(3, bool), action)]
    found = checks.compare(lambda _: [other], agent_of("sac").policy, steps)
    assert (found.num_observations, found.num_different) == (3, num_different)
    assert found.largest_difference == pytest.approx(error, rel=1e-6, nan_ok=True)


def test_discrete_actions_must_be_equal():
    steps = [checks.Observed(np.zeros((3, 4), np.float32), None, np.ones(3, bool), np.array([0, 1, 1]))]
    found = checks.compare(lambda _: [np.array([0, 1, 0])], agent_of("dqn").policy, steps)
    assert found == checks.PolicyComparison(3, 1, 1.0)


def test_the_check_covers_all_steps_and_all_parts_of_an_action():
    """Check the counts over three steps of different sizes, in which the first has the largest difference."""
    differences = [np.array([[0.0, 0.3], [0.1, 0.0], [0.0, 0.0]]), np.array([[0.2, 0.0], [0.0, 0.0]]),
                   np.array([[0.0, 0.0]])]
    answers = iter([0.5 + part for part in differences])
    steps = [checks.Observed(np.zeros((len(part), 3), np.float32), None, np.ones(len(part), bool),
                             np.full(part.shape, 0.5)) for part in differences]
    found = checks.compare(lambda _: [next(answers)], agent_of("sac").policy, steps)
    assert (found.num_observations, found.num_different) == (6, 3)
    assert found.largest_difference == pytest.approx(0.3)
    answers = iter([np.full((1, 1), np.nan), np.zeros((1, 1))])
    steps = [checks.Observed(np.zeros((1, 3), np.float32), None, np.ones(1, bool), np.zeros((1, 1)))] * 2
    assert np.isnan(checks.compare(lambda _: [next(answers)], agent_of("sac").policy, steps).largest_difference)


def test_the_check_shows_rewards_to_a_memory_that_receives_them():
    policy, seen = agent_of("r2d2").policy, []
    widths = {name: state.shape[1] for name, state in policy.initial_memory(1).items()}

    def compute(inputs):
        seen.append(inputs.memory["q/previous"][:, -1].tolist())
        return [np.zeros(2, np.int64), *(np.ones((2, width), np.float32) for width in widths.values())]
    steps = [checks.Observed(np.zeros((2, 4), np.float32), None, np.zeros(2, bool), np.zeros(2, np.int64),
                             np.array(reward, np.float32)) for reward in ([5.0, 6.0], [7.0, 8.0], [0.0, 0.0])]
    checks.compare(compute, policy, steps)
    assert seen == [[0.0, 0.0], [5.0, 6.0], [7.0, 8.0]]


def test_the_check_resets_the_memory_where_an_episode_starts():
    policy, seen = agent_of("ppo-gru").policy, []

    def compute(inputs):
        seen.append(inputs.memory["policy"].copy())
        return [np.zeros(2, np.int64), np.ones((2, 5), np.float32)]
    steps = [checks.Observed(np.zeros((2, 4), np.float32), None, np.array(first), np.zeros(2, np.int64))
             for first in ([True, True], [False, False], [False, True])]
    checks.compare(compute, policy, steps)
    assert [state[:, 0].tolist() for state in seen] == [[0, 0], [1, 1], [1, 0]]


def test_restored_observations_are_those_of_the_environment():
    reader = ObservationReader(Mixed.observation_space)
    obs = sample(Mixed.observation_space, 4, seed=2)
    restored = checks.restored(reader, reader.read(obs), reader.mask(obs))
    for own, other in ((obs, restored), (obs["body"], restored["body"])):
        assert list(own) == list(other)
        for key in own:
            if not isinstance(own[key], dict):
                assert own[key].dtype == other[key].dtype
                np.testing.assert_allclose(own[key].astype(float), other[key], rtol=1e-6)


def test_random_masks_allow_an_action():
    agent = agent_of("ppo-mixed")
    acting = agent._acting
    steps = checks.random_steps(acting.players["policy"], acting.parts["policy"].spaces, 50, seed=1)
    masks = steps[0].obs["action_mask"]
    assert masks.shape == (50, 4)
    assert masks.any(axis=1).all()
    assert not masks.all()
    assert masks[np.arange(50), steps[0].action - 5].all()


# Errors


def test_errors_name_the_remedy(tmp_path, monkeypatch):
    agent, path = agent_of("dqn"), tmp_path / "p.pt2"
    with pytest.raises(ConfigError, match=r"one of \['onnx', 'torch', 'safetensors'\], got 'tflite'"):
        agent.export(path, to="tflite")
    with pytest.raises(ConfigError, match="checks must be a whole number >= 1, got 0"):
        agent.export(path, to="torch", checks=0)
    with pytest.raises(ConfigError, match="path must name the file"):
        agent.export(to="torch")
    for to, package in (("onnx", "onnxruntime"), ("onnx", "onnxscript"), ("safetensors", "safetensors")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=rf"to {to} needs the extra `export`: pip install.*{package}"):
                agent.export(path, to=to)
    path.write_text("own")
    with pytest.raises(ConfigError, match=r"p\.pt2 exists already; .*--overwrite"):
        agent.export(path, to="torch", checks=10)
    assert path.read_text() == "own"
    agent.export(path, to="torch", checks=10, overwrite=True)
    assert path.read_bytes()[:2] == b"PK"
    with pytest.raises(ConfigError, match="cannot be written"):
        agent.export(path / "below", to="torch", checks=10)


class Branching(nn.Module):
    """Networks that use the values of tensors in Python."""

    out_features = 4

    def __init__(self, space):
        super().__init__()

    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_networks_that_cannot_be_traced_are_named(tmp_path):
    agent = prl.train("ppo", "CartPole-v1", target_steps=0, feature_extractor=Branching,
                      **{key: value for key, value in TINY.items() if key != "hidden_sizes"})
    with pytest.raises(ExportError, match=r"cannot trace the policy 'policy': .*must not use the values of tensors"):
        agent.export(tmp_path / "p.pt2", to="torch", checks=10)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_exports_a_run(tmp_path, capsys):
    run = str(tmp_path / "run")
    prl.train("ppo", "CartPole-v1", target_steps=0, log_dir=run, **TINY)
    assert main(["export", run, "--to", "safetensors", "--checks", "30"]) == 0
    out = capsys.readouterr().out
    assert out == (f"wrote {run}/policy.safetensors: its actions and those of the agent agree for 30 observations "
                   "(largest difference 0)\n")
    assert main(["export", run, "--to", "safetensors"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", run, "--to", "safetensors", "--overwrite", "--checks", "10"]) == 0
    assert main(["export", run, "--to", "torch", "--out", str(tmp_path / "other" / "p.pt2"), "--checks", "10"]) == 0
    assert (tmp_path / "other" / "p.pt2").is_file()
    capsys.readouterr()
    for arguments, text in (
            ([run, "--to", "torch", "--model", "best"], "there is no model"),
            ([str(tmp_path / "none"), "--to", "torch"], "contains no run"),
            ([run, "--to", "h5"], "invalid choice: 'h5'"), ([run], "required: --to"),
            ([run, "--to", "torch", "--checks", "0"], "whole number >= 1")):
        assert main(["export", *arguments]) == 2
        assert text in capsys.readouterr().err


