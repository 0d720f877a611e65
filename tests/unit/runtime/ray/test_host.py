"""Tests of the actor that contains a worker, without Ray: warnings, exceptions and early signals reach the caller."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import traceback
import warnings

import pytest

from pytorchrl.errors import WorkerError
from pytorchrl.runtime.base import Outcome
from pytorchrl.runtime.ray.host import Answer, Host
from pytorchrl.support.terminal import get_logger

NAME = "pytorchrl.tests.worker"


class Worker:
    """A worker whose calls log warnings, and that raises what it is told to raise."""

    def __init__(self, begin="begin"):
        get_logger(NAME).info("not a warning")
        self.seen = [begin]

    def work(self, number):
        for count in range(number):
            get_logger(NAME).warning("restart %d", count)
        return number

    def fail(self, error):
        get_logger(NAME).warning("before the failure")
        raise error

    def note(self, value):
        self.seen.append(value)

    def values(self):
        return self.seen


@pytest.fixture
def host():
    """Return a host, whose handler is removed after the test."""
    root = logging.getLogger("pytorchrl")
    before = list(root.handlers)
    yield Host(Worker, {})
    root.handlers[:] = before


def test_warnings_of_a_call_are_logged_at_the_caller(host, caplog):
    assert host.call("work", 0) == 0  # without warnings, the value is returned as it is
    caplog.clear()
    answer = pickle.loads(pickle.dumps(host.call("work", 2)))
    caplog.clear()
    assert isinstance(answer, Answer)
    assert answer.outcome("GWorker 0/CWorker 1") == Outcome("GWorker 0/CWorker 1", 2)
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        (NAME, logging.WARNING, f"GWorker 0/CWorker 1: restart {count}") for count in range(2)]


def test_the_number_of_warnings_of_a_call_is_limited(host):
    records = host.call("work", 80).records
    assert [text for _, _, text in records] == [f"restart {count}" for count in range(30, 80)]


def test_warnings_before_an_exception_come_with_the_exception(host, caplog):
    answer = pickle.loads(pickle.dumps(host.call("fail", ValueError("wrong"))))
    caplog.clear()
    outcome = answer.outcome("CWorker 1")
    assert (type(outcome.error), str(outcome.error)) == (ValueError, "wrong")
    assert caplog.messages == ["CWorker 1: before the failure"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exceptions_that_end_a_program_are_errors_of_the_worker(host, error):
    outcome = pickle.loads(pickle.dumps(host.call("fail", error))).outcome("CWorker 1")
    assert type(outcome.error) is type(error)
    with pytest.raises(WorkerError, match=rf"CWorker 1:? .*{type(error).__name__}\(3?\).* end") as caught:
        outcome.unwrap()
    assert "in fail" in "".join(traceback.format_exception(caught.value))


def test_an_exception_of_a_constructor_is_an_error_of_the_worker():
    host = Host(lambda: sys.exit(2), {})
    assert host.call("work", 1).outcome("CWorker 1").error.code == 2


def test_signals_before_the_first_call_are_kept(host):
    host.signal("note", 1)
    assert host._worker is None or not host._early
    assert host.call("values") == ["begin", 1]
    host.signal("note", 2)
    assert host._worker is None or not host._early
    assert host.call("values") == ["begin", 1, 2]


def test_a_worker_gets_the_umask_of_the_program(monkeypatch):
    before = os.umask(0o077)
    try:
        monkeypatch.setenv("PYTORCHRL_UMASK", str(0o027))
        Host(Worker, {})
        assert os.umask(0o077) == 0o027
    finally:
        os.umask(before)
        logging.getLogger("pytorchrl").handlers.pop()


def test_python_warnings_are_not_records(host):
    """Check that only this library's log is sent: packages of environments warn often, in each worker."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
    assert host.call("work", 0) == 0
