"""Tests of the directory of a run: errors, renaming, numbering, and the permissions of its files."""

from __future__ import annotations

import os
import re
import stat
import threading

import pytest

import pytorchrl
from pytorchrl.files.atomic import read_json
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.analysis.plotting import read_curve
from pytorchrl.learner.reporting import Recorder, write_json
from pytorchrl.files.run_directory import Lock, prepare_log_dir


@pytest.fixture
def umask_027():
    """Set a umask that lets the group read files and denies all access to others."""
    found = os.umask(0o027)
    yield
    os.umask(found)


def test_log_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a directory, got the file"):
        prepare_log_dir(tmp_path / "file", overwrite=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_log_dir(tmp_path / "file" / "below", overwrite=False)


def test_log_dir_without_write_permission_is_refused(tmp_path, monkeypatch):
    # A superuser may write everywhere, so the test simulates a lack of permission.
    def refuse(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written: .*Permission denied"):
        prepare_log_dir(tmp_path, overwrite=False)


def test_log_dir_with_nul_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_log_dir(f"{tmp_path}/a\0b", overwrite=False)


@pytest.mark.parametrize("name", ["a b", "läuft", "日本", "a/b/c"])
def test_log_dir_may_have_any_valid_name(tmp_path, name):
    path = prepare_log_dir(tmp_path / name, overwrite=False)
    assert path.is_dir()
    assert list(path.iterdir()) == []


def test_an_earlier_run_is_refused_or_renamed_never_removed(tmp_path):
    run = tmp_path / "run"
    for content in ("first", "second"):
        write_json(prepare_log_dir(run, overwrite=True) / "run.json", {"name": content})
    with pytest.raises(ConfigError, match="already contains a run"):
        prepare_log_dir(run, overwrite=False)
    assert read_json(run / "run.json") == {"name": "second"}
    assert read_json(tmp_path / "run.1" / "run.json") == {"name": "first"}
    prepare_log_dir(run, overwrite=True)
    assert read_json(tmp_path / "run.2" / "run.json") == {"name": "second"}


def test_overwrite_keeps_files_that_are_not_part_of_a_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    prepare_log_dir(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_records_do_not_follow_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="metrics"):
        Recorder(tmp_path, tensorboard=False)
    assert victim.read_text() == "mine"


@pytest.mark.usefixtures("umask_027")
def test_all_files_of_a_run_have_the_mode_of_the_umask(tmp_path):
    pytorchrl.train("ppo", "CartPole-v1", log_dir=tmp_path / "run", target_steps=128, num_envs=2, num_steps=32,
                    num_epochs=1,
                    checkpoint_every=64, progress=False, seed=3)
    paths = sorted((tmp_path / "run").rglob("*"))
    modes = {str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode)) for path in paths}
    assert {"run/run.json", "run/metrics.jsonl", "run/result.json", "run/model.pt"} <= set(modes)
    assert {os.path.dirname(name) for name in modes} == {"run", "run/checkpoints"}
    folders = {"run/checkpoints"}
    assert {name: mode for name, mode in modes.items() if mode != ("0o750" if name in folders else "0o640")} == {}


@pytest.mark.parametrize("runs", ["runs/", "a/b/runs/", "runs//"])
def test_a_directory_of_runs_numbers_them(tmp_path, monkeypatch, runs):
    monkeypatch.chdir(tmp_path)
    made = [prepare_log_dir(runs, run_name="ppo-CartPole-v1") for _ in range(3)]
    assert [path.name for path in made] == ["ppo-CartPole-v1-1", "ppo-CartPole-v1-2", "ppo-CartPole-v1-3"]
    assert {path.parent for path in made} == {tmp_path.joinpath(runs).relative_to(tmp_path)}
    assert all(path.is_dir() for path in made)
    assert prepare_log_dir(runs, run_name="a2c-CartPole-v1").name == "a2c-CartPole-v1-1"
    assert prepare_log_dir(runs).name == "run-1"


def test_a_numbered_run_follows_the_greatest_number(tmp_path):
    for name in ("ppo-2", "ppo-10", "ppo-x", "sac-20"):
        (tmp_path / name).mkdir()
    (tmp_path / "ppo-11").write_text("not a run")
    assert prepare_log_dir(f"{tmp_path}/", run_name="ppo").name == "ppo-12"


@pytest.mark.parametrize(("name", "directory"), [
    ("ppo-ALE/Pong-v5", "ppo-ALE-Pong-v5-1"), ("ppo-../../etc", "ppo-..-..-etc-1"), ("../..", "run-1"),
    ("a2c-<lambda>", "a2c-lambda-1")])
def test_the_name_of_a_numbered_run_stays_in_its_directory(tmp_path, name, directory):
    assert prepare_log_dir(f"{tmp_path}/", run_name=name) == tmp_path / directory


def test_runs_that_start_simultaneously_get_different_directories(tmp_path):
    made, start = [], threading.Barrier(8)

    def make():
        start.wait()
        made.extend(prepare_log_dir(f"{tmp_path}/runs/", run_name="ppo") for _ in range(20))
    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in made) == sorted(f"ppo-{number}" for number in range(1, 161))


@pytest.mark.parametrize("option", ["overwrite", "resume"])
def test_options_for_an_earlier_run_require_its_directory(tmp_path, option):
    runs = f"{tmp_path}/runs/"
    with pytest.raises(ConfigError, match=rf"{option}=True needs the directory of one run.*name the run, "
                                          r"for example '.*runs/a'"):
        prepare_log_dir(runs, **{option: True})
    assert not (tmp_path / "runs").exists()
    for number in (1, 2):
        write_json(prepare_log_dir(runs) / "run.json", {})
        os.utime(tmp_path / f"runs/run-{number}/run.json", (number, number))
    with pytest.raises(ConfigError, match=r"for example the newest, '.*runs/run-2'"):
        prepare_log_dir(runs, **{option: True})


def test_the_directory_of_a_run_is_not_a_directory_of_runs(tmp_path):
    """Check that the directory of a run is recognized despite a trailing slash, which a shell's tab completion adds."""
    run = tmp_path / "run"
    write_json(prepare_log_dir(run) / "run.json", {"name": "first"})
    with pytest.raises(ConfigError, match="already contains a run"):
        prepare_log_dir(f"{run}/")
    assert prepare_log_dir(f"{run}/", overwrite=True) == run
    assert read_json(tmp_path / "run.1" / "run.json") == {"name": "first"}


def test_train_reports_the_directory_of_a_numbered_run(tmp_path, capsys):
    tiny = {"target_steps": 64, "num_envs": 2, "num_steps": 32, "num_epochs": 1, "tensorboard": False, "seed": 3}
    for number in (1, 2):
        agent = pytorchrl.train("ppo", "CartPole-v1", log_dir=f"{tmp_path}/runs/", progress=number == 2, **tiny)
        run = tmp_path / f"runs/ppo-CartPole-v1-{number}"
        assert agent.log_dir == run
        assert agent.summary["log_dir"] == str(run)
        assert (f"saved in {run}" in capsys.readouterr().err) == (number == 2)
        assert (run / "monitor_train_GWorker_0_CWorker_0.csv").exists()
        assert pytorchrl.load(run).log_dir == run
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"ppo-CartPole-v1-1", "ppo-CartPole-v1-2"}


def test_a_refused_run_leaves_no_directory(tmp_path):
    with pytest.raises(ConfigError, match="col_fraction_workers"):
        pytorchrl.train("ppo", "CartPole-v1", log_dir=f"{tmp_path}/runs/", target_steps=64, col_fraction_workers=-1.0)
    assert list(tmp_path.iterdir()) == []


def test_log_dir_is_none_without_a_directory():
    agent = pytorchrl.train("ppo", "CartPole-v1", target_steps=64, num_envs=2, num_steps=32, progress=False)
    assert agent.log_dir is agent.summary["log_dir"] is None


def test_the_refusal_of_an_earlier_run_names_its_directory_of_runs(tmp_path):
    run = prepare_log_dir(f"{tmp_path}/runs/")
    write_json(run / "run.json", {})
    message = f"such as '{re.escape(str(tmp_path))}/runs/', in which"
    with pytest.raises(ConfigError, match=message):
        prepare_log_dir(run)
    with pytest.raises(ConfigError, match=message):
        prepare_log_dir(run.rename(tmp_path / "mine"))


def test_a_file_is_refused_with_its_directory(tmp_path):
    model = tmp_path / "model.pt"
    model.touch()
    with pytest.raises(CheckpointError, match=rf"model\.pt' is a file; name the directory of the run, '{tmp_path}'"):
        pytorchrl.load(model)


def test_a_directory_of_runs_is_refused_with_its_newest_run(tmp_path):
    """Check that functions that read one run refuse a directory of runs and name its newest run."""
    runs = tmp_path / "runs"
    runs.mkdir()
    for read in (pytorchrl.load, lambda path: read_curve(path, "env_steps", "return_mean")):
        with pytest.raises((CheckpointError, ConfigError), match=r"runs' contains no run: (run\.json|metrics\.jsonl) "
                                                                 r"is missing"):
            read(runs)
    for number in (1, 2):
        write_json(prepare_log_dir(f"{runs}/") / "run.json", {})
        os.utime(runs / f"run-{number}/run.json", (number, number))
    for read in (pytorchrl.load, lambda path: read_curve(path, "env_steps", "return_mean")):
        with pytest.raises((CheckpointError, ConfigError), match=r"is a directory of runs; name one of them, for "
                                                                 r"example the newest, '.*runs/run-2'"):
            read(runs)


def test_the_next_run_removes_temporary_files_of_a_killed_run(tmp_path):
    ended = 2**22 + 1  # above the largest process id of Linux
    alive = f".model.pt.{os.getpid()}"
    kept = [".gitignore", alive, f".notes.{ended}", f".other.pt.{ended}", ".result.json", "model.pt"]
    for name in [f".result.json.{ended}", f".run.json.{ended}", f".probe.{ended}", f".model.pt.{ended}", *kept]:
        if name.startswith(".other"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text("")
    Lock(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
