"""Check the histograms of lags."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.transport.messages import Gradients, Report
from pytorchrl.scheme.updates.lags import Lags, binned, summary


def gradients(version=0, **fields):
    return Gradients(
        vectors=None, num_samples=1, num_new_samples=1, weights_version=version, worker=1, sequence=1, info={},
        ledger=LedgerSnapshot(), **fields)


def report(**fields):
    return Report(counters=WorkerCounters().snapshot(), **fields)


@pytest.mark.parametrize(("histogram", "expected"), [
    ({}, {"mean": 0.0, "max": 0, "p50": 0, "p90": 0}),
    ({0: 9, 10: 1}, {"mean": 1.0, "max": 10, "p50": 0, "p90": 0}),
    ({0: 4, 1: 4, 5: 2}, {"mean": 1.4, "max": 5, "p50": 1, "p90": 5}),
])
def test_a_summary_of_lags(histogram, expected):
    assert summary(histogram) == expected


def test_lags_of_rollouts_have_two_phases():
    lags = Lags()
    lags.receive(1, report(lags=((1, 1, 3), (2, 0, 1))))
    metrics = lags.metrics()
    assert metrics["policy_lag"]["mean"] == 2.0
    assert (metrics["policy_lag_collect_mean"], metrics["policy_lag_queue_mean"]) == (0.5, 1.5)
    assert metrics["policy_lag_replay_mean"] == 0.0


def test_lags_of_samples_have_the_phase_of_replay():
    lags = Lags()
    lags.receive(1, report(drawn_lags=(np.array([[1, 4], [1, 6]]),)))
    metrics = lags.metrics()
    assert (metrics["policy_lag_collect_mean"], metrics["policy_lag_replay_mean"]) == (1.0, 4.0)
    assert metrics["policy_lag"]["max"] == 6


def test_lags_of_gradients_are_relative_to_the_updated_version():
    lags = Lags()
    lags.apply(gradients(version=2), 5)
    assert lags.metrics()["grad_lag"]["mean"] == 3.0


def test_a_saved_state_has_all_lags():
    lags, other = Lags(), Lags()
    lags.receive(1, report(lags=((1, 1, 3),)))
    lags.apply(gradients(), 2)
    other.restore(lags.state())
    assert other.metrics() == lags.metrics()


def test_lags_are_counted_by_worker():
    lags = Lags()
    lags.receive(1, report(lags=((1, 1, 3), (2, 0, 1), (1, 0, 1)), drawn_lags=(np.array([[1, 4]]),)))
    assert lags.of_worker(1, 1) == {"mean": 2.0, "max": 3, "p50": 1, "p90": 3}
    assert lags.of_worker(1, 2) == {"mean": 1.0, "max": 1, "p50": 1, "p90": 1}
    assert lags.of_worker(0, 1) is lags.of_worker(1, 3) is None


def test_bins_of_lags_double_in_size():
    assert binned({}) == []
    assert binned({0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 7: 32, 8: 64, 1000: 128}) == [
        (0, 1), (1, 2), (2, 12), (4, 48), (8, 64), (512, 128)]
