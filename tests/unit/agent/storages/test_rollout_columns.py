"""Read the columns of rollouts, with and without tensors that occur repeatedly."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages.rollout_columns import RolloutReader


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
