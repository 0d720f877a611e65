"""Test the ring of transitions: which ids are resident, and which rollouts continue their predecessors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.agent.storages.ring import Ring
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
        with pytest.raises(ValueError, match=r"ids must be in \[0, 5\)"):
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


def test_rows_after_which_an_episode_ends_link_to_its_last_observation():
    """Check that a row's link leads to the next observation, regardless of how the episode ends."""
    ring = Ring(40)
    insert(ring, range(7), terminated=[1], truncated=[4])
    link = ring.columns["link"][:6]
    assert (link >= 0).tolist() == [True, False, True, True, False, False]
    assert torch.tensor(ring.take(link[[1, 4]])["obs"]).flatten().tolist() == [101, 104]
