"""Test jobs in a background thread."""

from __future__ import annotations

import threading

import pytest

from pytorchrl.support import threads
from pytorchrl.support.threads import Background


def test_a_long_wait_for_a_job_is_logged_and_its_result_is_kept(monkeypatch):
    monkeypatch.setattr(threads, "_LOG_INTERVAL_S", 0.01)
    is_logged, done = threading.Event(), []
    monkeypatch.setattr(threads.logger, "warning", lambda text, name: (done.append(text % name), is_logged.set()))
    background = Background("writer")
    background.start(lambda: done.append(is_logged.wait(10)))
    background.wait()
    assert done[0] == "still waiting for the thread 'writer'"
    assert done[-1] is True


def test_the_error_of_a_job_is_raised_once():
    background = Background("writer")
    background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()
