"""Check a single replay shard, whose importance weights depend on the priorities in all shards."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pytorchrl import DQN, PERBuffer, QActor, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.base.worker import Context
from pytorchrl.scheme.replay.r_worker import RWorker, Versions, describe

BETA = 0.5


@pytest.fixture
def agent():
    """Return a function that returns the factories of an agent whose storage has the given options."""
    envs = VecEnv.create_factory(CountingEnv)

    def agent_(**options):
        storage = {"rollout_size": 5, "alpha": 1.0, "beta": BETA, "epsilon": 1e-12, **options}
        return {"algo_factory": DQN.create_factory(), "storage_factory": PERBuffer.create_factory(10, **storage),
                "actor_factory": QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))}
    return agent_


@pytest.fixture
def rollout(agent):
    """Return a rollout of five steps."""
    envs = VecEnv.create_factory(CountingEnv)
    collector = CWorker(1, CWorkerSet.create_factory(1, train_envs_factory=envs, **agent()))
    yield collector.collect()
    collector.close()


@pytest.fixture
def make(agent, rollout):
    """Return a function that makes a shard with the given storage options.

    The shard holds five transitions, which have the priorities 1 to 5.
    """
    def make_(**options):
        shard = RWorker(1, **agent(**options))
        shard.add(rollout, 0)
        state = shard.update_priorities(np.arange(5), np.arange(1.0, 6.0, dtype=np.float32))
        assert state.smallest == pytest.approx(1.0)
        return shard
    return make_


@pytest.mark.parametrize("smallest", [1.0, 0.25, 4.0, float("inf")])
def test_weights_are_relative_to_the_largest_of_all_shards(make, smallest):
    """Check that weights are scaled so that the smallest priority in all shards has weight 1."""
    batch = make(weight_norm="buffer").sample(200, smallest, {"beta": BETA}).batch
    expected = ((batch.ids + 1.0) / min(smallest, 1.0)) ** -BETA
    assert batch.weight.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert set(batch.ids.tolist()) == set(range(5))


def test_beta_is_the_value_in_the_request(make):
    batch = make(weight_norm="buffer").sample(50, 0.25, {"beta": 1.0}).batch
    assert batch.weight.tolist() == pytest.approx((0.25 / (batch.ids + 1.0)).tolist(), rel=1e-5)


def test_weights_of_a_batch_are_relative_to_its_own_largest(make):
    batch = make(weight_norm="batch").sample(200, 0.25, {}).batch
    assert batch.weight.tolist() == pytest.approx(((batch.ids + 1.0) ** -BETA).tolist(), rel=1e-5)


def test_a_state_reports_priorities_and_counts(make):
    """Check the sampling weights of the items, and the statistics, in which priorities are not raised to alpha."""
    shard = make(alpha=0.5)
    shard.sample(7, 1.0, {})
    state = shard.update_priorities(np.arange(5), np.array([9.0, 4.0, 25.0, 16.0, 36.0], np.float32))
    assert (state.mass, state.smallest) == (pytest.approx(3.0 + 2.0 + 5.0 + 4.0 + 6.0), pytest.approx(2.0))
    assert state.contents["min_priority"] == pytest.approx(4.0)
    assert (state.contents["added"], state.contents["sampled"], state.contents["items"]) == (5, 7, 5)
    assert shard.sample(6, 1.0, {}).state.contents["sampled"] == 13


def test_statistics_of_several_policies_are_combined():
    """Check the statistics of a replay of three policies, one of which has no items."""
    def storage(number, smallest, **more):
        counters = {"inserted": 10 * number, "sampled": 20 * number, "evicted": 90, "stale_priorities": 3 * number,
                    "evicted_unused": 5 * number}
        return SimpleNamespace(counters=counters, options=SimpleNamespace(alpha=0.5), num_items=7 * number,
                               num_bytes=100 * number, mass=float(number), min_priority=smallest, **more)

    whole = storage(9, math.inf, storages={"a": storage(1, 3.0), "b": storage(2, 2.0), "c": storage(4, math.inf)})
    found = describe(whole)
    assert {name: value for name, value in found.items() if "/" not in name} == {
        "added": 90, "sampled": 180, "items": 63, "bytes": 900, "mass": 9.0, "min_priority": 4.0,
        "stale_priorities": 21, "evicted_unused": 35}
    assert [found[f"min_priority/{policy}"] for policy in "abc"] == [9.0, 4.0, None]
    assert [found[f"stale_priorities/{policy}"] for policy in "abc"] == [3, 6, 12]


def test_each_shard_and_its_replacement_draw_their_own_numbers(agent, rollout):
    """Check the draws of shards with equal contents: they depend on the seed, both indices and the incarnation."""
    def drawn(index=1, parent=0, incarnation=0, seed=0):
        shard = RWorker(index, parent, seed=seed, context=Context(incarnation=incarnation), **agent())
        shard.add(rollout, 0)
        return shard.sample(20, 1.0, {}).batch.ids.tolist()
    ways = [{}, {"index": 2}, {"parent": 1}, {"incarnation": 1}, {"seed": 1}]
    assert len({tuple(drawn(**way)) for way in ways}) == len(ways)
    assert drawn(incarnation=1) == drawn(incarnation=1)


@pytest.mark.parametrize("seed", range(10))
def test_rows_have_the_versions_of_their_rollouts(seed):
    rng, size = np.random.default_rng(seed), int(np.random.default_rng(seed).integers(20, 400))
    versions, rows = Versions(), []
    for number in range(150):
        count = int(rng.integers(1, 20))
        versions.add(len(rows), number, 3 * number)
        rows += [(number, 3 * number)] * count
        first = max(0, len(rows) - size)
        versions.forget(first)
        asked = rng.integers(first, len(rows), 30)
        np.testing.assert_array_equal(versions.of(asked), [rows[row] for row in asked])
        if number == 100:
            versions, before = Versions(), versions
            versions.load_state_dict(before.state_dict())
    assert versions._blocks.shape[1] <= 4 * max(16, size)
    with pytest.raises(AssertionError, match="never added, or its versions were discarded"):
        versions.of(np.array([0]))
