"""Tests that no writer follows a symbolic link, and that all writers of whole files use the same helper."""

from __future__ import annotations

import ast
import os
from types import SimpleNamespace

import gymnasium as gym
import pytest

import pytorchrl
from pytorchrl.callbacks import CsvLog
from pytorchrl.cli import main
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.play import video
from pytorchrl.play.dataset import record_dataset
from pytorchrl.training.configuration import save_config
from tests.unit.packaging.source import MODULES, name_of, nodes_of, reads_source

TINY = {"num_envs": 1, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (4,), "target_steps": 256,
        "progress": False, "tensorboard": False, "log_every": 128, "seed": 1}


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    return pytorchrl.train("ppo", "CartPole-v1", log_dir=tmp_path_factory.mktemp("runs") / "run", **TINY)


def command(*arguments):
    assert main([*map(str, arguments)]) == 0


def csv_log(agent, path):
    CsvLog().on_end(SimpleNamespace(log_dir=path.parent), {})


# Name of the file in a run's directory -> function of an agent and the path that writes the file.
WRITERS = {
    "report.html": lambda agent, path: command("report", path.parent),
    "own.html": lambda agent, path: command("report", path.parent, "--out", path),
    "curve.png": lambda agent, path: command("plot", path.parent),
    "own.svg": lambda agent, path: command("plot", path.parent, "-o", path),
    "comparison.png": lambda agent, path: command(
        "compare", f"a={path.parent}", f"b={path.parent}", "-o", path),
    "metrics.csv": csv_log,
    "policy.pt2": lambda agent, path: command(
        "export", path.parent, "--to", "torch", "--checks", "1", "--overwrite"),
    "data.npz": lambda agent, path: record_dataset(agent, path, num_episodes=1, overwrite=True),
    "saved.pt": lambda agent, path: agent.save(path),
    "run.toml": lambda agent, path: save_config(path, "ppo", "CartPole-v1", {}),
}


def test_every_writer_replaces_a_link_and_refuses_a_device(agent, tmp_path):
    for name, write in WRITERS.items():
        for leads_to in ("file", "nothing"):
            victim, path = tmp_path / f"{leads_to} {name}", agent.log_dir / name
            if leads_to == "file":
                victim.write_text("keep")
            path.unlink(missing_ok=True)
            path.symlink_to(victim)
            write(agent, path)
            assert not path.is_symlink(), name
            assert path.stat().st_size > 10, name
            assert (victim.read_text() == "keep") if leads_to == "file" else not victim.exists(), name
    for target in ("/dev/null", os.fspath(tmp_path / "pipe")):
        link = tmp_path / f"link-{os.path.basename(target)}"
        link.symlink_to(target)
        if target != "/dev/null":
            os.mkfifo(target)
        with pytest.raises(OSError, match="is not a regular file"), put_in_place(link):
            pass
        assert main(["report", str(agent.log_dir), "--out", str(link)]) == 2


def test_videos_replace_links(agent, tmp_path, monkeypatch):
    class Recorder(gym.Wrapper):
        """Write files like Gymnasium's recorder."""

        def __init__(self, env, folder, *, episode_trigger, name_prefix, disable_logger):
            super().__init__(env)
            with open(os.path.join(folder, f"{name_prefix}-episode-0.mp4"), "w") as file:
                file.write("film")
    monkeypatch.setattr(video, "_Recorder", Recorder)
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _name: True)
    victim, folder = tmp_path / "victim", tmp_path / "films"
    victim.write_text("keep")
    folder.mkdir()
    (folder / "CartPole-v1-episode-0.mp4").symlink_to(victim)
    video.record_video(agent, folder, num_episodes=1)
    assert victim.read_text() == "keep"
    assert (folder / "CartPole-v1-episode-0.mp4").read_text() == "film"
    (agent.log_dir / "videos").symlink_to(folder)
    assert main(["enjoy", str(agent.log_dir), "--render", "video"]) == 2
    (agent.log_dir / "videos").unlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "monitor_train_x.csv"])
def test_a_run_appends_to_no_link(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"is a link, and records would be appended"):
        pytorchrl.train("ppo", "CartPole-v1", log_dir=tmp_path / "run", **TINY)
    assert not (tmp_path / "victim").exists()


# Modules that open files for writing themselves -> why. Mode "x" creates a file, and never follows a link.
WRITES = {"pytorchrl.scheme.recording.record": "creates a new file", "pytorchrl.files.atomic": "is the helper",
          "pytorchrl.scheme.supervision.bad_batches": "creates new files",
          "pytorchrl.files.run_directory": "creates a new file"}


@reads_source
def test_files_are_written_by_the_helper():
    found = set()
    for path in MODULES:
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = [*node.args[:2], *(key.value for key in node.keywords if key.arg == "mode")]
            mode = next((word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)
                         and set(word.value) <= set("rwaxbt+")), "")
            if called in ("write_text", "write_bytes") or (called == "open" and set(mode) & set("wax")):
                found.add(name_of(path))
    # These writers get the path of a temporary file.
    assert found - {"pytorchrl.export.formats", "pytorchrl.play.dataset"} == set(WRITES)
