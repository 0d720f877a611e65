"""The feed by itself: which items it still hands out, by the version of the learner."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
import torch

from pytorchrl.runtime import Journal, ThreadRuntime
from pytorchrl.scheme.gradients.sample_queue import Feed
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.transport.messages import Rollout

STEPS = 4


@pytest.fixture
def make():
    """A function from settings to (the worker whose version counts, a feed of one item of version 0)."""
    def make_(**settings):
        worker = SimpleNamespace(version=0, journal=Journal(), num_envs=1, algo=object(),
                                 storage=SimpleNamespace(generator=torch.Generator(), options=SimpleNamespace(size=STEPS)))
        ledger = Ledger()
        feed = Feed(worker, ThreadRuntime(), ledger, threading.Event(), **settings)
        ledger.collect(STEPS)
        ledger.move(STEPS, "in_flight", "queued")
        feed.put([Rollout(data=None, num_env_steps=STEPS, size=STEPS, collected_steps=STEPS, weights_version=0, worker=1, sequence=1)])
        return worker, feed
    return make_


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_an_item_is_used_first_up_to_the_limit_of_its_lag(make, version):
    worker, feed = make(max_policy_lag=2)
    worker.version = version
    if version <= 2:
        assert feed.take(0.0).version == 0
    else:
        with pytest.raises(queue.Empty):
            feed.take(0.0)
    assert feed.dropped_items == int(version > 2)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_an_item_is_used_again_up_to_the_limit_of_its_lag(make, version):
    worker, feed = make(max_policy_lag=2, num_passes=3)
    assert feed.take(0.0).uses == 1
    worker.version = version
    if version <= 2:
        assert feed.take(0.0).uses == 2
        assert feed.passes_cancelled == 0
    else:
        with pytest.raises(queue.Empty):
            feed.take(0.0)
        assert feed.passes_cancelled == 2
