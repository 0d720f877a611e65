"""Check a single replay shard, whose importance weights depend on the priorities in all shards."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl import DQN, PERBuffer, QActor, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.replay.r_worker import RWorker, Versions

BETA = 0.5


@pytest.fixture
def make():
    """Return a function that makes a shard with the given storage options.

    The shard holds five transitions, which have the priorities 1 to 5.
    """
    def make_(**options):
        envs = VecEnv.create_factory(CountingEnv)
        agent = {"algo_factory": DQN.create_factory(), "storage_factory": PERBuffer.create_factory(
            10, rollout_size=5, alpha=1.0, beta=BETA, epsilon=1e-12, **options), "actor_factory": QActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(4,))}
        collector = CWorker(1, CWorkerSet.create_factory(1, train_envs_factory=envs, **agent))
        shard = RWorker(1, **agent)
        shard.add(collector.collect(), 0)
        collector.close()
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
