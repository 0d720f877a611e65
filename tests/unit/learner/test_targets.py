"""Tests of when a run is done, and of when records, evaluations and checkpoints are due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytorchrl.learner.targets import Due, Target


def target_of(steps, communication="synchronous", **options):
    settings = {"col_communication": communication, "grad_communication": communication}
    algorithm = SimpleNamespace(options=SimpleNamespace(**options))
    return Target(SimpleNamespace(settings=settings, agent=SimpleNamespace(algo_factory=algorithm)), steps)


def ledger(collected, consumed_unique, consumed, nan=0):
    return {"collected": collected, "consumed_unique": consumed_unique, "consumed": consumed, "dropped": {"nan": nan}}


def test_a_synchronous_run_ends_after_the_last_use_of_its_rollouts():
    target = target_of(100, num_epochs=2)
    assert not target.is_reached(90, ledger(90, 90, 180), 0)
    assert not target.is_reached(100, ledger(100, 100, 150), 0)
    assert target.is_reached(100, ledger(100, 100, 200), 0)
    assert target.is_reached(100, ledger(100, 100, 150), 50)  # 50 samples of skipped updates count as used
    assert not target.is_reached(100, ledger(100, 80, 160, nan=20), 0)


def test_a_further_rollout_also_ends_a_synchronous_run():
    target = target_of(100, target_kl=0.1, num_epochs=4)
    target.count(100)
    assert not target.is_reached(100, ledger(100, 100, 99), 0)
    target.count(120)
    assert target.is_reached(120, ledger(120, 100, 99), 0)


@pytest.mark.parametrize(("steps", "communication"), [(0, "synchronous"), (100, "asynchronous")])
def test_other_runs_end_at_the_target(steps, communication):
    assert target_of(steps, communication).is_reached(steps, ledger(steps, 0, 0), 0)


def test_the_first_due_event_is_found():
    due = Due(1000, None, 150, 400)
    assert (due.record, due.evaluation, due.checkpoint, due.first) == (5, 150, 400, 5)
    due.after_record(149)
    assert (due.recorded_steps, due.record, due.first) == (149, 154, 150)
    due.after_evaluation(310)
    due.after_checkpoint(810)
    due.after_record(900)
    assert (due.evaluation, due.checkpoint, due.record, due.first) == (450, 1200, 905, 450)
    assert Due(1000, 5000, None, None).first == 1000


def test_a_resumed_run_continues_its_plan():
    due = Due(1000, 100, 150, 400)
    due.resume(400, 330)
    assert (due.recorded_steps, due.record, due.evaluation, due.checkpoint, due.first) == (330, 430, 450, 800, 430)


def test_a_record_is_due_after_some_seconds_with_new_steps():
    now = [0.0]
    due = Due(1000, 100, None, None, 2.0, lambda: now[0])
    assert not due.is_record(10)
    now[0] = 2.0
    assert due.is_record(10)
    due.after_record(10)
    assert not due.is_record(10)
    now[0] = 3.9
    assert not due.is_record(20)
    assert due.is_record(110)
    now[0] = 4.0
    assert due.is_record(20)
    assert not due.is_record(10)
