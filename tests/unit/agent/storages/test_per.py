"""Test prioritized replay: known probabilities and weights, priorities after the ring has wrapped, and errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from scipy.stats import chisquare

from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.algorithms import DDPG
from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.schedules import linear
from pytorchrl.agent.storages import PERBuffer
from pytorchrl.errors import ConfigError, ContractError, NonFiniteDataError


def steps(count, first=0, valid=None):
    """Return a rollout of one environment whose actions are `first`, `first + 1`, ..."""
    no = torch.zeros(count, 1, dtype=torch.bool)
    return RolloutData(
        obs={"obs": first + torch.arange(count + 1.0).reshape(-1, 1, 1)},
        done=torch.zeros(count + 1, 1, dtype=torch.bool),
        rhs={}, mask=None, action=first + torch.arange(count)[:, None], reward=torch.ones(count, 1), terminated=no,
        truncated=no, valid=~no if valid is None else torch.tensor(valid)[:, None],
        final_index=torch.zeros((0, 2), dtype=torch.int64), final_obs={"obs": torch.zeros(0, 1)})


@pytest.fixture
def per(build_replay):
    """Return a function that builds a storage, and inserts one transition for each given error."""
    def build(size=4, errors=None, **options):
        storage = build_replay(PERBuffer, size, **{"epsilon": 1e-12, **options})
        if errors is not None:
            storage.insert_data_slice([steps(len(errors))])
            storage.update_priorities(np.arange(len(errors)), np.array(errors, dtype=float))
        return storage
    return build


def weights_of(storage, count=2000):
    batch = storage.sample(count)
    return dict(sorted(zip(batch.action.tolist(), batch.weight.tolist(), strict=True)))


@pytest.mark.parametrize("weight_norm", ["batch", "buffer"])
@pytest.mark.parametrize(("alpha", "beta", "errors", "probabilities", "weights"), [
    (1, 1, [1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4], [1, 0.5, 0.33333, 0.25]),
    (0.6, 0.4, [1, 2, 3, 4], [0.14823, 0.22467, 0.28655, 0.34054], [1, 0.84675, 0.76823, 0.71698]),
    (0.6, 1.0, [1, 2, 3, 4], [0.14823, 0.22467, 0.28655, 0.34054], [1, 0.65975, 0.51728, 0.43528]),
    (0.6, 0.4, [0.5, 1, 2, 4], [0.120550, 0.182720, 0.276951, 0.419779], [1, 0.846745, 0.716978, 0.607097]),
])
def test_probabilities_and_weights_on_golden_values(per, alpha, beta, errors, probabilities, weights, weight_norm):
    storage = per(4, errors, alpha=alpha, beta=beta, weight_norm=weight_norm)
    leaves = storage.priority_sums.get(np.arange(4))
    np.testing.assert_allclose(leaves / storage.mass, probabilities, atol=5e-6)
    np.testing.assert_allclose(list(weights_of(storage).values()), weights, atol=5e-6)
    assert storage.min_priority == leaves.min()
    # By definition, a weight is (N P)^-beta divided by the largest such value.
    raw = (4 * leaves / leaves.sum()) ** -beta
    np.testing.assert_allclose(list(weights_of(storage).values()), raw / raw.max(), atol=1e-6)


def test_priorities_on_golden_values(per):
    leaves = per(4, [0.5, -1, 2, -4], alpha=0.6).priority_sums.get(np.arange(4))
    np.testing.assert_allclose(leaves, [0.659754, 1, 1.515717, 2.297397], atol=5e-7)
    np.testing.assert_allclose(per(1, [0.5], epsilon=0.25, alpha=2.0).priority_sums.get(np.arange(1)), 0.75**2)


@pytest.mark.parametrize("stratified", [False, True])
def test_frequencies_follow_priorities(per, stratified):
    errors = np.array([0.5, 1, 2, 4, 0.1, 3, 3])
    storage = per(7, errors, stratified=stratified)
    expected = errors**0.6 / (errors**0.6).sum() * 1e5
    counts = np.bincount(storage.sample(100_000).action.numpy(), minlength=7)
    assert chisquare(counts, expected).pvalue > 0.001
    if stratified:
        assert np.abs(counts - expected).max() <= 2


def test_stratified_sampling_on_golden_values(per, monkeypatch):
    storage = per(4, [1, 2, 3, 4], alpha=1.0, stratified=True)
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.full((count,), 0.5, dtype=torch.float64))
    assert storage.sample(10).action.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_weights_over_the_buffer_are_relative_to_all_rows(per):
    errors = [1e-6, *[1.0] * 50]
    ours, theirs = (per(51, errors, alpha=1.0, beta=1.0, weight_norm=norm) for norm in ("batch", "buffer"))
    assert set(ours.sample(8).weight.tolist()) == {1.0}
    assert max(theirs.sample(8).weight.tolist()) == pytest.approx(1e-6, rel=1e-4)


def test_two_storages_equal_one_given_their_mass_and_smallest_leaf(per):
    """Check that the scaled weights of two storages equal the weights of a single storage with all transitions.

    Each weight is multiplied by (smallest leaf of both trees / smallest leaf of its own tree)^beta.
    """
    parts = [per(2, errors, alpha=1.0, beta=1.0, weight_norm="buffer") for errors in ([1, 2], [3, 4])]
    mass, smallest = [part.mass for part in parts], min(part.min_priority for part in parts)
    np.testing.assert_allclose(np.array(mass) / sum(mass), [0.3, 0.7])
    weights = [w * smallest / part.min_priority for part in parts for w in weights_of(part).values()]
    np.testing.assert_allclose(weights, [1, 0.5, 1 / 3, 0.25], rtol=1e-6)


def test_new_transitions_get_the_largest_priority_so_far(per):
    storage = per(8, [0.5, 0.25], alpha=1.0)
    storage.insert_data_slice([steps(2, first=10)])
    # New transitions have priority 1 until an error exceeds 1.
    np.testing.assert_allclose(storage.priority_sums.get(np.arange(4)), [0.5, 0.25, 1, 1])
    storage.update_priorities(np.array([1]), np.array([7.0]))
    storage.update_priorities(np.array([1]), np.array([0.5]))
    storage.insert_data_slice([steps(1, first=20)])
    np.testing.assert_allclose(storage.priority_sums.get(np.arange(5)), [0.5, 0.5, 1, 1, 7])


def with_errors(rollout, errors):
    """Return the rollout with absolute TD errors that its collector computed."""
    return dataclasses.replace(rollout, other={"error": torch.tensor(errors, dtype=torch.float32)[:, None]})


def test_errors_of_collectors_raise_the_largest_priority_so_far(per):
    storage = per(9, alpha=0.5)
    storage.insert_data_slice([with_errors(steps(3), [0.25, 9.0, 4.0])])
    np.testing.assert_allclose(storage.priority_sums.get(np.arange(3)), [0.5, 3.0, 2.0])
    storage.insert_data_slice([steps(1, first=10)])
    storage.insert_data_slice([with_errors(steps(1, first=20), [1.0])])
    storage.insert_data_slice([steps(1, first=30)])
    np.testing.assert_allclose(storage.priority_sums.get(np.arange(3, 6)), [3.0, 1.0, 3.0])
    assert storage.min_priority == pytest.approx(0.5)
    storage.reset()  # keeps the largest priority, but no priorities
    assert (storage.mass, storage.min_priority) == (0.0, np.inf)
    storage.insert_data_slice([steps(2, first=40)])
    assert (storage.mass, storage.min_priority) == (pytest.approx(6.0), pytest.approx(3.0))


@pytest.mark.parametrize("error", [np.nan, np.inf])
def test_errors_of_collectors_that_are_not_finite_are_refused(per, error):
    storage = per(9)
    with pytest.raises(NonFiniteDataError, match="TD errors must be finite"):
        storage.insert_data_slice([with_errors(steps(3), [1.0, error, 2.0])])


@pytest.mark.parametrize("size", [4, 5, 8])
def test_priorities_survive_the_ring_and_stale_ones_are_counted(per, size):
    rng = np.random.default_rng(size)
    storage, plain, largest, stale = per(size, alpha=0.5), {}, 1.0, 0
    total = 0
    for _ in range(60):
        count = int(rng.integers(1, size + 1))
        storage.insert_data_slice([steps(count, first=total)])
        plain |= {total + i: largest for i in range(count)}
        total += count
        ids = rng.integers(max(0, total - 2 * size), total, 6)
        errors = rng.random(6) * 3
        storage.update_priorities(ids, errors)
        for i, error in zip(ids, errors, strict=True):
            if i >= total - size:
                plain[i] = error
                largest = max(largest, error)
            else:
                stale += 1
        resident = range(max(0, total - size), total)
        for i in resident:
            assert storage.priority_sums.get(np.array([i % size]))[0] == pytest.approx(plain[i] ** 0.5)
        assert storage.mass == pytest.approx(sum(plain[i] ** 0.5 for i in resident))
        assert storage.min_priority == pytest.approx(min(plain[i] ** 0.5 for i in resident))
        assert storage.counters["stale_priorities"] == stale
        batch = storage.sample(5)
        assert batch.ids.tolist() == batch.action.tolist()
    assert stale > 20


def test_after_gradients_accepts_errors_of_any_sign_and_type(per):
    storage = per(4, [1, 1, 1, 1], alpha=1.0)
    batch = storage.sample(4)
    batch.ids.copy_(torch.tensor([0, 1, 2, 2]))
    storage.after_gradients(batch, {"errors": torch.tensor([-2.0, 3.0, 9.0, 4.0])})
    np.testing.assert_allclose(storage.priority_sums.get(np.arange(4)), [2, 3, 4, 1])
    storage.after_gradients(batch, {"errors": np.array([1.0, 1.0, 1.0, 1.0])})
    assert storage.mass == pytest.approx(4)


def test_a_non_finite_update_changes_no_priority(per):
    storage = per(4, [1, 2, 3, 4], alpha=1.0)
    storage.after_gradients(storage.sample(2), {"errors": torch.tensor([1.0, float("nan")])})
    assert storage.mass == pytest.approx(10)


def test_wrong_updates_are_refused(per):
    storage = per(4, [1, 2, 3, 4])
    with pytest.raises(ConfigError, match="an algorithm whose info contains TD errors"):
        storage.after_gradients(storage.sample(2), {"loss": 0.0})
    for ids, errors, message in (([0, 1], [1.0], "got 2 ids and 1 errors"), ([0], [np.nan], "finite"),
                                 ([4], [1.0], r"in \[0, 4\), got 4 to 4"), ([-1], [1.0], "got -1")):
        with pytest.raises((ContractError, NonFiniteDataError, ValueError), match=message):
            storage.update_priorities(np.array(ids), np.array(errors))


def test_rows_without_a_transition_are_never_sampled(per):
    storage = per(6)
    storage.insert_data_slice([steps(6, valid=[True, False, True, True, False, True])])
    assert set(storage.sample(300).action.tolist()) == {0, 2, 3, 5}
    assert storage.mass == pytest.approx(4)
    storage.update_priorities(np.array([1]), np.array([5.0]))
    assert storage.mass == pytest.approx(4)


def test_rows_without_a_transition_do_not_affect_weights(per):
    storage = per(4, alpha=1.0, beta=1.0, weight_norm="buffer")
    storage.insert_data_slice([steps(4, valid=[True, False, True, True])])
    storage.update_priorities(np.array([0, 2, 3]), np.array([1.0, 2.0, 4.0]))
    assert storage.min_priority == pytest.approx(1.0)
    assert weights_of(storage) == pytest.approx({0: 1.0, 2: 0.5, 3: 0.25})


def test_a_rollout_without_a_transition_has_errors_of_zero():
    actor = OffPolicyActor.create_factory(Box(-1, 1, (1,)), Box(-1, 1, (1,)), policy="deterministic")(seed=0)
    storage = PERBuffer.create_factory(6, rollout_size=1)(
        actor=actor, algorithm=DDPG.create_factory()(actor=actor, seed=0), num_envs=1, seed=0, device="cpu")
    rollout = dataclasses.replace(steps(3, valid=[False] * 3), action=torch.zeros(3, 1, 1))
    storage.add_errors(rollout)
    assert rollout.other["error"].tolist() == [[0.0]] * 3
    storage.insert_data_slice([rollout])
    assert storage.sample(2) is None


def test_broken_stacks_are_never_sampled_again(per, make_collector):
    collector = make_collector(num_envs=1, num_steps=10, num_frames=4, p_end=0.0)
    storage = per(20)
    for _ in range(3):
        storage.insert_data_slice([collector.collect()])
    oldest = storage.ring.first
    storage.update_priorities(oldest + np.arange(3), np.full(3, 1e9))
    assert storage.counters["stale_priorities"] == 3
    assert int(storage.sample(500).ids.min()) == oldest + 3


def test_beta_follows_its_schedule_and_can_be_changed(per):
    storage = per(2, [1.0, 2.0], alpha=1.0, beta=linear(0.5, 1.0, 100))
    assert weights_of(storage, 50)[1] == pytest.approx(2**-0.5)
    assert storage.follow_schedules(50, 1000) == {"beta": 0.75}
    assert weights_of(storage, 50)[1] == pytest.approx(2**-0.75)
    state = storage.state_dict()
    storage.update_storage_parameter("beta", 1.0)
    assert storage.follow_schedules(50, 1000) == {}
    assert weights_of(storage, 50)[1] == pytest.approx(0.5)
    storage.load_state_dict(state)
    assert storage.parameters == {"beta": 0.75}
    assert storage.follow_schedules(100, 1000) == {"beta": 1.0}
    with pytest.raises(ConfigError, match="beta must be a number > 0"):
        storage.update_storage_parameter("beta", 0.0)
    with pytest.raises(KeyError, match="cannot update 'alpha'; it can update beta"):
        storage.update_storage_parameter("alpha", 0.5)


def test_nothing_is_allocated_before_the_first_rollout(build_replay):
    storage = build_replay(PERBuffer, 10**12)
    assert (storage.mass, storage.min_priority, storage.num_items) == (0.0, np.inf, 0)
    assert storage.sample(3) is None


@pytest.mark.parametrize(("options", "message"), [
    ({"alpha": 0.0}, "alpha must be a number > 0"), ({"beta": 0.0}, "beta must be a number > 0"),
    ({"epsilon": 0.0}, "epsilon must be a number > 0"),
    ({"weight_norm": "max"}, "weight_norm must be one of"), ({"beta": linear(0.0, 1.0)}, "beta must be > 0"),
])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PERBuffer.create_factory(10, **options)
