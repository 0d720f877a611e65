"""Tests of the syntax of fault plans, and of what each fault does to a worker."""

from __future__ import annotations

import pickle
import random

import pytest

from pytorchrl.errors import ConfigError, InjectedFault
from pytorchrl.runtime.faults import FaultPlan, parse_fault


class FakeHost:
    """A fake runtime that records the calls that faults make."""

    def __init__(self):
        self.asked = []

    def sleep(self, seconds):
        self.asked.append(("sleep", seconds))

    def die(self, worker):
        self.asked.append(("die", worker))


def visit(text, worker, point, times, incarnation=0, seed=0):
    """Visit a point `times` times under a fault plan; return (number of the visit, *effect) for each fault."""
    host = FakeHost()
    call = FaultPlan(text, seed).points(worker, incarnation, host)
    happened = []
    for number in range(1, times + 1):
        host.asked = []
        try:
            spoilt = call is not None and call(point)
        except InjectedFault as error:
            happened.append((number, str(error)))
        else:
            happened += [(number, *what) for what in host.asked] + [(number, "nan")] * spoilt
    return happened


@pytest.mark.parametrize(("text", "worker", "point", "expected"), [
    ("kill col.3 @ step 4", "GWorker 1/CWorker 3", "step", [(4, "die", "GWorker 1/CWorker 3")]),
    ("kill col.3 @ step 4", "GWorker 0/CWorker 2", "step", []),
    ("kill col.3 @ step 4", "GWorker 3", "grad", []),
    ("kill col.2.3", "GWorker 2/CWorker 3", "step", [(1, "die", "GWorker 2/CWorker 3")]),
    ("kill col.2.3", "GWorker 1/CWorker 3", "step", []),
    ("kill GWorker 2/CWorker 3 @ step 4", "GWorker 2/CWorker 3", "step", [(4, "die", "GWorker 2/CWorker 3")]),
    ("kill GWorker 2/CWorker 3", "GWorker 1/CWorker 3", "step", []),
    ("kill GWorker */CWorker 3", "GWorker 1/CWorker 3", "step", [(1, "die", "GWorker 1/CWorker 3")]),
    ("kill GWorker 1/RWorker 2 @ add 3", "GWorker 1/RWorker 2", "add", [(3, "die", "GWorker 1/RWorker 2")]),
    ("kill GWorker 1/RWorker 2 @ add 3", "GWorker 1/CWorker 2", "step", []),
    ("nan GWorker 4", "GWorker 4", "grad", [(1, "nan")]),
    ("hang grad.1 30s", "GWorker 1", "grad", [(1, "sleep", 30.0)]),
    ("hang grad.1", "GWorker 1", "grad", [(1, "sleep", float("inf"))]),
    ("delay col.* 0.5s", "GWorker 0/CWorker 7", "step", [(n, "sleep", 0.5) for n in range(1, 7)]),
    ("delay col.* 2s @ step 5", "GWorker 0/CWorker 7", "step", [(5, "sleep", 2.0)]),
    ("nan grad.0 @ update 5", "GWorker 0", "update", [(5, "nan")]),
    ("nan grad.0 @ update 5", "GWorker 0", "grad", []),
    ("nan grad.*", "GWorker 4", "grad", [(1, "nan")]),
    ("raise col.1 @ step 2", "GWorker 0/CWorker 1", "step", [(2, "injected into GWorker 0/CWorker 1 at step 2")]),
    (" delay col.1 1s ;; nan grad.0; ", "GWorker 0", "grad", [(1, "nan")]),
    ("delay col.1 1s; delay col.1 2s @ step 2", "GWorker 0/CWorker 1", "step",
     [(1, "sleep", 1.0), (2, "sleep", 1.0), (2, "sleep", 2.0)] + [(n, "sleep", 1.0) for n in range(3, 7)]),
])
def test_faults_happen_to_the_given_worker_at_the_given_point(text, worker, point, expected):
    assert visit(text, worker, point, 6) == expected


def test_a_fault_without_probability_spares_the_next_incarnation():
    assert visit("kill col.1 @ step 2", "GWorker 0/CWorker 1", "step", 5, incarnation=1) == []
    assert visit("delay col.1 1s @ step 2", "GWorker 0/CWorker 1", "step", 5, incarnation=1) == []
    assert len(visit("delay col.1 1s", "GWorker 0/CWorker 1", "step", 5, incarnation=1)) == 5


def test_a_probability_is_the_seeded_share_of_visits():
    def numbers(worker="GWorker 0/CWorker 1", **kwargs):
        return [number for number,
                *_ in visit("nan grad.* p=0.1; delay col.* 1s p=0.1", worker, "step", 2000, **kwargs)]

    assert numbers() == numbers()
    assert 150 < len(numbers()) < 250
    others = [numbers("GWorker 0/CWorker 2"), numbers(seed=1), numbers(incarnation=1)]
    assert all(other != numbers() and 150 < len(other) < 250 for other in others)


def test_a_worker_without_faults_has_no_fault_points():
    plan = FaultPlan("kill col.3 @ step 400", 0)
    assert plan.points("GWorker 0/CWorker 1", 0, FakeHost()) is None
    assert plan.points("GWorker 0", 0, FakeHost()) is None


@pytest.mark.parametrize(("text", "message"), [
    ("", "faults is empty"), (" ; ", "faults is empty"), ("kill", "which is not a fault"),
    ("kill col.1 @ 5", "which is not a fault"),
    ("kill col.1 at step 5", "which is not a fault"), ("stab col.1", r"action must be one of \['kill'"),
    ("kill worker.1", "target must be col.I"), ("kill col", "target must be"), ("kill grad.1.2", "target must be"),
    ("kill col.1.2.3", "target must be"), ("kill col.1 @ grad 3", r"col has the points \['step'\]"),
    ("kill grad.1 @ step 3", r"grad has the points \['grad', 'update'\]"), ("kill col.1 @ step 0", "counted from 1"),
    ("delay col.1", "needs a duration"), ("kill col.1 3s", "kill takes no seconds"),
    ("nan col.1", "nan makes a gradient non-finite"),
    ("kill col.1 p=0", r"p must be in \(0, 1\]"), ("kill col.1 p=1.5", r"p must be in \(0, 1\]"),
])
def test_invalid_fault_plans_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        FaultPlan(text, 0)


def test_a_plan_can_be_pickled():
    plan = pickle.loads(pickle.dumps(FaultPlan("kill col.1 p=0.5", 3)))
    assert plan.text == "kill col.1 p=0.5"
    rng, again = random.Random(1), random.Random(1)
    assert [plan.faults[0].happens(n, 0, rng) for n in range(20)] == [
        parse_fault("kill col.1 p=0.5").happens(n, 0, again) for n in range(20)]
