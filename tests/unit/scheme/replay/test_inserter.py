"""Check the ledger while rollouts are sent to shards: before and after each confirmation and each loss."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pytorchrl.errors import WorkerLostError
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.replay.inserter import Inserter, Router
from pytorchrl.scheme.replay.shard_states import ShardStates
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import Traffic
from tests.unit.scheme.replay.numbered import SIZE, rollout, start_shards


class Side:
    """Empty shards, and an inserter that sends rollouts to them."""

    def __init__(self, number, capacity=1000, costs=None, policy="restart", **options):
        self.runtime, workers = start_shards(number, capacity, costs)
        self.handles, self.ledger = workers.remote_workers(), Ledger()
        self.states = ShardStates(number, self.runtime.make_event(), self.runtime.make_event())
        supervisor = Supervisor(self.handles, workers.replace, self.runtime,
                                Supervisor.Options(on_worker_failure=policy), 0)
        self.inserter = Inserter(self.handles, self.runtime, supervisor, self.states, self.ledger,
                                 **{"routing": "round_robin", "add_in_flight": 2, "seed": 0} | options)
        self.number = 0
        self.runtime.simulation.after_event = self.check

    def check(self):
        assert self.inserter.invariant()
        assert self.states.invariant()

    def add(self, worker=1):
        """Collect a rollout and send it; return whether a shard has accepted it."""
        if self.inserter.add(rollout(self.number, worker), 0):
            self.ledger.collect(SIZE)
            self.number += 1
            return True
        return False

    def confirm(self):
        while self.inserter.owners:
            self.inserter.poll(1.0)

    def places(self):
        snapshot = self.ledger.snapshot().check()
        return {name: number for name in ("in_flight", "resident", "evicted") if (number := getattr(snapshot, name))}

    @property
    def lost(self):
        return self.ledger.snapshot().dropped.get("worker_lost", 0)

    def kept(self):
        """Return the numbers of the steps in each shard."""
        return [handle.native.worker._storage._drawn_from.tolist() for handle in self.handles]


@pytest.fixture
def make():
    """Return a function that starts shards and an inserter for them."""
    sides = []

    def make_(*arguments, **options):
        sides.append(Side(*arguments, **options))
        return sides[-1]
    yield make_
    for side in sides:
        side.runtime.close()


def test_a_rollout_is_in_flight_until_its_shard_confirms_it(make):
    side = make(1)
    assert side.add()
    assert side.places() == {"in_flight": SIZE}
    assert side.states.added == 0
    side.confirm()
    assert side.places() == {"resident": SIZE}
    assert side.states.added == SIZE
    (header,) = side.states.take_headers()
    assert (header.sequence, header.num_env_steps) == (0, SIZE)


def test_a_confirmed_rollout_has_the_traffic_of_its_worker_and_of_its_shard(make, monkeypatch):
    monkeypatch.setattr("pytorchrl.scheme.replay.r_worker.receive", lambda message, now: (message, Traffic(decodes=4)))
    side, item = make(1), rollout(0)
    weights = Traffic(decodes=3)
    side.ledger.collect(SIZE)
    side.inserter.add(replace(item, header=replace(item.header, traffic={"weights": weights})), 0)
    side.confirm()
    (header,) = side.states.take_headers()
    assert header.traffic == {"weights": weights, "data": Traffic(decodes=4)}


def test_overwritten_steps_are_evicted(make):
    side = make(2, capacity=60)
    for _ in range(10):
        assert side.add()
        side.confirm()
    assert side.places() == {"resident": 60, "evicted": 40}
    assert side.kept() == [list(range(40, 50)) + list(range(60, 70)) + list(range(80, 90)),
                           list(range(50, 60)) + list(range(70, 80)) + list(range(90, 100))]
    side.inserter.lose(0, WorkerLostError("gone"))
    assert side.lost == 30
    assert side.places() == {"resident": 30, "evicted": 40}


def test_the_counts_of_a_replacement_start_anew(make):
    """Check a shard that had evicted steps and had a rollout in flight: its replacement has only its own steps."""
    side = make(2, capacity=60)
    for _ in range(10):
        side.add()
        side.confirm()
    side.add()
    side.inserter.lose(0, WorkerLostError("gone"))
    while len(side.inserter._supervisor.gone):
        side.inserter.poll(1.0)
    for _ in range(2):
        side.add()
        side.confirm()
    assert (side.places(), side.lost) == ({"resident": 40, "evicted": 50}, 40)
    assert [header.sequence for header in side.states.take_headers()] == [*range(10), 11, 12]
    side.inserter.lose(0, WorkerLostError("gone"))
    assert (side.places(), side.lost) == ({"resident": 30, "evicted": 50}, 50)


@pytest.mark.parametrize("add_in_flight", [1, 3])
def test_no_more_rollouts_are_in_flight_than_allowed(make, add_in_flight):
    side = make(2, costs={"add": 1.0}, add_in_flight=add_in_flight)
    while side.add():
        pass
    assert sorted(side.inserter.owners) == [0] * add_in_flight + [1] * add_in_flight
    side.inserter._in_flight[0].append(rollout(9, 1))
    assert not side.inserter.invariant()
    side.inserter._in_flight[0].pop()
    side.inserter.poll(1.5)
    assert side.add()


def test_a_lost_shard_loses_its_contents_and_rollouts_in_flight(make):
    side = make(2)
    for _ in range(4):
        side.add()
        side.confirm()
    side.add()
    side.add()
    side.inserter.lose(0, WorkerLostError("gone"))
    assert side.lost == 3 * SIZE  # two rollouts in the shard, and one in flight
    assert side.places() == {"resident": 2 * SIZE, "in_flight": SIZE}
    assert [side.states.incarnation(index) for index in range(2)] == [1, 0]
    side.confirm()
    assert side.places() == {"resident": 3 * SIZE}
    for _ in range(2):
        assert side.add()
    assert side.inserter.owners == [1, 1]  # shard 0 accepts no rollouts until it is replaced


def test_a_shard_that_the_sampler_found_lost_is_replaced_once(make):
    side, error = make(2), WorkerLostError("gone")
    for _ in range(2):
        side.add()
    side.confirm()
    side.states.suspend(0, 0, error)
    side.states.suspend(0, 0, error)
    side.inserter.poll(0.0)
    assert side.states.incarnation(0) == 1
    assert side.lost == SIZE
    side.inserter.poll(5.0)
    side.inserter.poll(5.0)
    side.states.suspend(0, 0, error)  # a late report of the same loss
    side.inserter.poll(0.0)
    assert side.states.incarnation(0) == 1
    assert side.add()
    side.confirm()
    assert side.places() == {"resident": 2 * SIZE}


@pytest.mark.parametrize(("policy", "expected"), [("restart", [1, 1]), ("ignore", [1, 1, 1])])
def test_streams_wait_for_a_replacement_or_change_their_shard(make, policy, expected):
    side = make(2, policy=policy, routing="by_stream", add_in_flight=3)
    side.inserter.lose(0, WorkerLostError("gone"))
    accepted = [side.add(worker) for worker in (1, 2, 3)]
    assert accepted == ([True, False, True] if policy == "restart" else [True] * 3)
    assert side.inserter.owners == expected


def test_unconfirmed_rollouts_stay_in_flight_at_the_end(make):
    side = make(1, costs={"add": 1.0})
    side.add()
    side.add()
    side.inserter.finish(1.5)
    assert side.places() == {"in_flight": SIZE, "resident": SIZE}


def test_counts_of_a_restored_shard_come_from_its_state(make):
    side = make(1, capacity=20)
    for _ in range(3):
        side.add()
        side.confirm()
    again = make(1, capacity=20)
    again.ledger.restore(side.ledger.snapshot())
    shard = side.handles[0].native.worker
    again.inserter.restore(0, again.handles[0].native.worker.restore(shard.state()))
    again.number = side.number
    again.add()
    again.confirm()
    assert again.places() == {"resident": 20, "evicted": 20}
    again.inserter.lose(0, WorkerLostError("gone"))
    assert again.lost == 20
    assert again.places() == {"evicted": 20}


NUM_SHARDS = 5


@pytest.mark.parametrize("seed", range(5))
def test_round_robin_takes_the_next_shard_that_can_accept(seed):
    rng, router, last = random.Random(seed), Router("round_robin", NUM_SHARDS, 0, load=None), NUM_SHARDS - 1
    for _ in range(100):
        free = sorted(rng.sample(range(NUM_SHARDS), rng.randint(1, NUM_SHARDS)))
        expected = next(index % NUM_SHARDS for index in range(last + 1, last + 1 + NUM_SHARDS)
                        if index % NUM_SHARDS in free)
        assert router.choose(1, free, range(NUM_SHARDS)) == expected
        last = expected


@pytest.mark.parametrize("seed", range(5))
def test_least_loaded_compares_the_loads_of_shards_that_can_accept(seed):
    rng, loads = random.Random(seed), {}
    router = Router("least_loaded", NUM_SHARDS, 0, loads.__getitem__)
    for _ in range(100):
        loads.update({index: (rng.randint(0, 3), rng.randint(0, 3)) for index in range(NUM_SHARDS)})
        free = sorted(rng.sample(range(NUM_SHARDS), rng.randint(1, NUM_SHARDS)))
        expected = sorted((loads[index], index) for index in free)[0][1]
        assert router.choose(1, free, range(NUM_SHARDS)) == expected


def test_a_stream_keeps_its_shard_and_waits_for_it():
    router, every = Router("by_stream", NUM_SHARDS, 0, load=None), range(NUM_SHARDS)
    homes = {worker: router.choose(worker, every, every) for worker in range(1, 21)}
    assert all(list(homes.values()).count(shard) == 4 for shard in every)
    for worker, home in homes.items():
        assert router.choose(worker, [home], every) == home
        assert router.choose(worker, [shard for shard in every if shard != home], every) is None


def test_streams_of_a_shard_that_stays_lost_are_distributed():
    router, every, left = Router("by_stream", 3, 0, load=None), range(3), [0, 2]
    homes = [router.choose(worker, every, every) for worker in range(12)]
    moved = [router.choose(worker, left, left) for worker in range(12)]
    assert [new for old, new in zip(homes, moved, strict=True) if old in left] == [old for old in homes if old in left]
    assert [new for old, new in zip(homes, moved, strict=True) if old == 1] == [0, 2, 0, 2]


@pytest.mark.parametrize("routing", ["round_robin", "random", "least_loaded"])
def test_a_rollout_waits_if_no_shard_can_accept_it(routing):
    assert Router(routing, 3, 0, load=lambda index: (0, 0)).choose(1, [], range(3)) is None


def test_random_routing_skips_full_shards():
    router = Router("random", 4, 0, load=None)
    assert {router.choose(1, [1, 3], [0, 1, 2, 3]) for _ in range(50)} == {1, 3}
    assert router.choose(1, [], [0, 1, 2, 3]) is None
