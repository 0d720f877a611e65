"""Tests of the sizes of train batches and microbatches; simple loops compute the expected sizes."""

from __future__ import annotations

import itertools

import pytest

from pytorchrl import A2C, PPO, GAEBuffer, OnPolicyActor, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme import AsynchronousCollection, CWorkerSet, SynchronousCollection
from pytorchrl.scheme.collection.c_worker import CWorker, Role
from pytorchrl.scheme.gradients.batch_plan import BatchPlan, plan_batches
from pytorchrl.scheme.gradients.microbatch import num_rollouts

ENVS = VecEnv.create_factory(CountingEnv, None, 2)
STREAMED = {"train_batch_size": 64, "microbatch_size": 16}


class Watched(GAEBuffer):
    """A storage that records the number of rollouts for which it plans batches."""

    planned = None

    def plan_batches(self, num_rollouts):
        self.planned = num_rollouts
        super().plan_batches(num_rollouts)


@pytest.fixture
def plan():
    """Return a function that plans batches, and returns the plan and the number of rollouts in a train batch."""
    def plan_(collection, num_remote=2, algo=None):
        actor = OnPolicyActor.create_factory(ENVS.observation_space, ENVS.action_space, hidden_sizes=(4,))
        recipe = CWorkerSet.create_factory(1, algo or A2C.create_factory(), actor, Watched.create_factory(8), ENVS)
        worker = CWorker(0, recipe, role=Role.SERVER)
        return plan_batches(collection, worker, num_remote), worker.storage.planned
    return plan_


@pytest.mark.parametrize(("rollout", "wanted", "rounds", "expected"), [
    (16, None, (1, None), 1), (16, None, (3, None), 3), (16, None, None, 1), (16, 40, None, 3), (16, 48, None, 3),
    (16, 40, (2, None), 4),
    (16, 100, (2, 40), 8), (16, 128, (2, 40), 8), (16, 129, (2, 40), 12), (16, None, (2, 4), 2)])
def test_rollouts_of_a_train_batch(rollout, wanted, rounds, expected):
    assert num_rollouts(rollout, wanted, rounds) == expected


@pytest.mark.parametrize(("per_round", "microbatch"), list(itertools.product((1, 2, 3), (None, 1, 20, 40))))
def test_whole_rounds_are_collected_until_the_batch_is_full(per_round, microbatch):
    """Check the number of rollouts against two loops.

    The first loop fills a microbatch with whole rounds, and the second fills the train batch with microbatches.
    """
    rollout = 16
    for wanted in range(1, 200):
        piece = per_round
        while rollout * piece < (microbatch or 1):
            piece += per_round
        total = piece
        while rollout * total < wanted:
            total += piece
        assert num_rollouts(rollout, wanted, (per_round, microbatch)) == total


@pytest.mark.parametrize(("collection", "num_remote", "expected"), [
    (SynchronousCollection(), 0, 1), (SynchronousCollection(), 3, 3),
    (SynchronousCollection(train_batch_size=40), 2, 4), (AsynchronousCollection(), 3, 1),
    (AsynchronousCollection(train_batch_size=40), 3, 3)])
def test_the_storage_is_prepared_for_the_rollouts_of_a_batch(plan, collection, num_remote, expected):
    """Check for how many rollouts the storage plans; each rollout has 8 steps of 2 environments."""
    assert plan(collection, num_remote)[1] == expected


@pytest.mark.parametrize(("fraction", "least"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.1, 1), (0.05, 0)])
def test_a_preempted_worker_collects_a_share_of_a_rollout(plan, fraction, least):
    collection = SynchronousCollection(num_col_workers=2, col_fraction_workers=0.5, fraction_samples=fraction)
    assert plan(collection)[0] == BatchPlan(train_batch_size=None, microbatch_size=None, least_steps=least)


@pytest.mark.parametrize(("options", "num_remote", "algo", "is_streamed", "prefetch"), [
    (STREAMED, 2, A2C.create_factory(), True, 1), (STREAMED, 0, A2C.create_factory(), True, 0),
    (STREAMED | {"prefetch": 0}, 2, A2C.create_factory(), True, 0),
    (STREAMED | {"col_fraction_workers": 0.5}, 2, A2C.create_factory(), True, 0),
    ({"microbatch_size": 16}, 2, A2C.create_factory(), False, 0),
    (STREAMED, 2, PPO.create_factory(num_epochs=2), False, 0)],
    ids=["remote", "local", "none ahead", "preempted", "rounds", "passes"])
def test_microbatches_used_only_once_are_streamed_and_prefetched(
        plan, options, num_remote, algo, is_streamed, prefetch):
    found, _ = plan(SynchronousCollection(num_col_workers=2, **options), num_remote, algo)
    assert (found.is_streamed, found.prefetch, found.microbatch_size) == (is_streamed, prefetch, 16)
