"""Check the replay of whole rollouts against a plain list of all rollouts."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.multi.data import MultiRollout
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.replay.rollouts import RolloutReplay


def rollout(number, num_steps=5, num_envs=2, num_invalid=0):
    """Return a rollout with reward `number` and log-probability `-number` at each step.

    The first `num_invalid` env steps are not valid.
    """
    valid = torch.ones(num_steps, num_envs, dtype=torch.bool)
    valid.view(-1)[:num_invalid] = False
    no = torch.zeros(num_steps, num_envs, dtype=torch.bool)
    return RolloutData(
        obs={"obs": torch.full((num_steps + 1, num_envs, 3), float(number))},
        done=torch.zeros(num_steps + 1, num_envs, dtype=torch.bool),
        rhs={}, mask=None, action=torch.zeros(num_steps, num_envs, dtype=torch.int64),
        reward=torch.full((num_steps, num_envs), float(number)),
        terminated=no, truncated=no, valid=valid, final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={},
        other={"logp": torch.full((num_steps, num_envs), -float(number))})


@pytest.fixture
def make():
    return lambda size, seed=0: RolloutReplay.create_factory(size)(actor=None, algorithm=None, num_envs=2, seed=seed,
                                                                   device="cpu")


def numbers(batch):
    return [int(data.reward[0, 0]) for data in batch.rollouts]


@pytest.mark.parametrize("seed", range(20))
def test_replay_holds_the_newest_whole_rollouts(make, seed):
    """Check the replay against a list of all inserted rollouts, whose lengths are random."""
    rng, size = np.random.default_rng(seed), 60
    storage, came, sizes, drawn, sampled = make(size, seed), [], [], set(), 0
    for number in range(40):
        num_steps, num_invalid = int(rng.integers(1, 15)), int(rng.integers(0, 3))
        steps = 2 * num_steps - num_invalid
        storage.insert_data_slice([rollout(number, num_steps, num_invalid=num_invalid)])
        came.append((number, steps))
        sizes.append(2 * num_steps)
        held = [(n, s) for k, (n, s) in enumerate(came) if sum(s for _, s in came[k:]) <= size and s]
        least = int(rng.integers(1, 100))
        for batch in storage.generate_batches(2, least):
            found = numbers(batch)
            assert set(found) <= {n for n, _ in held}
            assert batch.num_samples == sum(dict(held)[n] for n in found)
            assert sum(sizes[n] for n in found) >= least > sum(sizes[n] for n in found[:-1])
            assert batch.ids.tolist() == [sum(s for _, s in came[:n]) for n in found]
            sampled += batch.num_samples
            drawn.update(found)
        counters = storage.counters
        total, resident = sum(s for _, s in came), sum(s for _, s in held)
        unused = sum(s for n, s in came if n not in drawn and n not in dict(held))
        assert counters == {"inserted": total, "resident": resident, "evicted": total - resident,
                            "evicted_unused": unused,
                            "sampled": sampled}
        assert resident <= size
        assert (storage.num_items, storage.mass) == (len(held), float(len(held)))
        assert storage.num_rows_added == total
        assert storage.num_bytes == sum(
            tensor.nbytes for kept in storage._kept for tensor in (
                *kept.data.obs.values(), kept.data.done, kept.data.action, kept.data.reward, kept.data.terminated,
                kept.data.truncated,
                kept.data.valid, kept.data.final_index, *kept.data.other.values()))
    storage.reset()
    assert storage.counters["resident"] == storage.num_items == storage.num_bytes == 0
    assert list(storage.generate_batches(1, 5)) == []


def test_rollouts_are_sampled_uniformly_with_replacement(make):
    storage = make(70)
    for number in range(9):  # seven of these rollouts fit
        storage.insert_data_slice([rollout(number)])
    (batch,) = storage.generate_batches(1, 10 * 5_000)
    counts = np.bincount(numbers(batch), minlength=9)
    assert counts[:2].tolist() == [0, 0]
    # Chi-squared with 6 degrees of freedom exceeds 22.5 with a probability of 0.001.
    assert ((counts[2:] - 5_000 / 7) ** 2 / (5_000 / 7)).sum() < 22.5
    assert any(len(set(numbers(small))) < 3 for small in storage.generate_batches(50, 30))


def test_sampled_and_inserted_rollouts_are_copies(make):
    storage, given = make(100), rollout(3)
    storage.insert_data_slice([given])
    given.reward.zero_()
    (batch,) = storage.generate_batches(1, 20)
    batch.rollouts[0].other["value"] = torch.zeros(5, 2)  # a learner adds values in the same way
    batch.rollouts[0].other["logp"].zero_()
    (again,) = storage.generate_batches(1, 20)
    for data in (*again.rollouts, batch.rollouts[1]):
        assert data.reward.eq(3).all()
        assert data.other.keys() == {"logp"}
        assert data.other["logp"].eq(-3).all()


def test_a_rollout_that_does_not_fit_is_refused(make):
    with pytest.raises(ConfigError, match="a rollout of 10 env steps does not fit into replay of size 9; increase"):
        make(9).insert_data_slice([rollout(0)])
    make(10).insert_data_slice([rollout(0)])


@pytest.mark.parametrize("several", [False, True])
def test_a_restored_replay_continues_identically(make, several):
    def data(number):
        return MultiRollout({"a": rollout(number), "b": rollout(number, num_envs=4)}, 2) if several else rollout(number)

    def draw(storage):
        return [batch.ids.tolist() for batch in storage.generate_batches(4, 30)]

    storage, other = make(40), make(40, seed=5)
    for number in range(6):
        storage.insert_data_slice([data(number)])
    file = io.BytesIO()
    torch.save(storage.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.counters, other.num_bytes) == (storage.counters, storage.num_bytes)
    assert draw(storage) == draw(other)
    for one in (storage, other):
        one.insert_data_slice([data(6)])
    assert draw(storage) == draw(other)
    (batch,) = other.generate_batches(1, 10)
    parts = batch.rollouts[0].parts.values()
    assert {len({float(part.reward[0, 0]), -float(part.other["logp"][0, 0])}) for part in parts} == {1}
    with pytest.raises(ConfigError, match="replay of size 30 cannot load a state of 40 env steps"):
        make(30).load_state_dict(storage.state_dict())
