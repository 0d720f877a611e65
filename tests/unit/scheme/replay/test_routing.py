"""Check the shard that each routing method chooses against a search over all shards."""

from __future__ import annotations

import random

import pytest

from pytorchrl.scheme.replay.routing import Router

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
