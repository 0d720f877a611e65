"""Tests of the kind of collection that flat keywords select, and of errors for contradictory options."""

from __future__ import annotations

import itertools

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.scheme import ASYNC, SYNC, AsynchronousCollection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.collection import COLLECTION_KINDS
from pytorchrl.scheme.options.settings import collection_of


@pytest.mark.parametrize(("communication", "shards"), list(itertools.product((None, SYNC, ASYNC), (None, 1, 2))))
def test_communication_and_shards_select_the_kind(communication, shards):
    given = {"num_replay_workers": shards} | ({} if communication is None else {"col_communication": communication})
    if communication is not ASYNC and shards:
        with pytest.raises(ConfigError, match="num_replay_workers needs col_communication='asynchronous'"):
            collection_of(given)
        return
    of_communication = AsynchronousCollection if communication is ASYNC else SynchronousCollection
    assert type(collection_of(given)) is (ReplayCollection if shards else of_communication)


@pytest.mark.parametrize("kind", COLLECTION_KINDS)
def test_no_two_kinds_have_the_same_options(kind):
    others = [set(other.declarations()) for other in COLLECTION_KINDS if other is not kind]
    assert set(kind.declarations()) not in others


def test_all_problems_of_keywords_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        collection_of({"queue_size": 2, "col_fraction_workers": 2.0})
    assert all(name in str(caught.value) for name in ("queue_size", "col_fraction_workers"))
    with pytest.raises(ConfigError, match="did you mean 'queue_size'"):
        collection_of({"queue_sizes": 2})


@pytest.mark.parametrize("kind", [SynchronousCollection, AsynchronousCollection])
def test_a_microbatch_is_no_larger_than_its_train_batch(kind):
    for train, micro in itertools.product((None, 8, 16), (None, 8, 16)):
        if None not in (train, micro) and micro > train:
            with pytest.raises(ConfigError, match="microbatch_size must not exceed train_batch_size, got 16 > 8"):
                kind(train_batch_size=train, microbatch_size=micro)
        else:
            kind(train_batch_size=train, microbatch_size=micro)
