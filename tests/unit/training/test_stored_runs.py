"""Tests of files of earlier versions, which can be loaded and resumed, and of newer ones, which are refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import pytorchrl as prl
from pytorchrl.learner import checkpoints
from pytorchrl.analysis.runs import read_run
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.tensors import save
from tests.unit.learner.stored_runs import FILES, RESUMED_STEPS, STEPS, STORED, numbers_of, train, unpack

RUNS = sorted(STORED.glob("*.json"))


def is_close(one, other):
    """Return whether two nested values are equal, except for rounding errors of parameters."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_close(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return np.allclose(one, other, rtol=1e-3, atol=1e-5)
    return one == other


@pytest.fixture(params=RUNS, ids=[path.stem for path in RUNS])
def stored(request, tmp_path):
    """Return the algorithm, the directory, and the two sets of numbers of each stored run."""
    return request.param.stem.rpartition("-")[2], tmp_path, *unpack(request.param, tmp_path)


def test_there_are_runs_of_each_version():
    assert [path.stem for path in RUNS] == ["0.1.0-dqn", "0.1.0-ppo", "unreleased-dqn", "unreleased-ppo"]


def test_the_model_of_a_stored_run_is_loaded(stored):
    _, directory, at_the_end, _ = stored
    agent = prl.load(directory)
    assert is_close({name: tensor.tolist() for name, tensor in agent.acting_state.items()}, at_the_end["acting_state"])
    assert len(agent.evaluate(2).returns) == 2


def test_a_stored_run_is_resumed_and_ends_as_in_the_version_that_wrote_it(stored):
    algorithm, directory, at_the_end, expected = stored
    before = (directory / "metrics.jsonl").read_text().splitlines()
    with pytest.raises(CheckpointError, match="lr was"):  # other differences than new options are still refused
        train(algorithm, directory, target_steps=RESUMED_STEPS, resume=True, lr=0.5)
    agent = train(algorithm, directory, target_steps=RESUMED_STEPS, resume=True)
    assert not expected["ledger"]["dropped"].pop("preempted", 0)  # version 0.1.0 had this reason, but never counted it
    assert is_close(json.loads(json.dumps(numbers_of(agent))), expected)
    assert expected["env_steps"] > at_the_end["env_steps"]
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in before if json.loads(line)["env_steps"] <= STEPS]
    assert lines[:len(kept)] == kept
    assert len(lines) > len(kept)


def test_a_stored_run_is_described(stored):
    algorithm, directory, *_ = stored
    run = read_run(directory)
    assert (run.settings["algorithm"], run.task, run.seed) == (algorithm, "CartPole-v1", 3)


def test_files_of_a_newer_version_are_refused(stored):
    algorithm, directory, *_ = stored
    changed = directory / "newer"
    shutil.copytree(directory, changed)
    run = read_json(directory / "run.json")
    (changed / "run.json").write_text(json.dumps({**run, "format": 2}))
    for read, error in ((prl.load, CheckpointError), (read_run, ConfigError)):
        with pytest.raises(error, match=r"run\.json.* has the format 2, but this version .* up to 1; use the version"):
            read(changed)
    (changed / "run.json").write_text(json.dumps(run))
    save(changed / "model.pt", {**torch.load(directory / "model.pt", weights_only=True), "format": 2})
    with pytest.raises(CheckpointError, match=r"model\.pt' cannot be loaded: it has the format 2"):
        prl.load(changed)
    path = changed / FILES[-1]
    contents = checkpoints.read(path)
    save(path, {**contents, "scheme": {**contents["scheme"], "format": "pytorchrl checkpoint 2"}})
    with pytest.raises(CheckpointError, match="its format is 'pytorchrl checkpoint 2', expected"):
        train(algorithm, changed, target_steps=RESUMED_STEPS, resume=True)
