"""Tests of evaluations during training: each result is returned once, and failures are handled."""

from __future__ import annotations

import pytest

from pytorchrl.errors import StoppedError, WorkerLostError
from pytorchrl.learner.evaluations import Evaluations


@pytest.fixture
def scheme(fake_scheme):
    scheme = fake_scheme()
    scheme.settings["on_worker_failure"] = "restart"
    return scheme


def failing(error):
    def fail(*arguments):
        raise error
    return fail


@pytest.mark.parametrize("take", ["poll", "wait"])
def test_a_result_is_returned_once(scheme, take):
    evaluations = Evaluations(scheme)
    assert not getattr(evaluations, take)()
    scheme.step()
    evaluations.start(3)
    assert evaluations.is_running
    assert evaluations.last is None
    assert getattr(evaluations, take)()
    assert not evaluations.is_running
    assert evaluations.last.returns == (1.0,) * 3
    assert not getattr(evaluations, take)()
    assert evaluations.last.returns == (1.0,) * 3


def test_an_unfinished_evaluation_continues(scheme):
    evaluations = Evaluations(scheme)
    evaluations.start(1)
    result = scheme.evaluations.pop()
    assert not evaluations.poll()
    assert evaluations.is_running
    scheme.evaluations.append(result)
    assert evaluations.poll()
    assert evaluations.last is result


def test_results_requested_by_others_are_not_taken(scheme):
    evaluations = Evaluations(scheme)
    scheme.start_evaluation(1)
    assert not evaluations.poll()
    assert not evaluations.wait()
    assert scheme.poll_evaluation().returns == (0.0,)


def test_a_played_evaluation_is_returned_but_not_stored(scheme):
    evaluations = Evaluations(scheme)
    scheme.step()
    assert evaluations.play(2).returns == (1.0, 1.0)
    assert evaluations.last is None
    scheme.wait_evaluation = lambda timeout_s: None
    with pytest.raises(StoppedError):
        evaluations.play(2)


@pytest.mark.parametrize("error", [ValueError("environment broke"), WorkerLostError("died")], ids=repr)
def test_a_failure_is_logged_and_the_next_evaluation_works(scheme, caplog, error):
    evaluations = Evaluations(scheme)
    evaluations.start(1)
    find, scheme.poll_evaluation = scheme.poll_evaluation, failing(error)
    assert not evaluations.poll()
    assert str(error) in caplog.text
    assert not evaluations.is_running
    assert evaluations.last is None
    scheme.poll_evaluation = find
    evaluations.start(1)
    assert evaluations.poll()


def test_a_lost_worker_ends_a_run_if_failures_raise(scheme):
    scheme.settings["on_worker_failure"] = "raise"
    evaluations = Evaluations(scheme)
    evaluations.start(1)
    scheme.poll_evaluation = failing(WorkerLostError("died"))
    with pytest.raises(WorkerLostError, match="died"):
        evaluations.poll()
