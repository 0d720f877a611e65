"""Tests of the virtual seconds that operations take."""

from __future__ import annotations

import statistics
import time

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.runtime.costs import DEFAULT_COSTS, Costs


def draws(costs, operation, worker="GWorker 0", count=4000, seed=0):
    made = Costs(costs, seed)
    return [made.draw(operation, worker) for _ in range(count)]


@pytest.mark.parametrize(("cost", "mean", "low", "high"), [
    (0.25, 0.25, 0.25, 0.25), (0, 0.0, 0.0, 0.0), (("uniform", 1.0, 3.0), 2.0, 1.0, 3.0),
    (["exponential", 0.5], 0.5, 0.0, 8.0),
    (("lognormal", 2.0, 0.1), 2.01, 1.2, 3.2),
])
def test_distributions(cost, mean, low, high):
    values = draws({"step": cost}, "step")
    assert statistics.fmean(values) == pytest.approx(mean, rel=0.06)
    assert low <= min(values) <= max(values) <= high


def test_samples_depend_on_the_seed():
    assert draws(None, "grad", seed=1) == draws(None, "grad", seed=1) != draws(None, "grad", seed=2)


def test_costs_can_be_set_per_worker_and_later_entries_win():
    costs = Costs({"step": 1, "step@*/CWorker 3": 2, "step@GWorker 1/*": 3}, 0)
    assert costs.draw("step", "GWorker 0/CWorker 1") == 1
    assert costs.draw("step", "GWorker 0/CWorker 3") == 2
    assert costs.draw("step", "GWorker 1/CWorker 3") == 3
    assert 0.005 <= costs.draw("grad", "GWorker 1") <= 0.015  # the default cost of a gradient


def test_measured_costs_are_the_elapsed_time():
    start = time.perf_counter()
    assert 0 <= Costs({"grad": "measured"}, 0).draw("grad", "GWorker 0", start) <= time.perf_counter() - start


@pytest.mark.parametrize("costs", [
    {"stepp": 1}, {"@col": 1}, {"step": -1}, {"step": "slow"}, {"step": ("uniform", 1)}, {"step": ("normal", 1, 2)},
    {"step": float("nan")}, {"step": float("inf")}, {"step": True}, {"step": ()}, {"step": ("exponential", -1)},
    {"step": ("uniform", "a", "b")},
])
def test_wrong_costs(costs):
    with pytest.raises(ConfigError, match="costs"):
        Costs(costs, 0)


def test_every_operation_has_a_default():
    for operation in DEFAULT_COSTS:
        assert (Costs(None, 0).draw(operation, "GWorker 0") > 0) == (operation != "byte")
