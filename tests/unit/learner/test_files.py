"""Tests of the files that a run writes: their contents, errors, and the state after a failure."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.learner.options import LearnerOptions
from pytorchrl.learner.files import RunFiles
from pytorchrl.files.atomic import put_in_place, read_json


@pytest.fixture
def open_run(fake_scheme, tmp_path):
    """Return a function that locks a run directory and opens the files of a run."""
    opened = []

    def open_(resumed=None):
        files = RunFiles(tmp_path)
        files.lock()
        opened.append(files)
        options = LearnerOptions(target_steps=100, tensorboard=False)
        files.begin(fake_scheme(), {"algorithm": "PPO"}, options, resumed=resumed)
        return files
    yield open_
    for files in opened:
        files.close()


def names(folder):
    return {path.name for path in folder.iterdir() if not path.name.startswith(".lock")}


def test_without_a_directory_nothing_is_written(fake_scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = RunFiles(None)
    files.lock()
    files.begin(fake_scheme(), {}, LearnerOptions(target_steps=100), resumed=None)
    files.record({"env_steps": 1})
    files.checkpoint(1, {"x": 1}, {}, 0.0)
    files.end({"env_steps": 1})
    with pytest.raises(ConfigError, match="save_model needs a log_dir"):
        files.save_model(fake_scheme())
    files.close()
    assert not list(tmp_path.iterdir())
    assert files.last_checkpoint is None


def test_a_run_has_a_description_records_and_a_result(open_run, tmp_path):
    files = open_run()
    for steps in (10, 20):
        files.record({"env_steps": steps, "loss": float("nan")})
    files.end({"env_steps": 20})
    described = json.loads((tmp_path / "run.json").read_text())
    assert (described["recipe"], described["target_steps"], described["seed"]) == ({"algorithm": "PPO"}, 100, 7)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"env_steps": 10, "loss": null}', '{"env_steps": 20, "loss": null}']
    state = {"bytes": (tmp_path / "metrics.jsonl").stat().st_size,
             "sha256": hashlib.sha256((tmp_path / "metrics.jsonl").read_bytes()).hexdigest()}
    assert read_json(tmp_path / "result.json") == {"env_steps": 20, "records": state}


def test_a_resumed_run_has_no_result_yet_and_no_later_records(open_run, tmp_path):
    files = open_run()
    for steps in (10, 20):
        files.record({"env_steps": steps})
    files.checkpoint(20, {}, {"env_steps": 20}, 0.0)
    files.wait()
    files.record({"env_steps": 30})
    files.end({"env_steps": 30})
    files.close()
    files = open_run(files.newest_checkpoint().state.learner)
    assert not (tmp_path / "result.json").exists()
    files.record({"env_steps": 25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["env_steps"] for line in lines] == [10, 20, 25]


def test_damaged_records_are_refused_when_a_run_is_resumed(open_run, tmp_path, caplog):
    files = open_run()
    files.record({"env_steps": 10})
    files.checkpoint(20, {}, {"env_steps": 20}, 0.0)
    files.wait()
    files.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace("10", "11"))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl' differ from those at the checkpoint"):
        files.newest_checkpoint()
    assert caplog.text == ""
    path.unlink()
    resumed = files.newest_checkpoint().state.learner
    assert "metrics.jsonl is missing; new records begin at the checkpoint" in caplog.text
    open_run(resumed).record({"env_steps": 30})
    assert path.read_text() == '{"env_steps": 30}\n'


def test_one_run_at_a_time_uses_a_directory(open_run, tmp_path):
    first, second = open_run(), RunFiles(tmp_path)
    with pytest.raises(ConfigError):
        second.lock()
    first.close()
    first.close()
    second.lock()
    second.close()


def test_a_model_is_complete_or_absent(open_run, fake_scheme, tmp_path):
    files, scheme = open_run(), fake_scheme()
    assert files.save_model(scheme, "best") == str(tmp_path / "best.pt")
    assert (tmp_path / "best.pt").read_bytes() == b"model"
    before = names(tmp_path)

    def save_half(path):
        with put_in_place(Path(path)) as file:
            file.write(b"mo")
            raise OSError("disk full")
    scheme.save_model = save_half
    with pytest.raises(OSError, match="disk full"):
        files.save_model(scheme, "best")
    assert names(tmp_path) == before
    assert (tmp_path / "best.pt").read_bytes() == b"model"


@pytest.mark.parametrize("name", ["", "../model", "a/b", ".hidden", "-x", "a" * 101, "a b", None, 3])
def test_names_outside_of_the_directory_are_refused(open_run, fake_scheme, tmp_path, name):
    files = open_run()
    before = names(tmp_path)
    with pytest.raises(ConfigError, match="model's name"):
        files.save_model(fake_scheme(), name)
    assert names(tmp_path) == before


def test_the_last_checkpoint_is_the_last_one_that_was_written(open_run, tmp_path, caplog):
    files = open_run()
    files.checkpoint(40, {"x": torch.arange(1000)}, {}, 0.0)
    files.wait()
    (path,) = (tmp_path / "checkpoints").iterdir()
    written = dict(files.last_checkpoint)
    assert (written["env_steps"], written["bytes"]) == (40, path.stat().st_size)
    assert torch.load(path, weights_only=True)["scheme"]["x"].tolist() == list(range(1000))
    path.unlink()
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("in the way")
    files.checkpoint(50, {"x": 1}, {}, 0.0)
    files.wait()
    assert files.last_checkpoint == written
    assert "the checkpoint after 50 env steps could not be written" in caplog.text
