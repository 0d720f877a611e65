"""Test the ring of transitions: which ids are resident, and which rollouts continue their predecessors."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import HostRows, RolloutData
from pytorchrl.errors import ArgumentError
from pytorchrl.agent.storages.ring import Ring, RolloutReader
from tests.unit.agent.storages.test_replay import rollout_of


def insert(ring, observations, source="collector", **ends):
    return ring.insert(rollout_of(np.zeros(len(observations) - 1), obs=observations, **ends), source)


def test_ids_since_the_oldest_row_are_resident():
    ring = Ring(4)
    insert(ring, [0, 1, 2, 3])
    insert(ring, [3, 4, 5])  # evicts the row with id 0
    assert ring.resident(np.arange(5)).tolist() == [False, True, True, True, True]
    assert ring.resident(np.zeros(0, np.int64)).tolist() == []
    for ids in ([5], [-1]):
        with pytest.raises(ArgumentError, match=r"ids must be in \[0, 5\)"):
            ring.resident(np.array(ids))


def test_a_rollout_continues_the_last_one_if_their_observations_match():
    ring = Ring(40)
    assert insert(ring, [0, 1, 2]).continued.tolist() == [False]
    assert insert(ring, [7, 8, 9], source="another").continued.tolist() == [False]
    beginning = rollout_of([0.0, 0.0], obs=[2, 3, 4])
    beginning.done[0] = False  # the episode continues from the previous rollout
    assert ring.insert(beginning, "collector").continued.tolist() == [True]
    assert ring.columns["link"][[0, 1, 2, 3]].tolist()[:2] == [1, 4]  # rows 2 and 3 are from source "another"
    elsewhere = rollout_of([0.0, 0.0], obs=[6, 7, 8])
    elsewhere.done[0] = False
    assert ring.insert(elsewhere, "collector").continued.tolist() == [False]


def test_a_rollout_of_another_number_of_environments_does_not_continue_the_last_one():
    ring, rollout = Ring(40), rollout_of([0.0, 0.0], obs=[2, 3, 4])
    rollout.done[:] = False
    for num_envs in (2, 3, 1, 2):
        several = rollout.map(lambda tensor, n=num_envs: torch.cat([tensor] * n, dim=1) if tensor.ndim > 1 else tensor)
        several = dataclasses.replace(several, final_index=rollout.final_index, final_obs=rollout.final_obs)
        assert ring.insert(several, "collector").continued.tolist() == [False] * num_envs


def test_a_rollout_on_a_device_continues_the_one_with_the_previous_number():
    """Observations on a device are not compared, so these differ."""
    ring = Ring(40)
    ring.device = torch.device("cpu")
    for number, is_continued in ((1, False), (2, True), (4, False), (5, True), (5, False)):
        rollout = rollout_of([0.0, 0.0], obs=[2, 3, 4])
        rollout.done[:] = False
        host = HostRows(
            *(getattr(rollout, name).numpy() for name in (
                "done", "action", "reward", "terminated", "truncated", "valid", "final_index")),
            is_sound=True, number=number, episodes=[])
        inserted = ring.insert(dataclasses.replace(rollout, host=host), "collector")
        assert inserted.continued.tolist() == [is_continued], number


def test_rows_after_which_an_episode_ends_link_to_its_last_observation():
    """Check that a row's link leads to the next observation, regardless of how the episode ends."""
    ring = Ring(40)
    insert(ring, range(7), terminated=[1], truncated=[4])
    link = ring.columns["link"][:6]
    assert (link >= 0).tolist() == [True, False, True, True, False, False]
    assert torch.tensor(ring.take(link[[1, 4]])["obs"]).flatten().tolist() == [101, 104]


@pytest.fixture
def rollout():
    steps, envs = 3, 2
    flags = {name: torch.rand(steps, envs) < 0.5 for name in ("terminated", "truncated", "valid")}
    return RolloutData(
        obs={"a": torch.rand(steps + 1, envs, 4), "b": torch.rand(steps + 1, envs)},
        done=torch.rand(steps + 1, envs) < 0.5, rhs={}, mask=torch.rand(steps + 1, envs, 5) < 0.5,
        action=torch.rand(steps, envs, 2), reward=torch.rand(steps, envs), **flags,
        final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={})


def assert_views(found, rollout, in_sequences):
    leaves = {"obs/a": rollout.obs["a"], "obs/b": rollout.obs["b"], "mask": rollout.mask}
    columns = {name: getattr(rollout, name) for name in ("action", "reward", "terminated", "truncated", "valid")}
    if in_sequences:
        columns["done"] = rollout.done[:-1]
    assert list(found.leaves) == list(leaves)
    assert list(found.columns) == list(columns)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(found.leaves[name], leaf.numpy(), strict=True)
    for name, column in columns.items():
        np.testing.assert_array_equal(found.columns[name], column.transpose(0, 1).numpy(), strict=True)
    np.testing.assert_array_equal(found.done, rollout.done.numpy(), strict=True)


@pytest.mark.parametrize("in_sequences", [False, True])
def test_repeated_tensors_are_known_and_show_their_new_contents(rollout, in_sequences):
    reader = RolloutReader(in_sequences)
    for is_known in (False, False, True, True):
        rollout.action.uniform_()
        rollout.done.logical_not_()
        found, were_known = reader.read(dataclasses.replace(rollout))
        assert were_known is is_known
        assert_views(found, rollout, in_sequences)


@pytest.mark.parametrize("change", [
    lambda rollout: {"action": rollout.action + 1}, lambda rollout: {"mask": None},
    lambda rollout: {"done": ~rollout.done},
    lambda rollout: {"obs": {**rollout.obs, "b": rollout.obs["b"] + 1}},
    lambda rollout: {"obs": {"a": rollout.obs["a"]}},
    lambda rollout: {"obs": {"a": rollout.obs["a"], "c": rollout.obs["b"]}}],
    ids=["action", "mask", "done", "leaf", "fewer leaves", "other name"])
def test_other_tensors_are_read_again(rollout, change):
    reader = RolloutReader(False)
    for _ in range(3):
        before, _ = reader.read(rollout)
    other = dataclasses.replace(rollout, **change(rollout))
    found, is_known = reader.read(other)
    assert not is_known
    assert list(found.leaves) == [*(f"obs/{name}" for name in other.obs), *(["mask"] if other.mask is not None else [])]
    differs = not np.array_equal(found.columns["action"], before.columns["action"])
    assert differs == (other.action is not rollout.action)
    assert np.array_equal(found.done, before.done) == (other.done is rollout.done)


def test_tensors_that_were_read_once_are_not_kept_alive(rollout):
    reader = RolloutReader(False)
    for _ in range(3):
        reader.read(rollout.map(torch.clone))
    copy = rollout.map(torch.clone)
    references = [weakref.ref(tensor) for tensor in (copy.reward, copy.action, copy.obs["a"])]
    reader.read(copy)
    del copy
    assert [reference() for reference in references] == [None] * 3
