"""Test the storage of several policies: different numbers of batches per policy, and the memory of each agent."""

from __future__ import annotations

import functools

import torch

from pytorchrl import (
    PPO, OnPolicyActor,
)

LIVES = ((0, 6), (0, 3), (2, 6))


def test_a_policy_with_few_samples_is_absent_from_the_last_batches(make_agent):
    """Check the batches of 2 epochs with up to 4 batches each.

    Policy `early` has only 2 samples, so it has 2 batches per epoch, 4 in all. Policy `shared` has 8 batches.
    """
    algorithm = PPO.create_factory(num_epochs=2, num_mini_batch=4)
    agent = make_agent(algorithm, env_kwargs={"lives": ((0, 1), (0, 6), (0, 6))}, size=6)
    agent.storage.insert_data_slice([agent.collect()])
    agent.storage.before_gradients()
    batches = list(agent.algo.batches(agent.storage))
    assert [sorted(batch.parts) for batch in batches] == [["early", "shared"]] * 4 + [["shared"]] * 4
    assert [batch.last for batch in batches] == [False] * 7 + [True]
    assert sum(batch.num_new_samples for batch in batches) == 12  # each env step is counted as new only once
    assert sum(batch.num_samples for batch in batches) == 24  # each env step is used in two epochs


def test_memory_is_stored_per_agent(make_agent):
    agent = make_agent(actors=functools.partial(
        OnPolicyActor.create_factory, hidden_sizes=(8,), recurrent_net="gru", recurrent_size=4), size=8)
    rollout = agent.collect()
    states_before = rollout.parts["shared"].rhs
    assert all(state.shape[:2] == (9, 4) for state in states_before.values())
    agent.storage.insert_data_slice([rollout])
    agent.storage.before_gradients()
    (batch,) = agent.algo.batches(agent.storage)
    assert batch.parts["shared"].valid is not None
    assert batch.parts["shared"].num_samples == int(rollout.parts["shared"].valid.sum())
    assert all(torch.isfinite(vector).all() for vector in agent.algo.compute_gradients(batch)[0])
