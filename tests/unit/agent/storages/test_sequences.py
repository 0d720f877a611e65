"""Test replay of sequences: known windows, and comparisons of all sampled sequences with plain lists."""

from __future__ import annotations

import dataclasses
import io
import math

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages import SequenceBuffer, UniformSequenceBuffer
from pytorchrl.errors import ConfigError
from tests.unit.agent.storages.comparison import assert_masks, assert_observations, assert_targets

STATE = 3
GAMMA = 0.9


def rollout_of(count, is_over=True, first=True, number=0, reward=None):
    """Return a rollout of one environment, whose observations and actions are step numbers starting at `number`."""
    end = torch.zeros(count, 1, dtype=torch.bool)
    end[-1] = is_over
    done = torch.zeros(count + 1, 1, dtype=torch.bool)
    done[0], done[-1] = first, is_over
    numbers = number + torch.arange(count + 1.0)[:, None]
    return RolloutData(
        obs={"obs": numbers[..., None]}, done=done, rhs={"q": numbers[..., None].expand(-1, -1, STATE).clone()},
        mask=None,
        action=numbers[:-1].long(), reward=torch.ones(count, 1) if reward is None else torch.tensor(reward)[:, None],
        terminated=end, truncated=torch.zeros_like(end), valid=torch.ones(count, 1, dtype=torch.bool),
        final_index=torch.tensor([[count - 1, 0]] if is_over else [], dtype=torch.int64).reshape(-1, 2),
        final_obs={"obs": numbers[-1:] if is_over else torch.zeros(0, 1)})


@pytest.fixture
def build(build_replay):
    """Return a function that builds a storage of short sequences."""
    def make(size=100, cls=SequenceBuffer, **options):
        return build_replay(cls, size, gamma=GAMMA, state_size=STATE, **{
            "length": 4, "burn_in": 2, "period": 2, "n_step": 1, **options,
            **({"epsilon": 1e-12} if cls is SequenceBuffer and "epsilon" not in options else {})})
    return make


def drawn_windows(storage, count=400):
    """Return the sorted (burn-in start, training start, end) of all sampled windows, as step numbers."""
    batch, found = storage.sample(count), set()
    if batch is None:
        return []
    for b in range(count):
        steps = batch.action[batch.valid[:, b], b].tolist()
        row = batch.done[:batch.burn_in, b].tolist().index(True) if batch.done[:batch.burn_in, b].any() else 0
        warm = int(batch.obs["obs"][row, b, 0]) if batch.burn_in else steps[0]
        found.add((warm if row < batch.burn_in else steps[0], steps[0], steps[-1] + 1))
    return sorted(found)


@pytest.mark.parametrize(("num_steps", "windows"), [
    (9, [(0, 0, 4), (0, 2, 6), (2, 4, 8), (4, 6, 9)]), (8, [(0, 0, 4), (0, 2, 6), (2, 4, 8)]),
    (5, [(0, 0, 4), (0, 2, 5)]),
    (4, [(0, 0, 4)]), (3, [(0, 0, 3)]), (1, [(0, 0, 1)])])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("cls", "n_step"), [(SequenceBuffer, 1), (SequenceBuffer, 3), (UniformSequenceBuffer, 2)])
def test_golden_windows(build, num_steps, windows, parts, cls, n_step):
    """Check that windows depend neither on where rollouts are cut nor on `n_step`, nor on how they are drawn."""
    storage, at = build(cls=cls, n_step=n_step), 0
    for size in filter(None, [num_steps * (i + 1) // parts - num_steps * i // parts for i in range(parts)]):
        storage.insert_data_slice([rollout_of(size, at + size == num_steps, at == 0, at)])
        at += size
    assert drawn_windows(storage) == windows
    assert storage.num_items == len(windows)


def test_a_window_can_be_sampled_once_its_targets_are_known(build):
    storage = build(n_step=3)
    seen = []
    for t in range(9):
        storage.insert_data_slice([rollout_of(1, t == 8, t == 0, t)])
        seen.append(storage.num_items)
    # The first window needs 4 + 3 - 1 steps, and each later window needs two more steps. The end of the episode
    # completes all remaining windows.
    assert seen == [0, 0, 0, 0, 0, 1, 1, 2, 4]


def test_n_step_targets_on_golden_values(build):
    storage = build(n_step=3, length=6, period=6, burn_in=0)
    storage.insert_data_slice([rollout_of(6, reward=[1.0, 2, 3, 4, 5, 6])])
    storage.algorithm.gamma = 0.5
    batch = storage.sample(1)
    assert batch.ret[:, 0].tolist() == [2.75, 4.5, 6.25, 8.0, 8.0, 6.0]
    assert batch.discount[:, 0].tolist() == [0.125, 0.125, 0.125, 0.0, 0.0, 0.0]
    assert batch.obs["obs"][batch.next_row[:, 0], 0, 0].tolist() == [3, 4, 5, 6, 6, 6]
    assert batch.num_samples == 6


def test_priorities_mix_the_largest_and_the_mean_error(build):
    storage = build()
    storage.insert_data_slice([rollout_of(9)])
    batch = storage.sample(1)
    errors = torch.tensor([[1.0], [-2.0], [3.0], [6.0]])
    batch.valid[:] = True
    assert storage.item_errors(batch, errors) == pytest.approx([5.7])
    batch.valid[3] = False
    assert storage.item_errors(batch, errors) == pytest.approx([0.9 * 3 + 0.1 * 2])
    storage.options = SequenceBuffer.create_factory(100, priority_eta=0.0).options
    assert storage.item_errors(batch, errors) == pytest.approx([2.0])


def test_uniform_sequences_are_drawn_equally_often_whatever_their_errors(build):
    storage = build(cls=UniformSequenceBuffer, size=16, rollout_size=1)
    storage.insert_data_slice([rollout_of(9)])
    storage.insert_data_slice([rollout_of(9, number=100)])  # the new rows overwrite steps 0 and 1
    batch = storage.sample(12_000)
    storage.after_gradients(batch, {"errors": 100.0 * batch.action})
    batch = storage.sample(12_000)
    starts, counts = np.unique(batch.action[0], return_counts=True)
    assert starts.tolist() == [4, 6, 100, 102, 104, 106]
    np.testing.assert_allclose(counts / 12_000, 1 / 6, atol=0.02)
    assert (batch.weight == 1.0).all()
    assert not storage.has_priorities


def test_the_last_batch_of_sequences_is_marked(build):
    storage = build()
    storage.insert_data_slice([rollout_of(9)])
    assert [batch.last for batch in storage.generate_batches(2, 3, num_epochs=2)] == [False] * 3 + [True]
    assert not storage.sample(1).last


def test_learned_errors_become_priorities(build):
    storage = build(alpha=1.0, beta=1.0, epsilon=1e-9)
    storage.insert_data_slice([rollout_of(8)])
    batch = storage.sample(100)
    rows = {int(start): b for b, start in enumerate(batch.action[0])}
    ids = batch.ids[[rows[start] for start in (0, 2, 4)]].numpy()
    storage.update_priorities(ids, np.array([5.7, 1.0, 3.3]))
    assert storage.mass == pytest.approx(10.0)
    counts = np.bincount(storage.sample(20000).action[0].numpy(), minlength=5) / 20000
    np.testing.assert_allclose(counts[[0, 2, 4]], [0.57, 0.1, 0.33], atol=0.02)
    batch = storage.sample(1000)
    weights = {int(start): float(w) for start, w in zip(batch.action[0], batch.weight, strict=True)}
    assert weights == pytest.approx({0: 1 / 5.7, 2: 1.0, 4: 1 / 3.3}, rel=1e-5)


def test_after_gradients_accepts_only_finite_errors_of_all_steps(build):
    storage = build(alpha=1.0)
    storage.insert_data_slice([rollout_of(4)])
    batch = storage.sample(2)
    storage.after_gradients(batch, {"errors": torch.tensor([[1.0, 1], [2, 2], [3, 3], [6, 6]])})
    assert storage.mass == pytest.approx(5.7)
    storage.after_gradients(batch, {"errors": torch.full((4, 2), math.nan)})
    assert storage.mass == pytest.approx(5.7)


def check_batch(batch, plain, rule, frames):
    """Compare a batch with sequences from plain lists; return the starts of sampled windows and of all windows."""
    expected = plain.sequences(**rule)
    length, n_step, burn_in = rule["length"], rule["n_step"], batch.burn_in
    assert batch.done.shape[0] == burn_in + length + n_step
    assert batch.num_samples == int(batch.valid.sum())
    valid, done, next_row = (getattr(batch, name).numpy() for name in ("valid", "done", "next_row"))
    seen, trained = [], []  # (step, column, row of the reference) of all steps, and of the steps after the burn-in
    for b in np.unique(batch.ids.numpy(), return_index=True)[1].tolist():
        rows, num_warm = expected[int(batch.action[0, b])]
        first = burn_in - num_warm
        assert valid[:, b].tolist() == [i < len(rows) - num_warm for i in range(length)]
        assert done[:, b].tolist() == (
            [False] * first + [bool(row.is_first) for row in rows] + [False] * (len(done) - first - len(rows)))
        if rows[0].is_first:
            assert not batch.rhs["q"][b].any()
        else:
            np.testing.assert_array_equal(batch.rhs["q"][b], rows[0].states["q"])
            assert first == 0
        seen += [(first + i, b, row) for i, row in enumerate(rows)]
        trained += [(i, b, row) for i, row in enumerate(rows[num_warm:])]
    windows = [plain.window(row, n_step, GAMMA) for *_, row in trained]
    following = [burn_in + i + num_steps for (i, *_), (*_, num_steps) in zip(trained, windows, strict=True)]
    assert_rows(batch, *zip(*seen, strict=True))
    steps, columns, rows = zip(*trained, strict=True)
    returns, discounts, next_obs, next_masks, _ = zip(*windows, strict=True)
    assert batch.action.numpy()[steps, columns].tolist() == [row.action for row in rows]
    assert next_row[steps, columns].tolist() == following
    assert_targets(batch, (steps, columns), returns, discounts)
    assert_observations(batch.obs, (following, columns), next_obs)
    assert_masks(batch.mask, (following, columns), next_masks)
    assert next_row.max() < len(done)
    if not frames:
        assert len(expected) > 0
    return {int(start) for start in batch.action[0]}, set(expected)


def assert_rows(batch, steps, columns, rows):
    """Assert that a batch has the observations and masks of the list `rows` at the given steps and columns."""
    assert_observations(batch.obs, (steps, columns), [row.obs for row in rows])
    assert_masks(batch.mask, (steps, columns), [row.mask for row in rows])


RULES = [{"length": 4, "burn_in": 2, "period": 2, "n_step": 1}, {"length": 5, "burn_in": 7, "period": 3, "n_step": 4},
         {"length": 3, "burn_in": 0, "period": 3, "n_step": 2}, {"length": 1, "burn_in": 3, "period": 1, "n_step": 3},
         {"length": 8, "burn_in": 4, "period": 4, "n_step": 5}]


@pytest.mark.every(7)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize(("frames", "p_end"), [(0, 0.2), (0, 0.02), (3, 0.05)])
def test_batches_equal_those_of_a_list_implementation(rule, same_step, frames, p_end, build_replay, make_collector,
                                                      make_plain_replay):
    """Check the batches of two collectors of different sizes, which insert rollouts in random order.

    Collectors are replaced, environments restart, and some rollouts are short.
    """
    rng = np.random.default_rng([*rule.values(), same_step, frames, int(100 * p_end)])
    collectors = [make_collector(
        seed=s, num_envs=1 + s, num_steps=6, same_step=same_step, num_frames=frames, p_end=p_end, p_life=0.05,
        p_cut=0.2,
        with_mask=s >= 0 and frames == 3, first_number=s * 10**6, state_size=STATE, picture=(2, 2)) for s in range(2)]
    for capacity, num_turns in ((50, 14), (70, 20), (110, 25)):
        storage = build_replay(SequenceBuffer, capacity, gamma=GAMMA, state_size=STATE, stacked_frames=frames or None,
                               **rule)
        plain, names = make_plain_replay(capacity), [0, 1]
        for collector in collectors:
            collector.restart()
        for turn in range(num_turns):
            source = int(rng.integers(2))
            if rng.random() < 0.04:
                collectors[source].restart()
            steps = int(rng.integers(1, 7))
            if rng.random() < 0.03:  # the next rollout is the first of a new source
                names[source] += 2
                for made in collectors[source].made:
                    made.append(None)
            storage.insert_data_slice([collectors[source].collect(steps)], sources=[names[source]])
            plain.insert(collectors[source], steps)
            expected = plain.sequences(**rule)
            if not frames:
                assert storage.num_items == len(expected)
            assert storage.num_items <= len(expected)
            assert storage.num_items == np.count_nonzero(storage.priority_sums.get(np.arange(capacity)))
            counters = storage.counters
            assert counters["resident"] == len(plain.resident)
            assert counters["inserted"] == counters["resident"] + counters["evicted"]
            assert_states_are_wanted(storage)
            if storage.num_items:
                drawn, all_there = check_batch(storage.sample(20 if turn % 10 else 400), plain, rule, frames)
                assert drawn <= all_there
                if turn % 10 == 0 and not frames:
                    assert len(drawn) > 0.8 * len(all_there)


def assert_states_are_wanted(storage):
    """Assert that each stored state belongs to exactly one window, and that no other states are stored."""
    slots = storage.windows.slot[storage.windows.slot >= 0]
    assert len(set(slots)) == len(slots) == len(storage.state_slots.taken)


def test_a_stream_without_its_start_warms_up_with_its_stored_state(build):
    storage = build()
    storage.insert_data_slice([rollout_of(11, first=False, number=50)])
    assert drawn_windows(storage) == [(50, 52, 56), (52, 54, 58), (54, 56, 60), (56, 58, 61)]
    batch = storage.sample(50)
    assert torch.equal(batch.rhs["q"][:, 0], batch.obs["obs"][0, :, 0])
    short = build()
    short.insert_data_slice([rollout_of(2, first=False)])
    assert short.num_items == 0


def test_a_lost_collectors_incomplete_window_is_not_sampled(build):
    storage = build()
    storage.insert_data_slice([rollout_of(7, is_over=False)], sources=[(1, 0)])
    assert drawn_windows(storage) == [(0, 0, 4), (0, 2, 6)]
    storage.insert_data_slice([rollout_of(3, number=100)], sources=[(1, 1)])
    assert drawn_windows(storage) == [(0, 0, 4), (0, 2, 6), (100, 100, 103)]


def test_a_collector_whose_steps_are_all_evicted_continues_without_its_start(build):
    storage = build(size=12, length=3, burn_in=0, period=3)
    storage.insert_data_slice([rollout_of(4, is_over=False)], sources=["left out"])
    storage.insert_data_slice([rollout_of(12, number=100)], sources=["fast"])
    storage.insert_data_slice([rollout_of(6, first=False, number=4)], sources=["left out"])
    # Step 4 would belong to the window of steps 3 to 5; without step 3, a window begins with the oldest known step.
    assert drawn_windows(storage) == [(4, 4, 7), (7, 7, 10), (106, 106, 109), (109, 109, 112)]
    assert storage.sample(50).rhs["q"][:, 0].unique().tolist() == [4, 7, 106, 109]


def test_windows_are_evicted_with_their_first_step_and_late_errors_are_stale(build):
    storage = build(size=16, rollout_size=1)
    storage.insert_data_slice([rollout_of(9)])
    batch = storage.sample(200)
    storage.insert_data_slice([rollout_of(9, number=100)])  # the new rows overwrite steps 0 and 1
    assert drawn_windows(storage) == [
        (2, 4, 8), (4, 6, 9), (100, 100, 104), (100, 102, 106), (102, 104, 108), (104, 106, 109)]
    ids = np.unique(batch.ids.numpy())
    storage.update_priorities(ids, np.ones(len(ids)))
    assert storage.counters["stale_priorities"] == 2
    assert storage.counters["evicted"] == 2


def test_steps_that_were_never_trained_on_are_counted(build):
    storage = build(size=12, rollout_size=1, n_step=2)
    storage.insert_data_slice([rollout_of(6, is_over=False)])  # only the window of steps 0 to 3 is complete
    assert storage.sample(5).num_samples == 20
    assert storage.counters["sampled"] == 20
    storage.insert_data_slice([rollout_of(12, number=100)])
    assert storage.counters["evicted"] == 6
    assert storage.counters["evicted_unused"] == 2


@pytest.mark.parametrize("cls", [SequenceBuffer, UniformSequenceBuffer])
def test_a_restored_storage_continues_identically(build_replay, make_collector, cls):
    collectors = [make_collector(seed=s, p_end=0.05, state_size=STATE) for s in range(2)]
    rule = {"length": 5, "burn_in": 3, "period": 2, "n_step": 3}
    storage = build_replay(cls, 97, state_size=STATE, **rule)

    def go_on(*storages):
        for source in (0, 1, 1, 0, 1):
            rollout = collectors[source].collect(int(collectors[source].rng.integers(1, 6)))
            for one in storages:
                one.insert_data_slice([rollout], sources=[("col", source)])
                if (batch := one.sample(16)) is not None:
                    one.after_gradients(batch, {"errors": batch.ret})
        return [one.sample(50) for one in storages]

    for fill in range(4):
        go_on(storage)
        file = io.BytesIO()
        torch.save(storage.state_dict(), file)
        file.seek(0)
        other = build_replay(cls, 97, state_size=STATE, seed=fill + 1, **rule)
        other.load_state_dict(torch.load(file, weights_only=True))
        ours, theirs = go_on(storage, other)
        for name in ("action", "ret", "discount", "weight", "ids", "valid", "done", "next_row"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert torch.equal(ours.obs["obs"], theirs.obs["obs"])
        assert torch.equal(ours.rhs["q"], theirs.rhs["q"])
        assert storage.counters == other.counters


def test_reset_removes_everything(build):
    storage = build()
    storage.insert_data_slice([rollout_of(7, is_over=False)])
    storage.reset()
    assert storage.sample(1) is None
    assert storage.mass == 0.0
    storage.insert_data_slice([rollout_of(5, number=20)])
    assert drawn_windows(storage) == [(20, 20, 24), (20, 22, 25)]


def episodes_of_state(storage):
    return [source for source, _ in storage.state_dict()["contents"]["episodes"]]


def test_collectors_that_are_gone_are_forgotten(build):
    storage = build(size=20)
    for incarnation in range(7):
        storage.insert_data_slice([rollout_of(9, is_over=False, number=100 * incarnation)], sources=[(1, incarnation)])
        assert episodes_of_state(storage) == storage.ring.sources
    assert storage.ring.sources == [(1, 4), (1, 5), (1, 6)]
    storage.reset()
    assert (episodes_of_state(storage), storage.ring.sources) == ([], [])


@pytest.mark.parametrize("frames", [0, 4])
def test_a_storage_after_a_reset_continues_like_a_new_one(build_replay, make_collector, frames):
    """Compare storages after a reset with new storages, and check that resets do not use up memory."""
    rule = {"length": 5, "burn_in": 3, "period": 2, "n_step": 2, "rollout_size": 5}
    collectors = [make_collector(seed=s, p_end=0.1, state_size=STATE, num_frames=frames, same_step=not s)
                  for s in range(2)]
    storage, sizes = build_replay(SequenceBuffer, 97, state_size=STATE, **rule), []

    def insert(number, *storages):
        rollout = collectors[number % 2].collect()
        for one in storages:
            one.insert_data_slice([rollout], sources=[("col", number % 2)])
            rows = one.drawable_rows()[::2]
            one.update_priorities(one.ring.ids(rows), 0.1 + 0.01 * (np.arange(len(rows)) % 7))

    def windows(one):
        rows = one.drawable_rows()
        one.draw = lambda count: (rows, np.ones(count))  # draws each window once
        batch = one.sample(len(rows))
        del one.draw
        return [(*batch.action[batch.valid[:, b], b].tolist(), float(batch.rhs["q"][b, 0])) for b in range(len(rows))]

    for count in (3, 20, 20):
        for number in range(count):
            insert(number, storage)
        storage.reset()
        sizes.append(storage.num_bytes)
        new = build_replay(SequenceBuffer, 97, state_size=STATE, **rule)
        for number in range(16):
            insert(number, storage, new)
            assert (storage.num_items, storage.mass) == (new.num_items, pytest.approx(new.mass))
            assert storage.min_priority == pytest.approx(new.min_priority)
        assert windows(storage) == windows(new)
    assert sizes[-1] == sizes[-2]


def test_without_memory_there_are_no_states(build_replay):
    storage = build_replay(SequenceBuffer, 50, length=3, burn_in=2, period=1)
    rollout = dataclasses.replace(rollout_of(9), rhs={})
    storage.insert_data_slice([rollout])
    assert storage.sample(3).rhs == {}


@pytest.mark.parametrize(("options", "message"), [
    ({"length": 0}, "length must be a whole number >= 1"),
    ({"burn_in": -1}, "burn_in must be a whole number >= 0"), ({"period": 0}, "period must be a whole number >= 1"),
    ({"length": 3, "period": 4}, "period must not exceed length, got 4 > 3"), ({"priority_eta": 1.1}, "priority_eta "
                                                                                                      "must be"),
    ({"alpha": 0.0}, "alpha must be a number > 0"),
    ({"lenght": 3}, "did you mean 'length'")])  # codespell:ignore lenght
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SequenceBuffer.create_factory(1000, **options)


def test_defaults_match_the_paper():
    options = SequenceBuffer.create_factory(1000).options
    assert (options.length, options.burn_in, options.period, options.n_step) == (80, 40, 40, 5)
    assert (options.alpha, options.beta, options.priority_eta) == (0.9, 0.6, 0.9)


def test_a_size_too_small_for_a_sequence_is_refused(build_replay):
    with pytest.raises(ConfigError, match=r"a replay of sequences must store at least burn_in \+ length = 120 steps, "
                                          r"got 100"):
        build_replay(SequenceBuffer, 100)
    options = SequenceBuffer.create_factory(1000, rollout_size=50).options
    SequenceBuffer.check_size(options, 4, 1)
    with pytest.raises(ConfigError, match="2 collectors x 4 environments x 4 rollouts of 50 steps need 1600"):
        SequenceBuffer.check_size(options, 4, 2)


@pytest.mark.parametrize("phase", range(10))
def test_the_smallest_allowed_size_suffices(build_replay, make_collector, phase):
    """Check that windows of endless episodes can be sampled, no matter where rollouts of two collectors are cut."""
    options = {"length": 6, "burn_in": 3, "period": 3, "n_step": 3, "rollout_size": 5}
    storage = build_replay(SequenceBuffer, 4 * 5 * 2 * 2, state_size=STATE, num_envs=2, **options)
    SequenceBuffer.check_size(storage.options, 2, 2)
    collectors = [make_collector(seed=s, num_steps=5, p_end=0.0, state_size=STATE) for s in range(2)]
    storage.insert_data_slice([collector.collect(1 + phase % 5) for collector in collectors])
    for turn in range(20):
        storage.insert_data_slice([collector.collect(5) for collector in collectors])
        assert storage.num_items > 0 or turn < 3
