"""Damage the files of real runs with the scripts in `benchmarks`, and break saves; see there for all cases."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import pytest
import torch

import pytorchrl as prl
from pytorchrl.learner import checkpoints
from pytorchrl.training.configuration import load_config
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import parse_json, read_bytes, with_checksum
from pytorchrl.files.tensors import read_sealed, save
from tests.conftest import ROOT


@pytest.fixture
def run_script(run_forked):
    """Return a function that returns what a script prints; it sets alarms and forks, so it needs its own process."""
    def run(name, *arguments):
        result = run_forked(ROOT / "benchmarks" / name, *arguments, cwd=ROOT, timeout=500)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout)
    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("every", "least"), [(4, 100), pytest.param(2, 200, marks=pytest.mark.thorough)])
def test_damage_is_refused_by_name_or_changes_nothing(run_script, every, least):
    found = run_script("damage.py", "--cases", "20", "--every", every)
    assert found["bad"] == []
    assert found["cases"] >= least
    assert found["outcomes"]["error"] > 50
    assert found["outcomes"]["older"] > 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [5, pytest.param(3, marks=pytest.mark.thorough)])
def test_broken_saves_leave_the_old_or_the_new_data(run_script, every):
    found = run_script("broken_saves.py", "--saves", "model", "checkpoint", "metrics", "record", "configuration",
                       "--every", every)
    assert {name: one["wrong"] for name, one in found["saves"].items() if one["wrong"]} == {}
    assert found["points"] >= 50


def test_a_checksum_under_a_damaged_name_is_found():
    value = with_checksum({"seed": 1, "recipe": {}})
    value["shb256"] = value.pop("sha256")
    with pytest.raises(ValueError, match="differs from its checksum"):
        parse_json(json.dumps(value), "run.json")
    assert parse_json(json.dumps({"seed": 1, "digest": "0" * 64}), "run.json")["seed"] == 1


@pytest.mark.parametrize("text", ["[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150], ids=["lists", "objects"])
def test_deep_json_is_refused(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text, "run.json")


def test_a_schedule_with_a_huge_number_is_refused(tmp_path):
    recipe = {"algorithm": "ppo", "env": "CartPole-v1", "options": {"lr": {"schedule": ["linear", 10**400, 0]}}}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "recipe": recipe, "seed": 1}))
    with pytest.raises(ConfigError, match=r"run\.json: lr: no value can be built from"):
        load_config(tmp_path / "run.json")


def test_a_tensor_without_its_data_is_refused(tmp_path):
    save(tmp_path / "model.pt", {"format": 1, "acting_state": {"all": torch.zeros(1).expand(10**9)}})
    with pytest.raises(CheckpointError, match="1,000,000,000 elements, but only 4 bytes"):
        read_sealed(tmp_path / "model.pt", "model")


@pytest.mark.parametrize("value", [
    {"__float__": "x"}, {"__space__": "observation_space"}, {"__partial__": [1]}, {"__mapping__": [[1]]},
    {"__tuple__": 5}])
def test_values_that_no_option_has_are_refused_with_the_file(tmp_path, value):
    recipe = {"algorithm": "ppo", "env": "CartPole-v1", "options": {"lr": value}}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "recipe": recipe, "seed": 1}))
    with pytest.raises(ConfigError, match=r"run\.json: lr: no value can be built from"):
        load_config(tmp_path / "run.json")


def test_a_small_file_is_read_without_memory_for_the_largest(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"{}\n")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "metrics.jsonl", 100 << 20) == b"{}\n"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="has more than 2 bytes"):
        read_bytes(tmp_path / "metrics.jsonl", 2)


@pytest.mark.parametrize("env_steps", [torch.zeros(2), "x", None])
def test_a_checkpoint_without_a_number_of_env_steps_is_refused(tmp_path, env_steps):
    path = tmp_path / "step-000000000256.pt"
    save(path, {"scheme": {}, "learner": {"env_steps": env_steps}})
    with pytest.raises(CheckpointError, match=rf"{path.name}.* instead of a number of steps"):
        checkpoints.read(path)


OPTIONS = {
    "ppo": {"num_steps": 16, "num_epochs": 1, "num_mini_batch": 1},
    "dqn": {"start_steps": 32, "replay_size": 64, "mini_batch_size": 8, "update_every": 16}}
ACCOUNTS = ("scheme", "state", "accounts")
RING = ("scheme", "state", "workers", 0, "storage", "contents", "ring")


def train(log_dir, algorithm, **options):
    return prl.train(algorithm, "CartPole-v1", log_dir=log_dir, seed=1, num_envs=2, hidden_sizes=(4,), progress=False,
                     tensorboard=False, checkpoint_every=64, **OPTIONS[algorithm], **options)


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """Return the directory of each algorithm's run of 128 env steps, by the algorithm's name."""
    folder = tmp_path_factory.mktemp("runs")
    for algorithm in OPTIONS:
        train(folder / algorithm, algorithm, target_steps=128)
    return {algorithm: folder / algorithm for algorithm in OPTIONS}


@pytest.mark.parametrize(("algorithm", "place", "value"), [
    ("ppo", (*ACCOUNTS, "lost", "sent"), torch.zeros(2, 2)), ("ppo", (*ACCOUNTS, "own", "consumed"), 2**70),
    ("ppo", (*ACCOUNTS, "own", "resident"), 5), ("ppo", (*ACCOUNTS, "own", "dropped"), {"x": 0}),
    ("ppo", (*ACCOUNTS, "counts", "updates"), "x"), ("ppo", (*ACCOUNTS, "lags", "lags"), {0: 0}),
    ("ppo", ("scheme", "state", "workers", 0, "ledger", "queued"), ()), ("ppo", ("scheme", "state", "version"), None),
    ("ppo", ("scheme", "state", "algorithm", "gradient", "parameters", "lr"), "x"),
    ("ppo", ("scheme", "state", "algorithm", "gradient", "parameters"), {"lr": 1.0}),
    ("ppo", ("scheme", "state"), None), ("ppo", ("scheme", "part"), "x"),
    ("ppo", ("learner", "recorded_steps"), 2**70), ("ppo", ("learner", "callbacks"), [1]),
    ("ppo", ("learner", "records"), [1]),
    ("dqn", (*RING, "extras", "free"), torch.tensor([2**25])), ("dqn", (*RING, "extras", "capacity"), 2**40),
    ("dqn", (*RING, "total"), 2**40), ("dqn", (*RING, "capacity"), 32),
    ("dqn", (*RING, "num_drawable"), 3), ("dqn", (*RING, "counters", "evicted"), "x"),
    ("dqn", (*RING, "columns", "link"), torch.full((64,), -2**40)),
    ("dqn", (*RING, "columns", "reward"), torch.zeros(63)),
    ("dqn", (*RING, "leaves", "obs/obs", "extras"), torch.zeros(64, 3)),
    ("dqn", (*RING, "columns", "reward"), torch.zeros(64, dtype=torch.int64)),
    ("dqn", (*RING, "heads"), [((0, 0), torch.tensor([100, 127]), torch.tensor([-2**20, -1]), torch.ones(2).bool())]),
    ("dqn", (*RING[:-1], "num_sampled"), "x"),
], ids=lambda value: "-".join(map(str, value[-2:])) if isinstance(value, tuple) and value else None)
def test_wrong_contents_of_a_checkpoint_are_refused_with_the_file(tmp_path, finished_runs, algorithm, place, value):
    run = shutil.copytree(finished_runs[algorithm], tmp_path / "run")
    path = run / "checkpoints" / "step-000000000128.pt"
    saved = part = read_sealed(path, "checkpoint")
    for key in place[:-1]:
        part = part[key]
    assert place[-1] in part
    part[place[-1]] = value
    save(path, saved)
    with pytest.raises(CheckpointError, match=path.name):
        train(run, algorithm, target_steps=160, resume=True)


def test_saved_actions_of_another_kind_are_an_error_of_the_checkpoint(tmp_path, finished_runs):
    run = shutil.copytree(finished_runs["dqn"], tmp_path / "run")
    path = run / "checkpoints" / "step-000000000128.pt"
    saved = read_sealed(path, "checkpoint")
    columns = saved["scheme"]["state"]["workers"][0]["storage"]["contents"]["ring"]["columns"]
    columns["action"] = columns["action"].float()
    save(path, saved)
    with pytest.raises(CheckpointError, match="a rollout must have the columns of the first rollout"):
        train(run, "dqn", target_steps=160, resume=True)
