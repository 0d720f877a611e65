"""Check that a run ends with an error if the remaining machines lack resources for the replacement of a worker."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC, SYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import InsufficientResourcesError
from pytorchrl.runtime.simulated import SimulatedRuntime

# Starting a worker takes 20 s; a replacement is requested 0.5 s +- 25 % after its worker was lost.
COSTS = {"start": 20.0, "message": 0.0, "step": 0.1, "grad": 0.1, "update": 0.0}
TREE = {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC}


@pytest.fixture
def train(check_ledger):
    """Return a function that trains a scheme and returns it; its ledger is checked after the test."""
    schemes = []

    def train_(updates=100, **settings):
        scheme = Scheme(*synthetic_agent(), seed=1, runtime="simulated", costs=COSTS, worker_timeout_s=5.0, **settings)
        schemes.append(scheme)
        while scheme.version < updates:
            scheme.step()
            check_ledger(scheme)
        return scheme
    yield train_
    for scheme in schemes:
        final = scheme.stop()
        assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())


@pytest.mark.parametrize(("settings", "who"), [
    ({"num_col_workers": 2, "col_communication": SYNC, "faults": "kill col.2 @ step 6"}, "GWorker 0/CWorker 2"),
    ({"num_col_workers": 2, "col_communication": ASYNC, "faults": "kill col.2 @ step 6"}, "GWorker 0/CWorker 2"),
    ({**TREE, "faults": "kill grad.2 @ grad 3"}, "GWorker 2"),
    ({**TREE, "faults": "kill col.1.2 @ step 6"}, "GWorker 1/CWorker 2"),
], ids=["round", "asynchronous", "gradient-worker", "below-a-gradient-worker"])
def test_a_replacement_without_resources_ends_the_run(train, monkeypatch, settings, who):
    monkeypatch.setattr(SimulatedRuntime, "lacks_room",
                        lambda self, handle: "it requests CPU=9" if handle.native.worker is None else "")
    with pytest.raises(InsufficientResourcesError,
                       match=rf"{who} has waited 5 s for resources: it requests CPU=9; add a machine") as caught:
        train(**settings)
    assert "worker_timeout_s" in str(caught.value)


def test_a_replacement_that_starts_slowly_is_awaited(train):
    scheme = train(60, num_col_workers=2, faults="kill col.2 @ step 6")
    assert scheme.metrics()["workers_restarted"] == 1
    assert scheme.runtime.now() > 20 + 20


def test_continuing_with_fewer_workers_needs_no_resources(train, monkeypatch):
    monkeypatch.setattr(SimulatedRuntime, "lacks_room", lambda self, handle: "it requests CPU=9")
    scheme = train(60, num_col_workers=2, faults="kill col.2 @ step 6", on_worker_failure="ignore")
    assert scheme.metrics()["workers_restarted"] == 0
