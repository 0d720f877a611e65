"""Tests of checkpoint files: they are complete or absent, damage is detected, and a killed run can be resumed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import time

import pytest
import torch

import pytorchrl as prl
from pytorchrl.learner import checkpoints
from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear
from pytorchrl.cli import main
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.run_directory import Lock
from pytorchrl.files.tensors import save
from pytorchrl.agent.data import Evaluation
from tests.conftest import process_environment


def make_scheme(seed=1, size=16, **settings):
    envs = VecEnv.create_factory("CartPole-v1", None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,),
                                         normalize_obs=True)
    algo = PPO.create_factory(num_epochs=2, num_mini_batch=1, lr=linear(1e-3, 0.0))
    return Scheme(algo, actor, GAEBuffer.create_factory(size), envs, envs,
                  **{"seed": seed, "runtime": "threads", **settings})


def make(log_dir, target_steps=1000, scheme=None, **options):
    return Learner(scheme or make_scheme(), target_steps, log_dir, **{
        "progress": False, "tensorboard": False, "checkpoint_every": 300, "log_every": 50, **options})


def records(path):
    """Return the learning curve without values that depend on time or on the process."""
    kept = ("env_steps", "updates", "return_mean", "return_episodes", "length_mean", "policy_lag", "ledger",
            "algorithm")
    return [{name: record[name] for name in kept}
            for record in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())]


def files(path):
    return [file.name for file in checkpoints.paths(path / "checkpoints")]


def train_to(path, **options):
    with make(path, **options) as learner:
        summary = learner.train()
        return learner.scheme.acting_state(), summary


def interrupt_after(path, env_steps, **options):
    """Train for `env_steps` env steps, and close the learner before the run reaches its target."""
    with make(path, **options) as learner:
        while learner.env_steps < env_steps:
            learner.step()


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    state, straight = train_to(tmp_path / "straight")
    # Each step was used in both epochs, so training ended after the last epoch of a rollout.
    assert straight["ledger"]["consumed"] == 2 * straight["ledger"]["collected"]
    interrupt_after(tmp_path / "cut", 750)
    # The interrupted run has records that are newer than its latest checkpoint.
    assert max(record["env_steps"] for record in records(tmp_path / "cut")) > 680
    with make(tmp_path / "cut", resume=True) as learner:
        learner.start()
        assert 600 <= learner.env_steps < 680
        assert max(record["env_steps"] for record in records(tmp_path / "cut")) <= learner.env_steps
        resumed = learner.train()
        assert learner.get_metrics()["checkpoint"]["env_steps"] == learner.env_steps
        again = learner.scheme.acting_state()
    assert all(torch.equal(again[name], state[name]) for name in state)
    for name in ("env_steps", "updates", "return_mean", "return_episodes", "policy_lag", "ledger"):
        assert resumed[name] == straight[name], name
    assert records(tmp_path / "cut") == records(tmp_path / "straight")


def test_records_and_evaluations_do_not_affect_training(tmp_path):
    """Check that the intervals of records and evaluations do not affect the trained parameters."""
    state, _ = train_to(tmp_path / "a", target_steps=450)
    other, _ = train_to(tmp_path / "b", target_steps=450, log_every=37, eval_every=100, eval_episodes=1)
    assert all(torch.equal(other[name], state[name]) for name in state)


# Each line of standard input names the directory of a run. The script forks for each run, so that packages are
# imported only once.
SCRIPT = """
import os
import sys
import pytorchrl as prl
for name in prl.__all__:
    getattr(prl, name)
for folder in map(str.strip, sys.stdin):
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)
        prl.train("ppo", "CartPole-v1", target_steps=int(sys.argv[1]), log_dir=folder, seed=3, num_envs=2, num_steps=32,
                  num_epochs=2, checkpoint_every=320, resume=True, progress=False, tensorboard=False, num_threads=1)
        sys.exit()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_killed_repeatedly_equals_the_uninterrupted_one(forked_python, tmp_path):
    """Check that a run that is killed at arbitrary moments, even while it writes, ends like an uninterrupted run."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    target = 1600

    def start(name):
        print(tmp_path / name, file=server.stdin, flush=True)
        return int(server.stdout.readline())
    rng, kills = random.Random(0), 0
    with subprocess.Popen([forked_python, script, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env=process_environment()) as server:
        while kills < 3:
            before = files(tmp_path / "killed")
            pid = start("killed")
            deadline = time.monotonic() + 60
            while files(tmp_path / "killed") == before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.05))
            with contextlib.suppress(ProcessLookupError):  # the run has just ended
                os.kill(pid, signal.SIGKILL)
            code = int(server.stdout.readline())
            assert code in (0, -signal.SIGKILL)
            if code == 0:
                break
            kills += 1
        assert kills
        for name in ("killed", "straight"):
            start(name)
            assert int(server.stdout.readline()) == 0
    states = [prl.load(tmp_path / name).acting_state for name in ("killed", "straight")]
    assert all(torch.equal(*(state[name] for state in states)) for name in states[0])
    ends = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("killed", "straight")]
    assert ends[0]["ledger"] == ends[1]["ledger"]
    assert not list((tmp_path / "straight" / "checkpoints").glob(".*"))


def test_the_two_newest_checkpoints_are_kept(tmp_path):
    train_to(tmp_path)
    kept = files(tmp_path)
    assert len(kept) == 2
    assert kept == sorted(kept, reverse=True)
    steps = [int(name[5:-3]) for name in kept]
    assert steps[0] >= 1000
    assert 900 <= steps[1] < 1000


def test_a_finished_run_can_be_extended(tmp_path):
    state, summary = train_to(tmp_path)
    with make(tmp_path, resume=True) as learner:
        assert learner.train()["env_steps"] == summary["env_steps"]
        assert torch.equal(learner.scheme.acting_state()["all"], state["all"])
    with make(tmp_path, target_steps=1300, resume=True) as learner:
        learner.start()
        assert json.loads((tmp_path / "run.json").read_text())["target_steps"] == 1300
        assert not (tmp_path / "result.json").exists()  # the result of the finished run is deleted
        assert learner.train()["env_steps"] >= 1300
    assert json.loads((tmp_path / "result.json").read_text())["env_steps"] >= 1300


def test_rates_of_a_resumed_run_exclude_the_earlier_run(tmp_path):
    """Check that the rate of a resumed run does not depend on the duration of the run before its checkpoint."""
    interrupt_after(tmp_path, 350)
    (path,) = checkpoints.paths(tmp_path / "checkpoints")
    checkpoint = checkpoints.read(path)
    checkpoint["learner"]["seconds"] = 1e6
    save(path, checkpoint)
    with make(tmp_path, resume=True) as learner:
        learner.start()
        first, start = learner.env_steps, time.perf_counter()
        for _ in range(20):
            learner.step()
        metrics = learner.get_metrics()
        assert metrics["env_steps_per_s"] >= 0.1 * (metrics["env_steps"] - first) / (time.perf_counter() - start)
        assert metrics["seconds"] > 1e6


def test_every_number_of_a_saved_learner_is_checked(tmp_path):
    interrupt_after(tmp_path, 350)
    (path,) = checkpoints.paths(tmp_path / "checkpoints")
    checkpoint = checkpoints.read(path)
    checkpoint["learner"]["seconds"] = float("nan")  # a number that is not finite must not end the check
    checkpoint["learner"]["means"] = {
        "sums": {"loss": torch.zeros(2)}, "counts": {"loss": 1}, "taken": {}}
    save(path, checkpoint)
    with pytest.raises(CheckpointError, match="not contain the state of a run"), make(tmp_path, resume=True) as learner:
        learner.start()


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "no archive"])
def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path, caplog, damage):
    train_to(tmp_path)
    newest, older = checkpoints.paths(tmp_path / "checkpoints")
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes({"flipped": raw, "cut": raw[:-100], "emptied": b"", "no archive": b"checkpoint" * 1000}[damage])
    with caplog.at_level(logging.WARNING), make(tmp_path, resume=True) as learner:
        learner.start()
        assert learner.env_steps == int(older.name[5:-3])
    assert newest.name in caplog.text
    # The damaged file is renamed. Otherwise, a resumed run could mistake it for its newest checkpoint.
    assert [path.name for path in newest.parent.iterdir() if path != older] == [f"{newest.name}.damaged"]


def test_every_kind_of_damage_is_detected(tmp_path):
    train_to(tmp_path, target_steps=350)
    newest = checkpoints.paths(tmp_path / "checkpoints")[0]
    raw, rng = newest.read_bytes(), random.Random(1)
    good = checkpoints.read(newest)
    for _ in range(100):
        damaged = bytearray(raw)
        damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        newest.write_bytes(damaged)
        try:
            found = checkpoints.read(newest)
        except CheckpointError:
            continue
        assert is_equal(found, good)  # only damage to the padding in the file may go undetected


def is_equal(one, other):
    """Return whether two nested states are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_run_with_only_damaged_checkpoints_is_not_restarted(tmp_path):
    train_to(tmp_path)
    for path in checkpoints.paths(tmp_path / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read .*overwrite=True"):
        make(tmp_path, resume=True)


def test_resume_starts_a_new_run_if_there_is_none(tmp_path):
    with make(tmp_path / "new", resume=True, target_steps=100) as learner:
        assert learner.train()["env_steps"] >= 100


def test_a_run_without_checkpoints_is_renamed_and_restarted(tmp_path, caplog):
    interrupt_after(tmp_path / "run", 100)
    with caplog.at_level(logging.WARNING), make(tmp_path / "run", resume=True, target_steps=100) as learner:
        learner.train()
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()
    assert "had no checkpoint" in caplog.text


def test_nothing_in_a_file_is_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)
    train_to(tmp_path / "run", target_steps=350)
    for path in checkpoints.paths(tmp_path / "run" / "checkpoints"):
        save(path, {"scheme": Payload(), "learner": {}})
    with pytest.raises(CheckpointError):
        make(tmp_path / "run", resume=True)
    assert not (tmp_path / "executed").exists()


def test_resuming_with_other_settings_is_refused(tmp_path):
    train_to(tmp_path, target_steps=350)
    with pytest.raises(CheckpointError, match="col_execution was 'Central', now it is 'Parallel'"):
        make(tmp_path, scheme=make_scheme(num_col_workers=2), resume=True)


@pytest.mark.parametrize(("options", "message"), [
    ({"checkpoint_every": 100}, "checkpoint_every needs a log_dir"), ({"resume": True}, "resume=True needs a log_dir"),
    ({"log_dir": "run", "resume": True, "overwrite": True}, "without overwrite=True"),
    ({"checkpoint_every": 0}, "checkpoint_every"),
])
def test_options_without_effect_are_refused(fake_scheme, options, message):
    with pytest.raises(ConfigError, match=message):
        Learner(fake_scheme(), 100, progress=False, **options)


def test_a_recorded_run_has_no_checkpoints(tmp_path):
    with pytest.raises(ConfigError, match="leave checkpoint_every out"):
        make(tmp_path, scheme=make_scheme(record=str(tmp_path / "record")))


def test_no_checkpoints_are_written_by_default(tmp_path):
    train_to(tmp_path, checkpoint_every=None, target_steps=300)
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_disk_does_not_end_a_run(tmp_path, caplog, monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", full)
    with caplog.at_level(logging.WARNING), make(tmp_path, target_steps=650) as learner:
        while not learner.done():
            learner.step()
        assert "checkpoint" not in learner.get_metrics()
    assert caplog.text.count("could not be written: [enforce fail") == 2  # the run tried to write a checkpoint twice
    assert list((tmp_path / "checkpoints").iterdir()) == []
    monkeypatch.undo()
    # The directory has no checkpoint, so it is renamed and a new run starts from the beginning.
    with make(tmp_path, resume=True, target_steps=100) as learner:
        learner.train()
    renamed = tmp_path.with_name(f"{tmp_path.name}.1")
    assert records(tmp_path)[0]["env_steps"] < 200 < 600 < records(renamed)[-1]["env_steps"]


def test_files_of_a_killed_process_are_removed(tmp_path):
    interrupt_after(tmp_path, 350)
    directory = tmp_path / "checkpoints"
    for name in (f".step-000000000600.pt.{os.getpid()}", ".step-000000000900.pt.1"):
        (directory / name).write_bytes(b"half of it")
    (tmp_path / f".run.json.{os.getpid()}").write_bytes(b"half of it")
    train_to(tmp_path, resume=True)
    assert sorted(path.name for path in directory.iterdir()) == sorted(files(tmp_path))
    assert not list(tmp_path.glob(".run.json.*"))


def test_two_runs_cannot_use_one_directory(tmp_path):
    train_to(tmp_path, target_steps=350)
    first, second = (make(tmp_path, resume=True) for _ in range(2))
    first.start()
    with pytest.raises(ConfigError, match="is in use by another run"):
        second.start()
    first.stop()
    Lock(tmp_path).close()
    assert second.train()["env_steps"] >= 1000
    second.stop()


def test_a_learner_resumes_from_a_checkpoint_that_was_written_after_it_was_built(tmp_path):
    train_to(tmp_path / "run", target_steps=350)
    early = make(tmp_path / "run", resume=True, target_steps=1300)
    train_to(tmp_path / "run", resume=True)
    between = files(tmp_path / "run")
    early.start()
    assert f"step-{early.env_steps:012d}.pt" == between[0]
    assert early.env_steps >= 1000
    early.train()
    assert set(files(tmp_path / "run")) != set(between)
    assert all(int(name[5:-3]) >= 1000 for name in files(tmp_path / "run"))
    state = early.scheme.acting_state()
    early.stop()
    straight, _ = train_to(tmp_path / "straight", target_steps=350)
    for target_steps in (1000, 1300):
        straight, _ = train_to(tmp_path / "straight", resume=True, target_steps=target_steps)
    assert all(torch.equal(straight[name], state[name]) for name in state)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_began_after_a_learner_was_built_is_not_overwritten(tmp_path, resume):
    early = make(tmp_path, resume=resume)
    train_to(tmp_path, target_steps=250, checkpoint_every=None)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"another run has used log_dir .* since this learner was built"):
        early.train()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    with make(tmp_path, overwrite=True, target_steps=100) as learner:  # the lock has been released
        learner.train()


def test_a_checkpoint_that_another_run_removes_is_not_taken_for_a_damaged_one(tmp_path, caplog, monkeypatch):
    train_to(tmp_path, target_steps=650)
    newest, older = checkpoints.paths(tmp_path / "checkpoints")

    def read_too_late(path):
        path.unlink(missing_ok=True)
        raise CheckpointError("there is no such file")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read", read_too_late)
        assert checkpoints.newest(tmp_path / "checkpoints") is None
    assert caplog.text == ""
    assert not newest.exists()
    assert not older.exists()


def test_a_run_can_be_resumed_from_the_command_line(tmp_path, capsys):
    command = ["train", "ppo", "--env", "CartPole-v1", "--num-envs", "2", "--num-steps", "16", "--log-dir",
               str(tmp_path / "run"),
               "--num-epochs", "2", "--checkpoint-every", "200", "--resume", "--no-progress", "--json"]
    assert main([*command, "--target-steps", "300"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main([*command, "--target-steps", "600"]) == 0
    second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert second["env_steps"] >= 600
    assert second["updates"] > first["updates"]
    assert second["seed"] == first["seed"]  # the resumed run has the seed that the first run drew
    assert main([*command, "--target-steps", "600", "--lr", "0.1"]) == 2
    assert "lr was" in capsys.readouterr().err


def evaluated_at(learner):
    """Return the list of env steps at which the learner starts evaluations; each evaluation ends immediately."""
    steps = []
    learner.scheme.start_evaluation = lambda num_episodes, timeout_s: steps.append(learner.env_steps)
    learner.scheme.poll_evaluation = lambda: Evaluation(0, (1.0,), (1,))
    return steps


def test_a_resumed_run_evaluates_when_the_uninterrupted_one_does(tmp_path):
    def train(name, until, **options):
        scheme = make_scheme(size=8)
        with make(tmp_path / name, scheme=scheme, eval_every=250, eval_episodes=1, **options) as learner:
            steps = evaluated_at(learner)
            while learner.scheme.env_steps < until:  # the learner counts steps only when a record may be due
                learner.step()
        return steps
    straight = train("straight", 990)
    assert [step // 250 for step in straight] == [1, 2, 3]
    assert train("cut", 700) == straight[:2]  # the last checkpoint is written after 600 env steps
    assert train("cut", 990, resume=True) == straight[2:]
