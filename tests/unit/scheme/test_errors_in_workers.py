"""Check that an error in a worker is raised in the user's next call, with its cause, and that all workers stop."""

from __future__ import annotations

import itertools
import threading
import time
import traceback

import pytest
import torch

from pytorchrl import ASYNC, SYNC, VecEnv
from pytorchrl.envs.testing import CountingEnv, FaultyEnv
from pytorchrl.errors import EnvError, NonFiniteUpdateError, StartTimeoutError, WorkerLostError
from tests.unit.scheme.conftest import chessboard

EXECUTIONS = {
    f"{'parallel' if workers > 1 else 'central'}-{'async' if communication is ASYNC else 'sync'}": {
        "num_col_workers": workers, "col_communication": communication}
    for workers, communication in itertools.product((1, 2), (SYNC, ASYNC))
}


def _step_on(scheme):
    """Call `scheme.step` often enough for every injected fault to occur."""
    for _ in range(1000):
        scheme.step()


def _assert_raises_faulty(scheme, fault):
    with pytest.raises(EnvError, match=f"faulty {fault}") as caught:
        _step_on(scheme)
    text = "".join(traceback.format_exception(caught.value))
    assert "RuntimeError" in text
    assert "testing.py" in text, "the traceback ends where the environment raised"
    _assert_stops_in_balance(scheme)


def _assert_stops_in_balance(scheme):
    start = time.monotonic()
    ledger = scheme.stop()
    assert time.monotonic() - start < 10
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    return ledger


@pytest.mark.every(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS.keys())
@pytest.mark.parametrize("num_grad_workers", [1, 2])
@pytest.mark.parametrize(("fault", "at"), [("step", 37), ("reset", 4)])
def test_a_fault_of_an_environment_is_raised(make_scheme, execution, num_grad_workers, fault, at):
    """Check faults after many steps or resets, for each kind of collection, with local and remote gradient workers.

    A restarted environment fails in the same way, until no restarts remain and the error is raised.
    """
    scheme = make_scheme(FaultyEnv, {"fault": fault, "at": at, "episode_length": 5}, num_grad_workers=num_grad_workers,
                         **execution)
    _assert_raises_faulty(scheme, fault)


class WorksOnce:
    """A function that builds a working environment for the probe, and raises an error in later calls."""

    def __init__(self):
        self._made = itertools.count()

    def __call__(self):
        if next(self._made):
            raise RuntimeError("faulty constructor")
        return CountingEnv()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS.keys())
@pytest.mark.parametrize("num_grad_workers", [1, 2])
def test_a_fault_of_a_constructor_is_raised(make_scheme, execution, num_grad_workers):
    scheme = make_scheme(WorksOnce(), num_grad_workers=num_grad_workers, **execution)
    start = time.monotonic()
    with pytest.raises(EnvError, match="faulty constructor"):
        scheme.step()
    assert time.monotonic() - start < 3
    scheme.stop()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("execution", "grad_communication"), chessboard(EXECUTIONS, (SYNC, ASYNC)))
def test_an_error_arrives_soon(make_scheme, execution, grad_communication):
    raised_at, execution = [], EXECUTIONS[execution]

    class RaisesLater(CountingEnv):
        def step(self, action):
            if self._num_steps >= 50:
                raised_at.append(time.monotonic())
                raise RuntimeError("later")
            return super().step(action)
    scheme = make_scheme(RaisesLater, queue_size=1, grad_communication=grad_communication, **execution) \
        if execution["col_communication"] is ASYNC else make_scheme(
            RaisesLater, grad_communication=grad_communication, **execution)
    with pytest.raises(EnvError, match="later"):
        _step_on(scheme)
    assert time.monotonic() - min(raised_at) < 10  # a second on an idle machine


@pytest.mark.parametrize("num_grad_workers", [1, 2])
@pytest.mark.parametrize("col_communication", [SYNC, ASYNC])
def test_a_killed_collector_is_reported(make_scheme, all_collectors, col_communication, num_grad_workers):
    scheme = make_scheme(num_col_workers=2, col_communication=col_communication, num_grad_workers=num_grad_workers,
                         on_worker_failure="raise")
    scheme.step()
    _, handle = all_collectors(scheme)[0]
    handle.runtime.kill(handle)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="CWorker 1"):
        _step_on(scheme)
    assert time.monotonic() - start < 5
    _assert_stops_in_balance(scheme)


@pytest.mark.parametrize("grad_communication", [SYNC, ASYNC])
def test_a_killed_gradient_worker_is_reported(make_scheme, grad_communication):
    scheme = make_scheme(num_grad_workers=2, grad_communication=grad_communication, on_worker_failure="raise")
    scheme.step()
    handle = scheme.update_worker.remote_workers[1]
    handle.runtime.kill(handle)
    with pytest.raises(WorkerLostError, match="GWorker 2"):
        _step_on(scheme)
    _assert_stops_in_balance(scheme)


def test_one_failing_rank_does_not_block_the_others(make_scheme):
    """Check that the failure of one rank interrupts the other rank, which waits in an all-reduce."""
    made = itertools.count()

    def second_worker_fails():  # call 0 is the probe; calls 1 and 2 are made by the workers
        return FaultyEnv("step", at=30 if next(made) == 2 else 10**6)
    scheme = make_scheme(envs=VecEnv.create_factory(second_worker_fails, on_env_error="raise"), num_grad_workers=2,
                         distribute_gradients=True)
    with pytest.raises(EnvError, match="faulty step"):
        _step_on(scheme)
    _assert_stops_in_balance(scheme)


def test_non_finite_updates_are_not_made(make_scheme):
    scheme = make_scheme(num_grad_workers=2)
    scheme.step()
    before = scheme.acting_state()["all"]
    for handle in scheme.update_worker.remote_workers:
        algo = handle.native.worker.algo
        compute = algo.compute_gradients
        algo.compute_gradients = lambda batch, compute=compute: ([compute(batch)[0][0] * float("nan")], {"loss": 0.0})
    assert [scheme.step() for _ in range(5)] == [{}] * 5
    with pytest.raises(NonFiniteUpdateError, match=r"6 updates in a row.*GWorker 1 at version 1.*GWorker 2 at"):
        scheme.step()
    assert torch.equal(scheme.acting_state()["all"], before)
    _assert_stops_in_balance(scheme)


def test_an_error_in_the_updater_thread_is_raised(make_scheme, monkeypatch):
    scheme = make_scheme(grad_communication=ASYNC)
    scheme.step()

    def fail(*args, **kwargs):
        raise ZeroDivisionError("in the thread")
    scheme.update_worker.local_worker.algo.compute_gradients = fail
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the thread") as caught:
        _step_on(scheme)
    assert time.monotonic() - start < 1
    assert any(entry.name == "fail" for entry in caught.traceback)


def test_errors_of_an_evaluation_do_not_affect_training(make_scheme):
    """Check that `wait_evaluation` raises the error of an evaluation, and that training continues."""
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    scheme = make_scheme(envs=envs, test_envs=VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 3}, 2))
    scheme.start_evaluation(4)
    with pytest.raises(EnvError, match="faulty step"):
        scheme.wait_evaluation(20.0)
    scheme.step()
    assert scheme.poll_evaluation() is None


def test_no_workers_are_left_if_starting_fails(make_scheme):
    """Check that workers that have already started are stopped if a later worker fails to start."""
    before = set(threading.enumerate())
    made = itertools.count()

    def third_fails():
        if next(made) == 2:
            raise RuntimeError("no third")
        return CountingEnv()
    scheme = make_scheme(third_fails, num_envs=1, num_col_workers=3)
    with pytest.raises(EnvError, match="no third"):
        scheme.start()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_a_worker_that_does_not_start_in_time_is_named(make_scheme):
    scheme = make_scheme(num_col_workers=2, runtime="simulated", costs={"start@*/CWorker 2": 1000.0})
    with pytest.raises(StartTimeoutError, match=r"CWorker 2 did not start within 80 s; the machine may be too busy"):
        scheme.start()
    scheme.stop()
