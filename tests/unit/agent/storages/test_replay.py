"""Test uniform replay: n-step windows, streams, the wrapped ring, stacked frames and states."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.agent.storages.observation_columns import StackedColumn
from pytorchrl.errors import ArgumentError, ConfigError


def rollout_of(reward, terminated=(), truncated=(), obs=None, dtype=torch.float32):
    """Return a rollout of one environment; observation t is `obs[t]` or t, and a final observation is 100 + t."""
    count = len(reward)
    flags = lambda at: torch.tensor([[t in at] for t in range(count)])  # noqa: E731
    ends = sorted({*terminated, *truncated})
    done = torch.zeros(count + 1, 1, dtype=torch.bool)
    done[[0, *[t + 1 for t in ends]]] = True
    return RolloutData(
        obs={"obs": torch.as_tensor(range(count + 1) if obs is None else obs, dtype=dtype).reshape(-1, 1, 1)},
        done=done,
        rhs={}, mask=None, action=torch.arange(count)[:, None],
        reward=torch.tensor(reward, dtype=torch.float32)[:, None],
        terminated=flags(terminated), truncated=flags(truncated), valid=flags(range(count)),
        final_index=torch.tensor([[t, 0] for t in ends], dtype=torch.int64).reshape(-1, 2),
        final_obs={"obs": torch.tensor([[100 + t] for t in ends], dtype=dtype).reshape(-1, 1)})


def by_action(batch, *names):
    """Return {action: values of the fields `names`} for the transitions of a batch."""
    values = [getattr(batch, name) for name in names]
    return {a: tuple(round(float(v[b]), 6) for v in values) for b, a in enumerate(batch.action.tolist())}


def test_n_step_returns_on_golden_values(build_replay):
    storage = build_replay(ReplayBuffer, 6, gamma=0.5, n_step=3)
    storage.insert_data_slice([rollout_of([1, 2, 3, 4, 5, 6], terminated=[2], truncated=[4])])
    drawn = by_action(storage.sample(300), "ret", "discount")
    assert [drawn[t] for t in range(6)] == [(2.75, 0), (3.5, 0), (3, 0), (6.5, 0.25), (5, 0.5), (6, 0.5)]
    window = storage.ring.window(np.arange(6), 3, 0.5)
    assert window.num_steps.tolist() == [3, 2, 1, 2, 1, 1]
    batch = storage.sample(300)
    following = dict(zip(batch.action.tolist(), batch.next_obs["obs"][:, 0].tolist(), strict=True))
    assert [following[t] for t in range(6)] == [102, 102, 102, 104, 104, 6]


def assert_extras_belong_to_rows(ring):
    """Assert that every stored frame belongs to a resident row, and that no frame is stored twice."""
    rows = np.arange(ring.first, ring.total) % ring.capacity
    link = ring.columns["link"][rows]
    extras = -1 - link[link < 0]
    assert len(set(extras)) == len(extras) == len(ring.extras.taken)
    for leaf in ring.observations.values():
        if isinstance(leaf, StackedColumn):
            in_use = leaf.slots.taken[1:]  # slot 0 is the black frame
            assert set(leaf.owners[in_use]) <= {*rows, *(-1 - extras)}


@pytest.mark.every(3)
@pytest.mark.parametrize("cls", [ReplayBuffer, PERBuffer])
@pytest.mark.parametrize(("frames", "padding"), [(0, "-"), (4, "zero"), (3, "copy"), (4, "keep"), (4, "noise")])
@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("n_step", [1, 4])
def test_batches_equal_those_of_a_list_implementation(
        cls, frames, padding, same_step, n_step, build_replay, make_collector, make_plain_replay, assert_batch_equals):
    """Check the batches of two collectors of different sizes, which insert rollouts in random order.

    Some rollouts are short, and environments restart.
    """
    rng = np.random.default_rng([n_step, frames, same_step])
    collectors = [make_collector(
        seed=s, num_envs=2 + s, num_steps=6, same_step=same_step, num_frames=frames, padding=padding, p_life=0.1,
        p_cut=0.2,
        with_mask=frames == 3, first_number=s * 10**6) for s in range(2)]
    for capacity in (23, 64):
        storage = build_replay(cls, capacity, n_step=n_step, stacked_frames=frames or None)
        plain = make_plain_replay(capacity)
        for turn in range(16):
            source = int(rng.integers(2))
            if rng.random() < 0.05:
                collectors[source].restart()
            steps = int(rng.integers(1, 7))
            storage.insert_data_slice([collectors[source].collect(steps)], sources=[source])
            plain.insert(collectors[source], steps)
            counters = storage.counters
            assert counters["resident"] == len(plain.resident)
            assert counters["inserted"] == counters["resident"] + counters["evicted"]
            assert storage.num_items <= len(plain.resident)
            if frames == 0:
                assert storage.num_items == len(plain.resident)
            assert_extras_belong_to_rows(storage.ring)
            batch = storage.sample(30)
            if batch is None:
                assert not storage.num_items
                continue
            assert_batch_equals(batch, plain, n_step, 0.9)
            if turn % 8 == 7 and storage.num_items:  # check that a large sample contains most sampleable rows
                drawn = {int(a) for a in storage.sample(1000).action}
                assert len(drawn) > 0.8 * storage.num_items
                assert len(drawn) <= storage.num_items


def test_rows_with_stacks_are_lost_only_if_older_frames_are_lost(build_replay, make_collector, make_plain_replay):
    collector = make_collector(num_envs=2, num_steps=10, num_frames=4, p_end=0.0)
    storage = build_replay(ReplayBuffer, 60)
    for _ in range(7):
        storage.insert_data_slice([collector.collect()])
    assert storage.counters["resident"] == 60
    assert storage.num_items == 60 - 2 * 3


def test_windows_end_with_their_source_and_do_not_mix_sources(build_replay):
    storage = build_replay(ReplayBuffer, 20, gamma=1.0, n_step=3)
    first, other = rollout_of([1, 1]), rollout_of([10, 10], obs=[7, 8, 9])
    other.action.add_(10)
    storage.insert_data_slice([first, other])
    assert by_action(storage.sample(200), "ret") == {0: (2,), 1: (1,), 10: (20,), 11: (10,)}
    later = rollout_of([100, 100], obs=[2, 3, 4])
    later.done[0] = False
    later.action.add_(2)
    storage.insert_data_slice([later], sources=[0])
    assert by_action(storage.sample(400), "ret") == {
        0: (102,), 1: (201,), 2: (200,), 3: (100,), 10: (20,), 11: (10,)}


@pytest.mark.parametrize(("first_obs", "reset"), [(50, False), (2, True)])
def test_a_rollout_that_does_not_begin_where_the_last_ended_is_not_linked(first_obs, reset, build_replay):
    storage = build_replay(ReplayBuffer, 20, gamma=1.0, n_step=3)
    storage.insert_data_slice([rollout_of([1, 1])])
    later = rollout_of([100, 100], obs=[first_obs, 51, 52])
    later.done[0] = reset
    later.action.add_(2)
    storage.insert_data_slice([later])
    assert by_action(storage.sample(400), "ret")[1] == (1,)


def test_sampling_is_uniform_over_valid_rows(build_replay, make_collector, make_plain_replay):
    collector = make_collector(num_envs=3, num_steps=10, same_step=False, p_end=0.3)
    storage, plain = build_replay(ReplayBuffer, 100), make_plain_replay(100)
    for _ in range(5):
        storage.insert_data_slice([collector.collect()])
        plain.insert(collector, 10)
    actions, counts = np.unique(storage.sample(100_000).action, return_counts=True)
    assert sorted(actions) == sorted(plain.resident)
    assert chisquare(counts).pvalue > 1e-4


def test_sampling_is_uniform_if_few_rows_are_valid(build_replay):
    rollout = rollout_of([1] * 10)
    rollout.valid[:] = False
    rollout.valid[[2, 7]] = True
    storage = build_replay(ReplayBuffer, 10)
    storage.insert_data_slice([rollout])
    actions, counts = np.unique(storage.sample(10_000).action, return_counts=True)
    assert actions.tolist() == [2, 7]
    assert abs(counts[0] - 5000) < 250


def test_generate_batches_yields_the_requested_number_and_marks_the_last(build_replay):
    storage = build_replay(ReplayBuffer, 10)
    assert list(storage.generate_batches(3, 4)) == []
    storage.insert_data_slice([rollout_of([1] * 5)])
    batches = list(storage.generate_batches(3, 4, num_epochs=2))
    assert [batch.last for batch in batches] == [False] * 5 + [True]
    assert {batch.num_samples for batch in batches} == {4}
    assert storage.counters["sampled"] == 24
    assert torch.equal(batches[0].weight, torch.ones(4))
    with pytest.raises(ArgumentError, match="mini_batch_size"):
        next(storage.generate_batches(3))


def test_removed_sources_are_forgotten(build_replay):
    storage = build_replay(ReplayBuffer, 10)
    for incarnation in range(7):
        storage.insert_data_slice([rollout_of([1] * 5)], sources=[("collector", incarnation)])
    assert storage.ring.sources == [("collector", 5), ("collector", 6)]


def test_counters_include_rows_that_were_never_sampled(build_replay):
    storage = build_replay(ReplayBuffer, 4)
    storage.insert_data_slice([rollout_of([1] * 4)])
    drawn = set(storage.sample(2).action.tolist())
    storage.insert_data_slice([rollout_of([1] * 4)])
    assert storage.counters == {
        "inserted": 8, "evicted": 4, "evicted_unused": 4 - len(drawn), "resident": 4, "sampled": 2}


def test_an_overwritten_row_counts_as_never_sampled(build_replay):
    storage = build_replay(ReplayBuffer, 4)
    for unused in (0, 0, 4):  # number of rows that are not sampled before the next insertion
        storage.insert_data_slice([rollout_of([1] * 4)])
        assert storage.counters["evicted_unused"] == 0
        if not unused:
            while not storage.ring.columns["used"].all():
                storage.sample(4)
    storage.insert_data_slice([rollout_of([1] * 4)])
    assert storage.counters["evicted_unused"] == 4


def test_batches_are_copies_and_rollouts_are_copied(build_replay):
    storage = build_replay(ReplayBuffer, 4)
    rollout = rollout_of([1] * 4)
    storage.insert_data_slice([rollout])
    rollout.reward.zero_()
    batch = storage.sample(8)
    assert batch.ret.eq(1).all()
    batch.obs["obs"].fill_(-1)
    assert storage.sample(20).obs["obs"].ge(0).all()


def test_dtypes_are_kept_and_memory_is_allocated_once(build_replay, make_collector):
    collector = make_collector(num_envs=2, num_steps=4, num_frames=4)
    storage = build_replay(ReplayBuffer, 50, stacked_frames=1)
    storage.insert_data_slice([collector.collect()])
    rows = storage.ring.observations["obs/obs"].rows
    for _ in range(10):
        storage.insert_data_slice([collector.collect()])
    assert storage.ring.observations["obs/obs"].rows is rows
    assert rows.dtype == np.uint8
    assert len(rows) == 50
    batch = storage.sample(3)
    assert (batch.obs["obs"].dtype, batch.action.dtype, batch.ret.dtype) == (torch.uint8, torch.int64, torch.float32)


def test_single_frames_need_at_most_15_percent_more_than_their_bytes(build_replay, make_collector):
    collector = make_collector(num_envs=4, num_steps=50, num_frames=4, picture=(28, 28), p_end=0.01)
    storage = build_replay(ReplayBuffer, 4000)
    whole = build_replay(ReplayBuffer, 4000, stacked_frames=1)
    for _ in range(40):
        rollout = collector.collect()
        storage.insert_data_slice([rollout])
        whole.insert_data_slice([rollout])
    assert storage.num_bytes <= 1.15 * 4000 * 28 * 28
    assert whole.num_bytes > 4 * 4000 * 28 * 28


def test_images_that_are_not_stacks_are_stored_unchanged(build_replay):
    pictures = torch.randint(0, 256, (5, 1, 3, 4, 4), dtype=torch.uint8)
    rollout = dataclasses.replace(rollout_of([1] * 4), obs={"obs": pictures})
    storage = build_replay(ReplayBuffer, 8)
    storage.insert_data_slice([rollout])
    batch = storage.sample(20)
    for b, action in enumerate(batch.action.tolist()):
        assert torch.equal(batch.obs["obs"][b], pictures[action, 0])
    with pytest.raises(ConfigError, match="do not shift by one frame per step"):
        build_replay(ReplayBuffer, 8, stacked_frames=3).insert_data_slice([rollout])
    with pytest.raises(ConfigError, match="must divide the 3 channels"):
        build_replay(ReplayBuffer, 8, stacked_frames=2).insert_data_slice([rollout])
    with pytest.raises(ConfigError, match="needs observations with three axes"):
        build_replay(ReplayBuffer, 8, stacked_frames=2).insert_data_slice([rollout_of([1] * 4)])
    build_replay(ReplayBuffer, 8).insert_data_slice([rollout_of([1] * 4)])


def test_stacked_color_frames_are_stored_once(build_replay):
    pictures = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8)
    stacks = torch.stack([pictures[t:t + 3].flatten(0, 1) for t in range(6)])
    rollout = dataclasses.replace(rollout_of([1] * 5), obs={"obs": stacks[:, None]})
    storage = build_replay(ReplayBuffer, 8, stacked_frames=3)
    storage.insert_data_slice([rollout])
    batch = storage.sample(20)
    for b, action in enumerate(batch.action.tolist()):
        assert torch.equal(batch.obs["obs"][b], stacks[action])
        assert torch.equal(batch.next_obs["obs"][b], stacks[action + 1])
    assert storage.ring.observations["obs/obs"].frames.nbytes == 8 * 3 * 16


@pytest.mark.parametrize("cls", [ReplayBuffer, PERBuffer])
@pytest.mark.parametrize("frames", [0, 4])
def test_a_restored_storage_continues_identically(cls, frames, build_replay, make_collector):
    collectors = [make_collector(seed=s, num_frames=frames) for s in range(2)]
    storage = build_replay(cls, 37, n_step=3)

    def go_on(*storages):
        for source in (0, 1, 1, 0, 1):
            rollout = collectors[source].collect(int(collectors[source].rng.integers(1, 6)))
            for one in storages:
                one.insert_data_slice([rollout], sources=[("col", source)])
                batch = one.sample(16)
                one.after_gradients(batch, {"errors": batch.ret})
        return [one.sample(50) for one in storages]

    for fill in range(3):  # the first state is saved before the ring is full
        go_on(storage)
        file = io.BytesIO()
        torch.save(storage.state_dict(), file)
        file.seek(0)
        other = build_replay(cls, 37, n_step=3, seed=fill + 1)
        other.load_state_dict(torch.load(file, weights_only=True))
        ours, theirs = go_on(storage, other)
        for name in ("action", "ret", "discount", "weight", "ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ours.obs:
            assert torch.equal(ours.obs[name], theirs.obs[name])
            assert torch.equal(ours.next_obs[name], theirs.next_obs[name])
        assert storage.counters == other.counters


def test_a_state_of_another_size_is_refused(build_replay):
    storage = build_replay(ReplayBuffer, 10)
    storage.insert_data_slice([rollout_of([1] * 4)])
    with pytest.raises(ConfigError, match="size 11 cannot load the state of one with size 10"):
        build_replay(ReplayBuffer, 11).load_state_dict(storage.state_dict())
    build_replay(ReplayBuffer, 10).load_state_dict(storage.state_dict())


def test_reset_removes_everything_and_old_ids_stay_stale(build_replay):
    storage = build_replay(PERBuffer, 10, n_step=3)
    storage.insert_data_slice([rollout_of([1] * 6, terminated=[2])])
    batch = storage.sample(3)
    storage.reset()
    assert storage.sample(1) is None
    assert storage.counters["resident"] == 0
    assert storage.counters["evicted"] == 6
    storage.after_gradients(batch, {"errors": torch.ones(3)})
    assert storage.counters["stale_priorities"] == 3
    storage.insert_data_slice([rollout_of([5, 5])])
    assert set(storage.sample(20).action.tolist()) == {0, 1}


def contents(storage):
    """Return a batch of all transitions that can be drawn, oldest first."""
    return storage._batch(storage.ring, storage.drawable_rows(), np.ones(storage.num_items))


def assert_contents_equal(storage, other):
    """Assert that two storages have equal transitions and priorities; the ids may differ."""
    ours, theirs = contents(storage), contents(other)
    for name in ("action", "ret", "discount"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(ours.next_obs["obs"], theirs.next_obs["obs"])
    assert storage.mass == pytest.approx(other.mass)
    assert storage.counters["resident"] == other.counters["resident"]
    assert getattr(storage, "min_priority", 1.0) == pytest.approx(getattr(other, "min_priority", 1.0))
    assert_extras_belong_to_rows(storage.ring)


@pytest.mark.parametrize("cls", [ReplayBuffer, PERBuffer])
@pytest.mark.parametrize("frames", [0, 4])
def test_a_storage_after_a_reset_continues_like_a_new_one(cls, frames, build_replay, make_collector):
    """Compare storages after a reset with new storages: rows, priorities, counts, and what a saved state contains.

    The reset follows when the ring is partly filled, full, or wrapped. One of the collectors has reset steps.
    """
    collectors = [make_collector(seed=s, num_frames=frames, same_step=not s, p_cut=0.2) for s in range(2)]
    storage = build_replay(cls, 37, n_step=3)

    def insert(number, *storages):
        collector = collectors[number % 2]
        rollout = collector.collect(int(collector.rng.integers(1, 6)))
        for one in storages:
            one.insert_data_slice([rollout], sources=[("col", number % 2)])
            if cls is PERBuffer:
                rows = one.drawable_rows()[::2]
                one.update_priorities(one.ring.ids(rows), 0.1 + 0.01 * (np.arange(len(rows)) % 7))

    for count in (2, 9, 30):
        for number in range(count):
            insert(number, storage)
        storage.reset()
        assert (storage.num_items, storage.drawable_rows().tolist(), storage.ring.sources) == (0, [], [])
        new, loaded = build_replay(cls, 37, n_step=3), build_replay(cls, 37, n_step=3, seed=1)
        insert(0, loaded)
        loaded.load_state_dict(storage.state_dict())
        assert loaded.ring.sources == []
        for number in range(14):
            insert(number, storage, new, loaded)
            if number not in (0, 3, 8, 13):
                continue
            expected = contents(new)
            for one in (storage, loaded):
                assert_contents_equal(one, new)
                assert set(one.sample(300).action.tolist()) <= set(expected.action.tolist())


def test_reset_steps_do_not_count_as_transitions_that_were_never_sampled(build_replay):
    storage = build_replay(ReplayBuffer, 5)
    rollout = dataclasses.replace(rollout_of([1] * 5), valid=torch.tensor([True, False, True, False, True])[:, None])
    storage.insert_data_slice([rollout])
    drawn = set(storage.sample(1).action.tolist())
    storage.insert_data_slice([rollout])
    assert storage.counters == {"inserted": 6, "evicted": 3, "evicted_unused": 3 - len(drawn), "resident": 3,
                                "sampled": 1}


def test_a_loaded_state_replaces_all_collectors_and_counts(build_replay):
    first, second = (build_replay(ReplayBuffer, 20) for _ in range(2))
    first.insert_data_slice([rollout_of([1] * 4)], sources=["saved"])
    first.num_learned_from = 3
    second.insert_data_slice([rollout_of([1] * 4)], sources=["gone"])
    second.load_state_dict(first.state_dict())
    assert (second.ring.sources, second.num_learned_from) == (["saved"], 3)


def test_rollouts_that_do_not_fit_are_refused(build_replay):
    storage = build_replay(ReplayBuffer, 4)
    with pytest.raises(ConfigError, match="1 environments x 5 steps does not fit in a replay of size 4"):
        storage.insert_data_slice([rollout_of([1] * 5)])
    storage.insert_data_slice([rollout_of([1] * 3)])
    with pytest.raises(ArgumentError, match="columns of the first rollout"):
        storage.insert_data_slice([rollout_of([1] * 3, dtype=torch.int64)])
    with pytest.raises(ArgumentError, match="got 1 rollouts and 2 sources"):
        storage.insert_data_slice([rollout_of([1])], sources=[0, 1])
    with pytest.raises(ConfigError, match="size 7 is less than a rollout of 2 environments x rollout_size 4"):
        build_replay(ReplayBuffer, 7, rollout_size=4, num_envs=2)


def test_collector_storage_uses_rollout_size_and_allocates_no_ring(build_replay, make_collector):
    collector = make_collector(num_envs=2, num_steps=3)
    storage = build_replay(ReplayBuffer, 10**12, rollout_size=3, num_envs=2)
    rows, collector.rows = collector.rows, storage._rollout_rows
    collector.restart()
    for _ in range(3):
        assert not storage.full
        collector.step()
    assert storage.full
    assert storage.get_all_buffer_data().num_steps == 3
    assert storage.ring.num_bytes == 0
    assert storage.advantage_moments() == (0, 0.0, 0.0)
    assert rows is not storage._rollout_rows


@pytest.mark.parametrize(("options", "message"), [
    ({"size": 0}, "size must be a whole number >= 1"), ({"size": 10, "n_step": 0}, "n_step must be a whole number >= "
                                                                                   "1"),
    ({"size": 10, "rollout_size": 0}, "rollout_size"), ({"size": 10, "stacked_frames": 0}, "stacked_frames"),
    ({"size": 10, "nstep": 3}, "no option 'nstep'; did you mean 'n_step'"),
])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ReplayBuffer.create_factory(**options)
