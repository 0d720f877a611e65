"""Tests of what happens around lost workers and skipped updates; the witness has found each of these defects."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import NoWorkersLeft
from tests.unit.scheme.peers import COSTS, raises_within, step_until


def simulated(**settings):
    return Scheme(*synthetic_agent(size=4), seed=1, runtime="simulated", **{"costs": COSTS, **settings})


def test_an_error_says_that_no_worker_is_left_although_an_update_needs_several_gradients():
    scheme = simulated(num_grad_workers=2, grad_communication=ASYNC, aggregate=2, on_worker_failure="ignore",
                       faults="kill grad.* @ grad 2")
    raises_within(10, NoWorkersLeft, scheme, "all 2 workers are lost")
    scheme.stop()


def test_steps_of_a_hung_worker_that_was_not_yet_replaced_count_once():
    scheme = simulated(num_col_workers=2, col_communication=ASYNC, worker_timeout_s=3.0,
                       faults="hang col.2 3.3s @ step 6", costs={**COSTS, "step": 0.01})
    supervisor = scheme.start().local_worker.collector.supervisor
    for _ in range(1000):
        scheme.step()
        if supervisor.gone:
            break
    scheme.runtime.sleep(0.3)  # the hang ends, but the worker is replaced later
    assert supervisor.gone
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())


@pytest.mark.parametrize("gradients", [{}, {"grad_communication": ASYNC, "aggregate": 2}], ids=["sync", "async"])
def test_workers_receive_moments_and_schedules_after_a_skipped_update(gradients):
    scheme = simulated(num_grad_workers=2, faults="nan grad.1 @ grad 1", **gradients)
    step_until(scheme, 1)
    metrics = scheme.metrics()
    scheme.stop()
    assert metrics["updates_skipped_nan"] == 1
    # Both workers received the initial weights twice. Asynchronous workers have already received those of update 1.
    assert metrics["weight_pushes"] == 4 + 2 * bool(gradients)


def test_workers_receive_weights_before_their_rollouts_are_too_old():
    scheme = simulated(num_col_workers=2, col_communication=ASYNC, max_policy_lag=1, broadcast_interval=3)
    step_until(scheme, 10)  # the learner starved at version 2 if workers kept the weights of version 0 until version 3
    scheme.stop()
