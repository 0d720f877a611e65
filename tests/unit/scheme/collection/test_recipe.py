"""Tests of the recipe from which collection workers are built: numbering, codec, and use of TD errors."""

from __future__ import annotations

import pickle

import pytest

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme.collection.recipe import CWorkerRecipe
from pytorchrl.scheme.options.collection import CWorkerOptions, ReplayCWorkerOptions


def make_recipe(options, num_parents=1):
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))
    return CWorkerRecipe(options, PPO.create_factory(), actor, GAEBuffer.create_factory(5), envs,
                         num_parents=num_parents)


@pytest.mark.parametrize(("number", "expected"), [
    (2, {(0, 0): 0, (1, 1): 0, (1, 2): 1, (2, 1): 2, (2, 2): 3}),
    ((1, 3), {(0, 0): 0, (1, 1): 0, (2, 1): 1, (2, 2): 2, (2, 3): 3})], ids=str)
def test_collection_workers_of_all_gradient_workers_are_numbered_in_one_sequence(number, expected):
    recipe = make_recipe(CWorkerOptions(num_col_workers=number), num_parents=2)
    assert {place: recipe.place_of(*place) for place in expected} == {
        place: (index, 4) for place, index in expected.items()}


def test_each_gradient_worker_has_its_own_number_of_collection_workers():
    recipe = make_recipe(CWorkerOptions(num_col_workers=(1, 3)), num_parents=2)
    assert [recipe.num_workers_of(index_parent) for index_parent in (0, 1, 2)] == [1, 1, 3]


@pytest.mark.parametrize(("wanted", "codec"), [(False, None), (True, "lz4"), ("auto", "lz4")])
def test_a_recipe_carries_its_codec_to_other_processes(wanted, codec):
    compression = pickle.loads(pickle.dumps(make_recipe(CWorkerOptions(compress_data_to_send=wanted)))).compression
    assert (None if compression is None else compression.codec.name) == codec


@pytest.mark.parametrize(("options", "expected"), [
    (CWorkerOptions(), False), (ReplayCWorkerOptions(), False),
    (ReplayCWorkerOptions(initial_priority="worker"), True)])
def test_td_errors_are_computed_only_for_initial_priorities(options, expected):
    assert make_recipe(options).finds_errors is expected
