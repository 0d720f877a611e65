"""Tests of which rollouts make up a train batch."""

from __future__ import annotations

import pytest

from pytorchrl.scheme.gradients.sample_queue import TrainBatchBuilder
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader


def make_rollout(number, num_steps=50, num_resets=0):
    return Rollout(None, RolloutHeader(num_env_steps=num_steps - num_resets, size=num_steps, collected_steps=0,
                                       weights_version=number, worker=1, sequence=number))


def builder_of(size, replay_proportion=0.0, replay_slots=0, seed=0):
    return TrainBatchBuilder(size, replay_proportion, replay_slots, seed)


@pytest.mark.parametrize(("rollout", "expected"), [(50, 500), (60, 540), (512, 512)])
def test_a_train_batch_has_enough_whole_rollouts(rollout, expected):
    batches = builder_of(500)
    items = [item for number in range(60) for item in batches.add([make_rollout(number, rollout)], 3)]
    assert {item.num_steps for item in items} == {expected}
    versions = [part.rollout.header.weights_version for item in items for part in item.rollouts]
    assert versions == list(range(len(versions)))  # each rollout is used once, in order
    assert batches.pending_share == (60 * rollout - len(items) * expected) / 500


def test_reset_steps_do_not_add_rollouts_to_a_train_batch():
    """Check that reset steps count toward the size of a train batch, but are not counted as env steps."""
    items = list(builder_of(100).add([make_rollout(number, num_resets=number) for number in range(6)], 3))
    assert [(item.size, item.num_steps) for item in items] == [(100, 99), (100, 95), (100, 91)]


def test_rollouts_that_arrive_together_are_a_train_batch_by_default():
    (item,) = builder_of(None).add([make_rollout(1), make_rollout(2)], 4)
    assert [(part.rollout.header.weights_version, part.version_queued) for part in item.rollouts] == [(1, 4), (2, 4)]


@pytest.mark.parametrize(("proportion", "kinds"), [(0.5, "NNRNNRNNRNNR"), (2.0, "NRRNRRNRRNRR"), (1.0, "NRNRNRNRNRNR"),
                                                   (0.3, "NNNNRNNNRNNNR")])
def test_old_rollouts_are_mixed_in(proportion, kinds):
    """Check the order of new (N) and old (R) rollouts after the first train batch, which has two new rollouts."""
    batches = builder_of(100, proportion, 4, seed=3)
    parts = [part for number in range(200) for item in batches.add([make_rollout(number)], 0) for part in item.rollouts]
    assert [part.is_old for part in parts[:2]] == [False, False]
    assert "".join("NR"[part.is_old] for part in parts[2:2 + len(kinds)]) == kinds
    newest, drawn = -1, set()
    for part in parts:
        number = part.rollout.header.weights_version
        if part.is_old:
            assert newest - 4 <= number < newest  # one of the four rollouts before the newest one
            drawn.add(newest - number)
        else:
            assert number == newest + 1
            newest = number
    assert drawn == {1, 2, 3, 4}


def test_steps_of_old_rollouts_do_not_count_as_new():
    item = TrainBatch([QueuedRollout(make_rollout(0, 30), 1), QueuedRollout(make_rollout(4, 20), 1, is_old=True)])
    assert (item.num_steps, item.num_new_steps, item.version) == (50, 30, 0)
