"""Damage the files of real runs with the scripts in `benchmarks`, and break saves; see there for all cases."""

from __future__ import annotations

import json

import pytest
import torch

from pytorchrl.configuration import load_config
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.saved_files import parse_json, with_checksum
from pytorchrl.sealed_files import read_sealed, save
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
def test_damage_is_refused_by_name_or_changes_nothing(run_script):
    found = run_script("damage.py", "--cases", "20", "--every", "2")
    assert found["bad"] == []
    assert found["cases"] >= 200
    assert found["outcomes"]["error"] > 50
    assert found["outcomes"]["older"] > 10


@pytest.mark.timeout(600)
def test_broken_saves_leave_the_old_or_the_new_data(run_script):
    found = run_script("broken_saves.py", "--saves", "model", "checkpoint", "metrics", "record", "configuration",
                       "--every", "3")
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
    (tmp_path / "run.json").write_text(json.dumps({"recipe": recipe, "seed": 1}))
    with pytest.raises(ConfigError, match=r"run\.json: lr: nothing can be built from"):
        load_config(tmp_path / "run.json")


def test_a_tensor_without_its_data_is_refused(tmp_path):
    save(tmp_path / "model.pt", {"format": 1, "acting_state": {"all": torch.zeros(1).expand(10**9)}})
    with pytest.raises(CheckpointError, match="1,000,000,000 elements, but only 4 bytes"):
        read_sealed(tmp_path / "model.pt", "model")
