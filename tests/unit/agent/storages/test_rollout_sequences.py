"""Compare sequences sampled from a replay of whole rollouts with plain lists of the same rollouts."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages import RolloutSequenceBuffer
from pytorchrl.errors import ConfigError
from tests.unit.agent.storages.comparison import assert_masks, assert_observations, assert_targets

STATE, GAMMA = 3, 0.9


@pytest.fixture
def build(build_replay):
    def make(size=200, **options):
        return build_replay(RolloutSequenceBuffer, size, gamma=GAMMA, state_size=STATE, **options)
    return make


class Kept:
    """An inserted rollout: the rows of each environment, as the collector recorded them."""

    def __init__(self, collector, rollout, first):
        self.first, self.num_steps = first, rollout.num_steps
        self.columns = [[row for row in made if row is not None][-rollout.num_steps:] for made in collector.made]

    @property
    def num_rows(self):
        return self.num_steps * len(self.columns)

    @property
    def num_valid(self):
        return sum(row.valid for rows in self.columns for row in rows)


def observations_of(rows):
    """Return a list of (obs, mask, row or None) for one environment of a rollout.

    The row is None for the last observation of an episode or rollout, because no step starts from it.
    """
    found = []
    for i, row in enumerate(rows):
        found.append((row.obs, row.mask, row))
        if i + 1 == len(rows) or row.next_obs["number"] != rows[i + 1].obs["number"]:
            found.append((row.next_obs, row.next_mask, None))
    return found


def target_of(rows, i, n_step):
    """Return (n-step return, discount, next observation, next mask) of step i, from the steps of its rollout only."""
    total, m = 0.0, 0
    while True:
        last = rows[i + m]
        total += GAMMA**m * float(last.reward)
        m += 1
        if m == n_step or last.terminated or last.truncated or i + m == len(rows) or not rows[i + m].valid:
            return total, 0.0 if last.terminated else GAMMA**m, last.next_obs, last.next_mask


def check_columns(batch, drawn, n_step):
    """Compare each column of a batch with the rows of its rollout, which are the elements of `drawn`."""
    length, seen, trained = len(batch.done), [], []
    assert batch.weight.tolist() == [1.0] * len(drawn)
    for b, rows in enumerate(drawn):
        expected = observations_of(rows)
        steps = [i for i, (*_, row) in enumerate(expected) if row is not None and row.valid]
        assert batch.valid[:, b].nonzero().flatten().tolist() == steps
        np.testing.assert_array_equal(batch.rhs["q"][b], rows[0].states["q"])
        is_first = [bool(row is not None and row.valid and row.is_first) for *_, row in expected]
        assert batch.done[:, b].tolist() == is_first + [False] * (length - len(expected))
        # After the end of the rollout, its last observation is repeated.
        seen += [(at, b, *expected[min(at, len(expected) - 1)][:2]) for at in range(length)]
        trained += [(at, b, expected[at][2].action, *target_of(rows, rows.index(expected[at][2]), n_step))
                    for at in steps]
    steps, columns, obs, masks = zip(*seen, strict=True)
    assert_observations(batch.obs, (steps, columns), obs)
    assert_masks(batch.mask, (steps, columns), masks)
    steps, columns, actions, returns, discounts, next_obs, next_masks = zip(*trained, strict=True)
    assert batch.action[steps, columns].tolist() == list(actions)
    assert_targets(batch, (steps, columns), returns, discounts)
    following = batch.next_row[steps, columns].numpy(), columns
    assert_observations(batch.obs, following, next_obs)
    assert_masks(batch.mask, following, next_masks)


@pytest.mark.parametrize("n_step", [1, 3, 9])
@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize(("frames", "p_end"), [(0, 0.3), (0, 0.03), (3, 0.1)])
def test_batches_equal_the_rollouts(n_step, same_step, frames, p_end, build, make_collector):
    """Check the batches of two collectors of different sizes, which insert rollouts in random order.

    Rollouts have different lengths, and environments restart.
    """
    rng = np.random.default_rng([n_step, same_step, frames, int(100 * p_end)])
    collectors = [make_collector(
        seed=s, num_envs=1 + s, num_steps=9, same_step=same_step, num_frames=frames, p_end=p_end, p_life=0.05,
        p_cut=0.2,
        with_mask=frames == 3, first_number=s * 10**6, state_size=STATE, picture=(2, 2)) for s in range(2)]
    storage, kept, total, num_rows, num_extra = build(90, stacked_frames=frames or None, n_step=n_step), [], 0, 0, 0
    for turn in range(28):
        source = int(rng.integers(2))
        if rng.random() < 0.05:
            collectors[source].restart()
        rollout = collectors[source].collect(int(rng.integers(1, 10)))
        storage.insert_data_slice([rollout], sources=[source])
        new = Kept(collectors[source], rollout, num_rows)
        if new.num_valid:
            num_rows += new.num_rows
            kept.append(new)
            total += new.num_valid
        while sum(one.num_rows for one in kept) > 90:
            kept.pop(0)
        assert storage.num_items == storage.mass == len(kept)
        counters = storage.counters
        assert (counters["inserted"], counters["resident"]) == (total, sum(one.num_valid for one in kept))
        assert counters["inserted"] == counters["resident"] + counters["evicted"]
        if not kept:
            continue
        batch = storage.sample(1 if turn % 4 else 30)
        starts = {one.first + e * one.num_steps: rows for one in kept for e, rows in enumerate(one.columns)}
        drawn = [starts[start] for start in batch.ids.tolist()]
        check_columns(batch, drawn, n_step)
        num_extra += sum(len(observations_of(rows)) - len(rows) - 1 for rows in drawn)
        # The batch has all valid transitions of a rollout, from all environments, once for each time it was sampled.
        actions = [row.action for rows in drawn for row in rows if row.valid]
        assert sorted(batch.action[batch.valid].tolist()) == sorted(actions)
        assert batch.num_samples == len(actions)
        times = Counter(batch.ids.tolist())
        assert all(len({times[one.first + e * one.num_steps] for e in range(len(one.columns))}) == 1 for one in kept)
    assert (num_extra > 0) == same_step  # only SAME_STEP adds last observations within a rollout


def test_whole_rollouts_are_sampled_until_there_are_enough_sequences(build, make_collector):
    storage, collector = build(100), make_collector(num_envs=3, num_steps=4, state_size=STATE)
    for _ in range(5):
        storage.insert_data_slice([collector.collect()])
    for wanted, count in ((1, 3), (3, 3), (4, 6), (7, 9)):
        ids = storage.sample(wanted).ids.reshape(-1, 3)
        assert len(ids) == count / 3
        assert (ids[:, 0] % 12 == 0).all()
        assert (ids - ids[:, :1] == torch.tensor([0, 4, 8])).all()


def test_the_last_batch_of_rollouts_is_marked(build, make_collector):
    storage, collector = build(100), make_collector(num_envs=3, num_steps=4, state_size=STATE)
    storage.insert_data_slice([collector.collect()])
    assert [batch.last for batch in storage.generate_batches(2, 3, num_epochs=2)] == [False] * 3 + [True]
    assert not storage.sample(1).last


def test_rollouts_are_sampled_uniformly_with_replacement(build, make_collector):
    storage, collector = build(70), make_collector(num_envs=2, num_steps=5, state_size=STATE)
    for _ in range(9):  # the storage has room for 7 rollouts
        storage.insert_data_slice([collector.collect()])
    counts = np.bincount(storage.sample(2 * 7000).ids[::2].numpy() // 10, minlength=9)
    assert counts[:2].tolist() == [0, 0]
    # Chi-squared with 6 degrees of freedom exceeds 22.5 with probability 0.001.
    assert ((counts[2:] - 1000) ** 2 / 1000).sum() < 22.5


def test_a_rollout_is_evicted_whole_and_counts_its_uses(build, make_collector):
    storage, drawn = build(30), Counter()
    collector = make_collector(num_envs=2, num_steps=5, state_size=STATE, p_end=0.0)
    for number in range(6):
        storage.insert_data_slice([collector.collect()])
        drawn.update(storage.sample(3).ids[::2].tolist())
        assert storage.counters["resident"] == 10 * min(number + 1, 3)
    assert storage.counters["evicted_unused"] == 10 * [drawn[first] for first in (0, 10, 20)].count(0)
    assert storage.counters["sampled"] == 10 * sum(drawn.values())
    storage.insert_data_slice([collector.collect(1)])  # two new rows evict a whole rollout of ten rows
    assert storage.counters["resident"] == 22


def test_a_rollout_that_does_not_fit_is_refused_and_changes_nothing(build, make_collector):
    storage = build(20)
    storage.insert_data_slice([make_collector(num_envs=2, num_steps=9, state_size=STATE).collect()])
    with pytest.raises(ConfigError, match="2 environments x 11 steps does not fit in a replay of size 20"):
        storage.insert_data_slice([make_collector(num_envs=2, num_steps=11, state_size=STATE).collect()])
    assert storage.num_items == 1


def test_inserted_rollouts_are_copied(build, make_collector):
    storage, rollout = build(), make_collector(num_envs=1, state_size=STATE).collect()
    storage.insert_data_slice([rollout])
    expected = rollout.rhs["q"][0].clone()
    rollout.rhs["q"].zero_()
    assert torch.equal(storage.sample(1).rhs["q"], expected)
    storage.sample(1).rhs["q"].fill_(7)
    assert torch.equal(storage.sample(1).rhs["q"], expected)


def test_a_restored_storage_continues_identically(build, make_collector):
    collector = make_collector(num_envs=2, num_steps=5, state_size=STATE)
    storage, other = build(47, n_step=2), build(47, n_step=2, seed=8)
    for _ in range(7):
        storage.insert_data_slice([collector.collect()])
    storage.sample(5)
    file = io.BytesIO()
    torch.save(storage.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(4):
        rollout = collector.collect(3)
        for one in (storage, other):
            one.insert_data_slice([rollout])
        ours, theirs = storage.sample(9), other.sample(9)
        for name in ("ids", "action", "ret", "discount", "valid", "done", "next_row"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert torch.equal(ours.obs["obs"], theirs.obs["obs"])
        assert torch.equal(ours.rhs["q"], theirs.rhs["q"])
        assert (storage.counters, storage.num_bytes) == (other.counters, other.num_bytes)


def test_reset_removes_everything(build, make_collector):
    storage, collector = build(30), make_collector(num_envs=2, num_steps=5, state_size=STATE)
    for _ in range(2):
        storage.insert_data_slice([collector.collect()])
    storage.reset()
    assert storage.sample(1) is None
    assert (storage.num_items, storage.mass) == (0, 0.0)
    assert (storage.counters["resident"], storage.counters["evicted"]) == (0, 20)
    for _ in range(4):
        storage.insert_data_slice([collector.collect()])
    assert set(storage.sample(100).ids.tolist()) == {30, 35, 40, 45, 50, 55}


def test_states_count_as_memory(build, make_collector):
    storage, collector = build(100), make_collector(num_envs=2, num_steps=5, state_size=STATE)
    storage.insert_data_slice([collector.collect()])
    assert storage.num_bytes == storage.ring.num_bytes + 2 * STATE * 4


def test_targets_end_with_an_episode_without_a_last_observation(build):
    """Check that targets end at a termination for which the rollout has no last observation.

    The row after the termination is the first step of the next episode.
    """
    count = 5
    flags = lambda at: torch.tensor([[t in at] for t in range(count)])  # noqa: E731
    done = torch.zeros(count + 1, 1, dtype=torch.bool)
    done[[0, 2]] = True
    storage = build(n_step=3)
    storage.insert_data_slice([RolloutData(
        obs={"obs": torch.arange(count + 1.0).reshape(-1, 1, 1)}, done=done,
        rhs={"q": torch.zeros(count + 1, 1, STATE)},
        mask=None, action=torch.zeros(count, 1, dtype=torch.int64), reward=torch.ones(count, 1), terminated=flags([1]),
        truncated=flags([]), valid=flags(range(count)), final_index=torch.zeros((0, 2), dtype=torch.int64),
        final_obs={})])
    batch = storage.sample(1)
    three, two = 1 + GAMMA + GAMMA**2, 1 + GAMMA
    assert batch.ret[:, 0].tolist() == pytest.approx([two, 1, three, two, 1])
    assert batch.discount[:, 0].tolist() == pytest.approx([0, 0, GAMMA**3, GAMMA**2, GAMMA])
