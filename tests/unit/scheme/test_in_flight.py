"""Tests of bounds on unused env steps and on lags, for each kind of scheme.

Sizes, costs and schedules are random, and the scheme is inspected after every event of the virtual clock.
`test_learner_thread.py` tests asynchronous collection into a queue.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.runtime.threads import _ThreadActor
from pytorchrl.scheme.gradients.replay_source import ReplayDestination
from tests.conftest import seeds

SEEDS = seeds(3, 12)


class Look:
    """A counter of the env steps that collectors have taken; `most` is the largest number of unused steps so far."""

    def __init__(self, scheme, unused):
        self.root, self.unused, self.most = scheme.start(10**6), unused, 0
        scheme.runtime.simulation.after_event = self.look

    def look(self):
        self.most = max(self.most, self.unused(self))
        for worker in self.grad_workers:
            assert worker.collector.strategy.invariant()
            assert worker.collector._destination.invariant()

    @property
    def grad_workers(self):
        remote = [handle.native.worker for handle in self.root.remote_workers]
        return [worker for worker in remote if worker is not None] or [self.root.local_worker]

    @property
    def made(self):
        collectors = []
        for worker in self.grad_workers:
            remote = [handle.native.worker for handle in worker.remote_workers]
            collectors += [collector for collector in remote if collector is not None] or [worker.local_worker]
        return sum(collector.collected_steps for collector in collectors)


def not_consumed(look):
    """Return the number of collected steps that were not yet used in an update."""
    ledger = look.root.statistics.tree_ledger.total()
    return look.made - ledger.consumed_unique - sum(ledger.dropped.values())


def not_resident(look):
    """Return the number of collected steps that no shard has confirmed yet."""
    parts = [worker.ledger.snapshot() for worker in look.grad_workers]
    return look.made - sum(part.resident + part.evicted + sum(part.dropped.values()) for part in parts)


@pytest.fixture
def make(check_ledger):
    """Return a function that makes simulated schemes; they are stopped, and their ledgers checked, after the test."""
    schemes = []

    def make_(agent, seed, costs=None, **settings):
        schemes.append(Scheme(*agent, seed=1, runtime="simulated", schedule_seed=seed,
                              costs={"start": 0} | (costs or {}), **settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        final = scheme.stop()
        check_ledger(scheme)
        assert final["in_flight"] == final["queued"] == 0


@pytest.fixture
def dice(request):
    """Return a function that makes a random generator from a seed and the name of the test."""
    return lambda seed: random.Random(f"{request.node.originalname} {seed}")


@pytest.mark.parametrize("seed", SEEDS)
def test_synchronous_rounds(make, dice, seed):
    """Check the bound on unused steps in synchronous collection, and that the policy lag is 0.

    At most one round of steps is unused. After the last minibatch of a round, no step is unused.
    """
    rng = dice(seed)
    workers, learners, rollout, parts = rng.choice((1, 2, 3)), rng.choice((1, 2,
                                                                           3)), rng.choice((4, 6)), rng.choice((1, 2))
    agent = synthetic_agent(rollout, num_mini_batch=parts)
    scheme = make(agent, seed, {"grad": 10 ** rng.uniform(-4, 0)}, num_col_workers=workers, num_grad_workers=learners)
    look = Look(scheme, not_consumed)
    for _ in range(20):
        for _ in range(parts):
            scheme.step()
        assert not_consumed(look) == 0
    is_central = workers == learners == 1  # one thread, which uses all steps before the next event
    assert (look.most == 0) if is_central else 0 < look.most <= learners * workers * rollout
    assert scheme.metrics()["policy_lag"]["max"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_synchronous_collection_in_microbatches(make_scheme, plain_a2c, dice, seed):
    """Check the bound on unused steps if microbatches are collected during an update.

    The bound is the sum of a train batch, a microbatch, and one rollout per worker. No step is unused between two
    updates.
    """
    rng = dice(seed)
    workers, rollout, micro = rng.choice((2, 3)), rng.choice((4, 6)), rng.choice((5, 20))
    train, prefetch = micro * rng.choice((1, 3)), rng.choice((0, 1))
    scheme = make_scheme(num_envs=1, size=rollout, algo=plain_a2c, runtime="simulated", schedule_seed=seed,
                         costs={"start": 0, "grad": 10 ** rng.uniform(-4, 0)}, num_col_workers=workers,
                         train_batch_size=train,
                         microbatch_size=micro, prefetch=prefetch)
    look = Look(scheme, not_consumed)
    for _ in range(12):
        scheme.step()
        assert not_consumed(look) == 0
    assert train <= look.most < train + micro + workers * rollout
    assert scheme.metrics()["policy_lag"]["max"] == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_slow", [False, True], ids=["equal", "one-slow"])
def test_asynchronous_gradients(make, dice, seed, is_slow):
    """Check that each worker has at most one unused rollout, and check the largest lag of gradients.

    The lag is the number of updates that other workers make while a worker computes its gradient.
    """
    rng = dice(seed)
    workers, rollout, times = rng.choice((2, 3, 5)), rng.choice((4, 6)), rng.choice((2.5, 7.5)) if is_slow else 1
    costs = {"message": 2.0**-20, "update": 2.0**-20, "grad": 0, "step": 0.25, "step@GWorker 2*": 0.25 * times}
    scheme = make(synthetic_agent(rollout), seed, costs, num_grad_workers=workers, grad_communication=ASYNC)
    look = Look(scheme, not_consumed)
    while scheme.version < 30 * workers:
        scheme.step()
    assert rollout <= look.most <= workers * rollout
    lag = scheme.metrics()["grad_lag"]["max"]
    assert lag == workers - 1 if not is_slow else math.floor(
        times) * (workers - 1) <= lag <= math.ceil(times) * (workers - 1)
    assert scheme.metrics()["policy_lag"]["max"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_replay(make, dice, seed):
    """Check that unused steps never exceed the size of all rollouts that are in flight or being added to shards."""
    rng = dice(seed)
    workers, in_flight, rollout = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((4, 6))
    shards, adds, delay = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((4, 30))
    # Random costs make some shards slow, so that rollouts wait to be added.
    costs = {name: 10 ** rng.uniform(-4, -1) for name in ("add", "sample", "grad")}
    scheme = make(synthetic_agent(rollout, capacity=200), seed, costs, num_col_workers=workers, col_communication=ASYNC,
                  grad_communication=ASYNC, col_in_flight=in_flight, num_replay_workers=shards, add_in_flight=adds,
                  train_batch_size=8, max_weight_sync_delay=delay)
    look = Look(scheme, not_resident)
    while scheme.version < 30:
        scheme.step()
    assert 0 < look.most <= (workers * in_flight + shards * adds) * rollout


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_of_collectors_that_fill_replay(make, dice, seed, monkeypatch):
    """Check how many rollouts a worker collects with the same weights if updates occur between any two rollouts."""
    rng = dice(seed)
    workers, in_flight, rollout, delay = rng.choice((1, 2, 3)), rng.choice((1, 2,
                                                                            3)), rng.choice((4, 6)), rng.choice((4, 10,
                                                                                                                 30))
    scheme = make(synthetic_agent(rollout, capacity=200), seed, {"grad": 0.1, "step": 0.1}, num_col_workers=workers,
                  col_communication=ASYNC, grad_communication=ASYNC, col_in_flight=in_flight, num_replay_workers=2,
                  train_batch_size=8, max_weight_sync_delay=delay)
    Look(scheme, not_resident)
    versions, put = {}, ReplayDestination.put

    def watch(destination, rollouts):
        for found in (rollout.header for rollout in rollouts):
            versions.setdefault(found.worker, []).append(found.weights_version)
        put(destination, rollouts)
    monkeypatch.setattr(ReplayDestination, "put", watch)
    while min(map(len, versions.values()), default=0) < 25:
        scheme.step()
    most = math.ceil(delay / rollout) + (in_flight - 1 if workers > 1 else 0)
    for made in versions.values():
        runs = [len(list(group)) for version, group in itertools.groupby(made) if version > 0]
        assert max(runs) <= most
        assert set(runs[:-1]) & {math.ceil(delay / rollout)}


# Settings -> for levels of the worker tree, the largest number of requests that a worker may have; otherwise, it is 1.
LIMITS = {
    "col_in_flight": ({"num_col_workers": 2, "col_communication": ASYNC, "col_in_flight": 3}, {"CWorker": 3}),
    "rounds": ({"num_col_workers": 2}, {"CWorker": 1}),
    "gradients": ({"num_grad_workers": 2, "grad_communication": ASYNC}, {"GWorker": 1}),
    "shards": ({"num_col_workers": 2, "col_communication": ASYNC, "num_replay_workers": 2, "add_in_flight": 2,
                "prefetch": 2}, {"CWorker": 2, "RWorker": 2 + 2 * 2 + 1}),
}


@pytest.mark.parametrize(("settings", "limits"), LIMITS.values(), ids=LIMITS)
def test_the_calls_of_a_worker_are_limited_by_their_senders(make_replay_scheme, monkeypatch, settings, limits):
    """Check that the queue of a worker's calls needs no limit of its own.

    The senders wait for the answer to any other call, such as `ready`, so there is at most one such call more.
    """
    actors, init = [], _ThreadActor.__init__

    def init_(self, *args):
        init(self, *args)
        actors.append(self)
    monkeypatch.setattr(_ThreadActor, "__init__", init_)
    agent = {"capacity": 100} if "num_replay_workers" in settings else {}
    scheme = make_replay_scheme(agent, runtime="threads", **settings)
    for _ in range(2):
        for _ in range(30):
            scheme.step()
        scheme.update_worker.drain(10.0)
    scheme.stop()
    peaks = {}
    for actor in actors:
        level = actor.name.rpartition("/")[2].split()[0]
        peaks[level] = max(peaks.get(level, 0), actor.peak)
    assert peaks.keys() >= limits.keys()
    assert {level: peak for level, peak in peaks.items() if not 1 <= peak <= limits.get(level, 1) + 1} == {}
