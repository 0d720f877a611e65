"""Tests of signals that arrive while a learner starts, trains or evaluates."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import pytest

from pytorchrl.errors import StoppedError
from tests.unit.learner.fake_learners import make, records


def send_at(version, number):
    def on_step(scheme):
        if scheme.version == version:
            os.kill(os.getpid(), number)
    return on_step


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_first_signal_finishes_the_update_saves_and_stops(fake_scheme, tmp_path, number, raised):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    scheme = fake_scheme(on_step=send_at(4, number))
    with pytest.raises(raised) as caught:
        make(scheme, 100, tmp_path, log_every=90).train()
    assert scheme.version == 5
    assert [record["env_steps"] for record in records(tmp_path)] == [50]
    assert [call[0] for call in scheme.calls] == ["start", "save_model", "stop"]
    assert (tmp_path / "model.pt").read_bytes() == b"model"
    assert json.loads((tmp_path / "result.json").read_text())["updates"] == 5
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    if raised is SystemExit:
        assert caught.value.code == 143
    else:
        assert str(caught.value) == f"training was interrupted after 50 env steps; saved in {tmp_path}"


def test_second_signal_ends_immediately_without_saving(fake_scheme, tmp_path):
    def twice(scheme):
        if scheme.version == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
    scheme = fake_scheme(on_step=twice)
    with pytest.raises(KeyboardInterrupt), make(scheme, 100, tmp_path) as learner:
        learner.train()
    assert scheme.version == 4
    assert scheme.calls == [("start", 100)]
    assert not learner.stopped
    with pytest.raises(StoppedError, match="abandoned after a second signal"):
        learner.step()
    assert scheme.version == 4


def test_signal_interrupts_an_update_that_waits_for_data(fake_scheme, tmp_path, monkeypatch):
    monkeypatch.setattr("pytorchrl.learner.learner.GRACE_S", 0.05)

    def wait(scheme):
        if scheme.version == 2:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(30)
    scheme = fake_scheme(on_step=wait)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make(scheme, 100, tmp_path).train()
    assert time.monotonic() - start < 10
    assert [call[0] for call in scheme.calls] == ["start", "save_model", "stop"]


def test_signal_interrupts_the_last_evaluation_and_keeps_the_model(fake_scheme, tmp_path, monkeypatch):
    monkeypatch.setattr("pytorchrl.learner.learner.GRACE_S", 0.05)

    def wait(timeout_s):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(30)
    scheme = fake_scheme()
    scheme.wait_evaluation = wait
    with pytest.raises(KeyboardInterrupt):
        make(scheme, 100, tmp_path, eval_every=100).train()
    assert scheme.calls[-1] == ("stop",)
    assert (tmp_path / "model.pt").exists()


def test_signal_while_starting_saves_nothing(fake_scheme, tmp_path, monkeypatch):
    monkeypatch.setattr("pytorchrl.learner.learner.GRACE_S", 0.05)

    def never_ready():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(30)
    scheme = fake_scheme(on_start=never_ready)
    with pytest.raises(SystemExit):
        make(scheme, 100, tmp_path).train()
    assert [call[0] for call in scheme.calls] == ["start", "stop"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_is_swallowed_while_starting_still_ends_training(fake_scheme, tmp_path, number):
    """Check that a signal ends training even if native code swallows the exception that the signal handler raises."""
    def start():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
            threading.Event().wait(30)
    scheme = fake_scheme(on_start=start)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        make(scheme, 100, tmp_path).train()
    assert (scheme.version, scheme.calls[-1]) == (0, ("stop",))


def test_an_error_after_a_signal_is_logged_and_the_signal_is_raised(fake_scheme, tmp_path, caplog):
    """Check that an error after a signal is logged, the model is saved, and `KeyboardInterrupt` is raised.

    Such errors occur if native code is interrupted, or if Ctrl-C also ends the environments' processes.
    """
    def fail(scheme):
        if scheme.version == 2:
            os.kill(os.getpid(), signal.SIGINT)
            raise SystemError("returned a result with an exception set")
    scheme = fake_scheme(on_step=fail)
    with pytest.raises(KeyboardInterrupt):
        make(scheme, 100, tmp_path).train()
    assert [call[0] for call in scheme.calls] == ["start", "save_model", "stop"]
    assert "returned a result with an exception set" in caplog.text


def test_handlers_installed_by_a_library_while_starting_are_replaced(fake_scheme):
    found = signal.getsignal(signal.SIGTERM)
    scheme = fake_scheme(on_start=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
                         on_step=send_at(1, signal.SIGTERM))
    with pytest.raises(SystemExit):
        make(scheme).train()
    assert signal.getsignal(signal.SIGTERM) == found


def test_training_works_outside_the_main_thread(fake_scheme):
    learner, errors = make(fake_scheme()), []

    def train():
        try:
            learner.train()
        except BaseException as error:  # noqa: BLE001 - checked below
            errors.append(error)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join(10)
    assert (errors, learner.done()) == ([], True)
