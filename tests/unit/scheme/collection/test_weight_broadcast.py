"""Tests of how often collection workers receive new weights."""

from __future__ import annotations

import time

from pytorchrl import ASYNC


def _weight_pushes(scheme, num_updates=40):
    for _ in range(num_updates):
        scheme.step()
        time.sleep(0.002)  # give collectors time to finish rollouts
    return scheme.metrics()["weight_pushes"]


def test_broadcast_interval(make_scheme, one_batch):
    settings = {"algo": one_batch, "num_col_workers": 2, "col_communication": ASYNC, "queue_size": 1,
                "col_in_flight": 1}
    assert _weight_pushes(make_scheme(**settings)) > 15
    # Each of 2 workers receives weights at the start, and in 40 updates, it can fall 10 updates behind at most 4 times.
    assert 0 < _weight_pushes(make_scheme(broadcast_interval=10, **settings)) <= 10
