"""Test that the replay of several policies counts env steps and updates the priorities of the right policy."""

from __future__ import annotations

import functools

import numpy as np
import torch

from pytorchrl import (
    DQN, PERBuffer, QActor, ReplayBuffer,
)

LIVES = ((0, 6), (0, 3), (2, 6))


def states(agent):
    return {policy: algo.state_dict() for policy, algo in agent.algo.algorithms.items()}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def replay_agent(make_agent, storage=PERBuffer, size=20, **options):
    algo = DQN.create_factory(**{"start_steps": 0, "mini_batch_size": 6, "update_every": 4, "gamma": 0.5, **options})
    actor = functools.partial(QActor.create_factory, hidden_sizes=(8,))
    return make_agent(algo, actor, storage.create_factory(size, rollout_size=5))


def test_an_env_step_is_resident_while_any_policy_stores_part_of_it(make_agent):
    """Compare the counters with the number of env steps that the rings still contain."""
    agent = replay_agent(make_agent, ReplayBuffer, size=23)
    rollouts = []
    for _ in range(9):
        rollouts.append(agent.collect())
        agent.storage.insert_data_slice([rollouts[-1]], sources=["one"])
        held = set()
        for storage in agent.storage.storages.values():
            ring = storage.ring
            rows = np.flatnonzero(ring.columns["valid"] & (np.arange(ring.capacity) < ring.total))
            held |= {tuple(obs[:3]) for obs in ring.take(rows)["obs"].tolist()}  # the key is (seed, episode, t)
        counters = agent.storage.counters
        assert counters["resident"] == len(held)
        assert counters["inserted"] == 10 * len(rollouts) == counters["resident"] + counters["evicted"]
    assert counters["evicted"] > 0
    agent.storage.reset()
    assert agent.storage.counters["resident"] == 0


def test_updates_count_env_steps_and_sample_from_every_policy(make_agent):
    agent = replay_agent(make_agent, start_steps=10)
    for expected in (0, 2, 3):  # new updates after 10, 20 and 30 env steps: one for every 4 steps beyond 10
        agent.storage.insert_data_slice([agent.collect()])
        batches = list(agent.algo.batches(agent.storage))
        assert len(batches) == expected
        for batch in batches:
            assert {policy: part.num_samples for policy, part in batch.parts.items()} == {"early": 6, "shared": 6}
            assert (batch.num_samples, batch.num_new_samples) == (6, 0)
            assert set(batch.parts["early"].obs["obs"][:, 3].tolist()) == {0}
            assert set(batch.parts["shared"].obs["obs"][:, 3].tolist()) <= {1, 2}
    assert batches[-1].last


def test_priorities_reach_their_policy(make_agent):
    agent = replay_agent(make_agent)
    agent.storage.insert_data_slice([agent.collect()])
    (batch, *_) = agent.algo.batches(agent.storage)
    vectors, info = agent.algo.compute_gradients(batch)
    assert all(vector is not None for vector in vectors)
    told = {}
    for policy, storage in agent.storage.storages.items():
        storage.update_priorities = lambda ids, errors, policy=policy: told.update({
            policy: (ids.tolist(), errors.tolist())})
    agent.storage.after_gradients(batch, info)
    errors = dict(zip(("early", "shared"), torch.split(info["errors"], 6), strict=True))
    assert told == {policy: (batch.parts[policy].ids.tolist(), errors[policy].tolist()) for policy in errors}
    # A policy that is not trained returns no errors, so its priorities are not updated.
    told.clear()
    agent.algo.update_algorithm_parameter("shared/trainable", False)
    agent.storage.after_gradients(batch, agent.algo.compute_gradients(batch)[1])
    assert set(told) == {"early"}


def test_a_restored_replay_continues_exactly(make_agent):
    agent, other = replay_agent(make_agent), replay_agent(make_agent)
    for _ in range(3):
        agent.storage.insert_data_slice([agent.collect()], sources=["one"])
    other.storage.load_state_dict(agent.storage.state_dict())
    assert other.storage.counters == agent.storage.counters
    one, another = (next(storage.generate_batches(1, 6)) for storage in (agent.storage, other.storage))
    assert torch.equal(one.ids, another.ids)
    rollout = agent.collect()
    for storage in (agent.storage, other.storage):
        storage.insert_data_slice([rollout], sources=["one"])
    assert other.storage.counters == agent.storage.counters


# Errors
