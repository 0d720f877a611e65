"""Tests of checkpoints that a background thread writes while training continues."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from pytorchrl import Learner, Scheme
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.learner import checkpoints
from pytorchrl.learner.checkpoints import CheckpointFiles
from pytorchrl.learner.files import RunFiles
from pytorchrl.support.threads import Background
from pytorchrl.callbacks import Callback
from tests.unit.learner.test_checkpoints import files, is_equal, make, records, train_to

LONG_S = 60.0
WRITER = "checkpoint writer"


class Gate:
    """Stands in for `checkpoints.save`; a file is not written before `open` is set."""

    def __init__(self, monkeypatch):
        self.open, self.entered = threading.Event(), threading.Event()
        self.num_running = self.most_running = 0
        self._save = checkpoints.save
        monkeypatch.setattr(checkpoints, "save", self)

    def __call__(self, path, value):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.entered.set()
        assert self.open.wait(LONG_S)
        self._save(path, value)
        self.num_running -= 1


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def writers():
    return [thread for thread in threading.enumerate() if thread.name == WRITER]


def train_until(learner, env_steps):
    while learner.env_steps < env_steps:
        learner.step()
        learner._measured.count()


def test_training_continues_while_a_checkpoint_is_written(tmp_path, gate):
    """Check that later updates change neither the file nor the run that is resumed from it."""
    with make(tmp_path / "slow") as learner:
        train_until(learner, 560)  # the checkpoint is due after 300 env steps
        assert gate.entered.wait(LONG_S)
        assert files(tmp_path / "slow") == []
        assert "checkpoint" not in learner.get_metrics()
        gate.open.set()
    found = files(tmp_path / "slow")
    assert len(found) == 1
    with make(tmp_path / "fast") as learner:
        train_until(learner, 330)
    slow, fast = (checkpoints.read(tmp_path / name / "checkpoints" / found[0]) for name in ("slow", "fast"))
    assert is_equal(slow["scheme"]["state"]["algorithm"], fast["scheme"]["state"]["algorithm"])
    again, _ = train_to(tmp_path / "slow", resume=True)
    straight, _ = train_to(tmp_path / "straight")
    assert is_equal(again, straight)
    assert records(tmp_path / "slow") == records(tmp_path / "straight")
    assert not writers()


def test_one_checkpoint_is_written_at_a_time(tmp_path, gate):
    with make(tmp_path) as learner:
        train_until(learner, 330)
        assert gate.entered.wait(LONG_S)
        threading.Timer(0.05, gate.open.set).start()
        before = learner.updates
        learner.save_checkpoint()  # waits for the first file
        assert learner.updates == before
        assert len(files(tmp_path)) == 2
        assert learner.get_metrics()["checkpoint"]["env_steps"] == learner.env_steps
    assert gate.most_running == 1


@pytest.mark.parametrize("end", ["stop", "signal", "error"])
def test_every_end_of_a_run_waits_for_the_file(tmp_path, gate, end):
    def leave(learner):
        threading.Timer(0.05, gate.open.set).start()
        if end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif end == "error":
            raise ZeroDivisionError

    class Leave(Callback):
        def on_step(self, run, info):
            if gate.entered.is_set() and not gate.open.is_set():
                leave(run)
    learner = make(tmp_path, checkpoint_on_exit=False, callbacks=[Leave()] if end != "stop" else [])
    if end == "stop":
        train_until(learner, 330)
        assert gate.entered.wait(LONG_S)
        leave(learner)
        learner.stop()
    else:
        with pytest.raises(SystemExit if end == "signal" else Exception):
            learner.train()
    assert gate.open.is_set()
    assert len(files(tmp_path)) == 1
    assert not writers()
    with make(tmp_path, resume=True) as resumed:
        resumed.start()
        assert 300 <= resumed.env_steps < 400


def test_a_failure_that_is_not_of_the_disk_ends_the_run(tmp_path, monkeypatch):
    def fail(path, value):
        raise TypeError("this cannot be saved")
    monkeypatch.setattr(checkpoints, "save", fail)
    with pytest.raises(TypeError, match="this cannot be saved"):
        make(tmp_path).train()
    assert not writers()


def test_a_callback_for_checkpoints_finds_the_file(tmp_path):
    found = []

    class Upload(Callback):
        def on_checkpoint(self, run):
            found.append(f"step-{run.env_steps:012d}.pt" == files(tmp_path)[0])
    train_to(tmp_path, callbacks=[Upload()])
    assert found == [True] * 4  # after 300, 600, 900 and 1000 env steps


def test_numbers_of_callbacks_are_copied(tmp_path, gate):
    numbers = {"best": 1.0}

    class Mutable(Callback):
        def state(self):
            return numbers
    with make(tmp_path, callbacks=[Mutable()]) as learner:
        train_until(learner, 330)
        assert gate.entered.wait(LONG_S)
        numbers["best"] = 2.0
        gate.open.set()
    saved = checkpoints.read(checkpoints.paths(tmp_path / "checkpoints")[0])["learner"]["callbacks"]
    assert saved == [{"callback": "Mutable", "state": {"best": 1.0}}]


def test_a_background_job_reports_its_error_once():
    background, done = Background("test"), []
    background.wait()
    background.start(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.start(lambda: done.append(torch.zeros(1)))
    background.wait()
    background.wait()
    assert len(done) == 1


def test_a_last_checkpoint_that_is_still_being_written_is_not_written_again(tmp_path, monkeypatch):
    """Check a checkpoint that is due exactly at the end; it is written only while the learner waits for it."""
    written, is_writing, is_awaited = [], threading.Event(), threading.Event()
    write, wait = CheckpointFiles.write, RunFiles.wait

    def slow(self, place, state):
        is_writing.set()
        is_awaited.wait(5.0)
        written.append(place.env_steps)
        return write(self, place, state)

    def watched(self):
        if is_writing.is_set():
            is_awaited.set()
        wait(self)
    monkeypatch.setattr(CheckpointFiles, "write", slow)
    monkeypatch.setattr(RunFiles, "wait", watched)
    scheme = Scheme(*synthetic_agent(4), runtime="threads", seed=1)
    with Learner(scheme, 8, tmp_path, checkpoint_every=8, progress=False, tensorboard=False) as learner:
        learner.train()
    assert written == [8]


def test_a_checkpoint_in_the_background_calls_no_hook(tmp_path):
    class Counts(Callback):
        calls = 0

        def on_checkpoint(self, run):
            self.calls += 1
    counts, scheme = Counts(), Scheme(*synthetic_agent(4), runtime="threads", seed=1)
    with Learner(scheme, 100, tmp_path, progress=False, tensorboard=False, callbacks=[counts]) as learner:
        learner.step()
        learner.save_checkpoint(wait=False)
        assert counts.calls == 0
        learner.save_checkpoint()
        assert counts.calls == 1
