"""Tests of the metrics by worker, in simulated schemes whose workers are killed."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent


@pytest.mark.parametrize(("settings", "victim"), [
    ({"num_col_workers": 3, "col_communication": ASYNC}, "GWorker 0/CWorker 2"),
    ({"num_col_workers": 2, "num_grad_workers": 2, "grad_communication": ASYNC}, "GWorker 2")])
def test_steps_and_replacements_add_up(settings, victim):
    fault = "kill col.2 @ step 40" if "CWorker" in victim else "kill grad.2 @ grad 3"
    scheme = Scheme(*synthetic_agent(), runtime="simulated", seed=1, faults=fault, **settings)
    while not (metrics := scheme.metrics())["workers_restarted"]:
        scheme.step()
    rows = {row["worker"]: row for row in metrics["by_worker"]}
    assert {name for name, row in rows.items() if row["restarts"]} == {victim}
    assert sum(row["restarts"] for row in rows.values()) == metrics["workers_restarted"]
    assert sum(row.get("gradients", 0) for row in rows.values()) == metrics["grads_received"]
    for row in rows.values():
        assert ("gradients" in row) is ("CWorker" not in row["worker"])
        if row.get("env_steps"):
            assert 0 <= row["policy_lag"]["mean"] <= metrics["policy_lag"]["max"]
    scheme.stop()
