"""Test `mini_batch_size`, which sets the number of steps per batch."""

from __future__ import annotations

import copy

import pytest
import torch

from pytorchrl.agent.algorithms import A2C, APPO, PPO
from pytorchrl.errors import ConfigError

MEMORY = {"recurrent_net": "gru", "recurrent_size": 5}


def sizes(parts):
    return [batch.num_samples for batch in parts.algorithm.batches(parts.storage)]


@pytest.fixture
def filled(build, collect, made_up_steps):
    """Return a function that builds the parts of a worker and stores a rollout of 8 steps from 4 environments."""
    def make(cls=PPO, next_step=False, **options):
        parts = build(cls, **{"num_epochs": 1, **options})
        parts.storage.insert_data_slice([collect(parts, made_up_steps(4, next_step=next_step))])
        parts.storage.before_gradients()
        return parts
    return make


@pytest.mark.parametrize(("size", "expected"), [
    (8, [8] * 4), (16, [16, 16]), (32, [32]), (31, [16, 16]), (10, [8] * 4), (12, [11, 11, 10]), (1, [1] * 32),
    (100, [32])])
@pytest.mark.parametrize("cls", [PPO, A2C, APPO])
def test_there_are_as_few_batches_as_the_size_allows(filled, cls, size, expected):
    assert sizes(filled(cls, mini_batch_size=size)) == expected


def test_each_pass_has_the_same_batch_sizes(filled):
    assert sizes(filled(mini_batch_size=16, num_epochs=3)) == [16] * 6


def test_reset_steps_do_not_change_the_number_of_updates(filled):
    found = sizes(filled(next_step=True, mini_batch_size=8))
    assert len(found) == 4
    assert 24 < sum(found) < 32
    assert max(found) <= 8


@pytest.mark.parametrize(("length", "size", "num_batches", "largest"), [
    (4, 8, 4, 8), (4, 15, 3, 12), (4, 4, 8, 4), (3, 6, 6, 6), (None, 8, 4, 8), (None, 17, 2, 16)])
def test_batches_of_recurrent_actors_consist_of_whole_sequences(filled, length, size, num_batches, largest):
    found = sizes(filled(mini_batch_size=size, actor=MEMORY, storage={"sequence_length": length}))
    assert (len(found), sum(found)) == (num_batches, 32)
    assert max(found) <= largest <= size


def test_a_batch_smaller_than_a_sequence_is_refused(build):
    with pytest.raises(ConfigError, match="mini_batch_size=3 is less than a sequence, which has 4 steps; set "
                                          "sequence_length to 3 or less"):
        build(PPO, mini_batch_size=3, actor=MEMORY, storage={"sequence_length": 4})


def test_mini_batch_size_trains_like_the_corresponding_num_mini_batch(build, collect, learn, made_up_steps):
    parts = [build(PPO, **{name: value}) for name, value in (("num_mini_batch", 2), ("mini_batch_size", 16),
                                                             ("mini_batch_size", 8))]
    rollout = collect(parts[0], made_up_steps(4))
    for each in parts:
        learn(each, [copy.deepcopy(rollout)])
    assert torch.equal(parts[0].params, parts[1].params)
    assert not torch.equal(parts[0].params, parts[2].params)


@pytest.mark.parametrize("options", [{"num_mini_batch": 4, "mini_batch_size": 64},
                                     {"num_mini_batch": 1, "mini_batch_size": 64}])
def test_giving_both_sizes_is_refused(options):
    with pytest.raises(ConfigError, match=rf"num_mini_batch={options['num_mini_batch']} and mini_batch_size=64 both "
                                          r"set .*give only one"):
        PPO.create_factory(**options)
