"""Check that a signal ends training with a checkpoint, in all sixteen patterns, and that the run continues from it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from pytorchrl import ASYNC, ConfigError, Learner
from pytorchrl.callbacks import Callback
from pytorchrl.learner.learner import checkpoint_within
from pytorchrl.scheme.ledger import LedgerSnapshot

OPTIONS = {"progress": False, "tensorboard": False}


class At(Callback):
    """Calls a function once, after an update."""

    def __init__(self, update, action):
        self._update, self._action = update, action

    def on_step(self, run, info):
        if run.updates >= self._update and self._action is not None:
            action, self._action = self._action, None
            action(run)


def terminate(run):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_continues_from_the_checkpoint_of_a_signal(make_scheme, some_pattern, tmp_path):
    def learner(name, action=None, **options):
        scheme = make_scheme(**some_pattern)
        return Learner(scheme, 300, tmp_path / name, callbacks=[At(5, action)] if action else [], **OPTIONS, **options)
    with pytest.raises(SystemExit) as caught, learner("ended", terminate, checkpoint_on_exit=True) as ended:
        ended.train()
    assert caught.value.code == 143
    assert ended.scheme.ledger()["in_flight"] == 0
    with learner("ended", resume=True) as resumed:
        resumed.start()
        assert (resumed.env_steps, resumed.updates) == (ended.env_steps, ended.updates)
        assert resumed.updates >= 5
        resumed.train()
    LedgerSnapshot(**resumed.ledger).check()
    assert resumed.env_steps >= 300
    if ASYNC in (some_pattern["col_communication"], some_pattern["grad_communication"]):
        return
    with learner("whole", lambda run: run.save_checkpoint()) as whole:
        whole.train()
    assert whole.ledger == resumed.ledger
    states = whole.scheme.acting_state(), resumed.scheme.acting_state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("options", "expected"), [
    ({}, False), ({"checkpoint_on_exit": True}, True), ({"checkpoint_every": 10_000}, True),
    ({"checkpoint_every": 10_000, "checkpoint_on_exit": False}, False)], ids=str)
def test_options_decide_whether_a_signal_writes_a_checkpoint(make_scheme, tmp_path, options, expected):
    learner = Learner(make_scheme(), 600, tmp_path, callbacks=[At(2, terminate)], **OPTIONS, **options)
    with pytest.raises(SystemExit):
        learner.train()
    assert (tmp_path / "model.pt").exists()
    assert any(tmp_path.glob("checkpoints/step-*.pt")) == expected


def test_without_a_checkpoint_the_reason_is_logged_and_the_process_ends(make_scheme, tmp_path, caplog, monkeypatch):
    scheme = make_scheme()
    learner = Learner(scheme, 600, tmp_path, callbacks=[At(2, terminate)], checkpoint_on_exit=True, **OPTIONS)

    def fail(timeout_s, *, uses_queued):
        assert not uses_queued  # after a signal, time is short
        raise RuntimeError("a worker is gone")
    monkeypatch.setattr(scheme, "checkpoint", fail)
    with pytest.raises(SystemExit):
        learner.train()
    assert "no checkpoint was written after the signal: a worker is gone" in caplog.text
    assert learner.stopped
    assert not any(tmp_path.glob("checkpoints/*"))


def test_after_the_grace_period_no_checkpoint_is_tried(caplog):
    checkpoint_within(0.0, pytest.fail)
    assert "no checkpoint was written after the signal: the last update did not end within grace_s" in caplog.text


@pytest.mark.parametrize(("options", "message"), [
    ({"checkpoint_on_exit": True}, "checkpoint_on_exit needs a log_dir"),
    ({"log_dir": "x", "grace_s": 5.0}, "grace_s needs checkpoint_on_exit or checkpoint_every"),
    ({"log_dir": "x", "grace_s": 5.0, "checkpoint_every": 10, "checkpoint_on_exit": False}, "grace_s needs"),
    ({"log_dir": "x", "checkpoint_on_exit": True, "grace_s": 0.0}, "grace_s must be a number > 0"),
])
def test_options_without_effect_are_refused(make_scheme, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Learner(make_scheme(), 600, **options)


def test_a_recorded_run_has_no_checkpoint_on_exit(make_scheme, tmp_path):
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, record=str(tmp_path / "record.jsonl"))
    with pytest.raises(ConfigError, match="leave checkpoint_on_exit out"):
        Learner(scheme, 600, tmp_path / "run", checkpoint_on_exit=True)


def test_a_full_disk_at_the_end_leaves_the_agent_in_memory(make_scheme, tmp_path, monkeypatch, caplog):
    scheme = make_scheme()

    def full(path):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(scheme, "save_model", full)
    with Learner(scheme, 64, tmp_path, **OPTIONS) as learner:
        learner.train()
        monkeypatch.undo()
        assert "the model could not be written: [Errno 28] No space left on device" in caplog.text
        learner.save_model()
    assert (tmp_path / "model.pt").exists()
