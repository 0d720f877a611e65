"""Test on-policy storages with hand-made steps, a stub actor and a stub algorithm."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import ActingStep, Step
from pytorchrl.agent.storages import GAEBuffer, VanillaOnPolicyBuffer, samples
from pytorchrl.agent.storages.returns import gae
from pytorchrl.errors import ConfigError

E = 3


def stub_actor(state_size=0):
    return SimpleNamespace(
        is_recurrent=bool(state_size), reward_scale=lambda: 2.0, options=SimpleNamespace(normalize_reward=False),
        initial_states=lambda num_envs: {"policy": torch.zeros(num_envs, state_size)} if state_size else {})


def stub_algorithm(**changes):
    options = {"gamma": 0.9, "advantage_normalization": "none", "recompute_advantages": False, "num_mini_batch": 2,
               **changes}
    return SimpleNamespace(**options, options=SimpleNamespace(**options))


def build(size=5, actor=None, algorithm=None, cls=GAEBuffer, num_envs=E, seed=0, **options):
    factory = cls.create_factory(size=size, **options)
    return factory(
        actor=actor or stub_actor(), algorithm=algorithm or stub_algorithm(), num_envs=num_envs, seed=seed,
        device="cpu")


def observation(number):
    """Return one observation per environment; its value is `number` + e / 10 in environment e."""
    return {"obs": (number + np.arange(E)[:, None] / 10).astype(np.float32)}


def step_of(number, reward=1.0, finals=(), starts=(), invalid=(), mask=None):
    flags = lambda envs: np.isin(np.arange(E), envs)  # noqa: E731
    finals = np.array(finals, dtype=np.int64)
    return Step(
        obs=observation(number), reward=np.full(E, reward, np.float32), terminated=np.zeros(E, bool),
        truncated=flags(finals), valid=~flags(invalid), first=flags(starts), final_index=finals,
        final_obs={"obs": 100.0 + number + np.asarray(finals, dtype=np.float32)[:, None] / 10}, mask=mask, episodes=[])


def acting_of(number, state_size=0):
    rhs = {"policy": np.full((E, state_size), number, np.float32)} if state_size else {}
    return ActingStep(np.full(E, number), np.full(E, number), rhs, {"dist_params": np.zeros((E, 2), np.float32)})


def fill(storage, first, count, state_size=0, **step_options):
    """Insert `count` transitions, whose actions and next observations are `first`, `first + 1`, ..."""
    for number in range(first, first + count):
        storage.insert_transition(acting_of(number, state_size), step_of(number, **step_options))


def learnable(rollout):
    """Return the rollout with log-probabilities and values, as an algorithm would add them."""
    generator = torch.Generator().manual_seed(rollout.num_steps)
    rollout.other.update(
        logp=torch.randn(rollout.reward.shape, generator=generator),
        value=torch.randn(rollout.done.shape, generator=generator),
        final_value=torch.randn(len(rollout.final_index), generator=generator))
    return rollout


def started(**options):
    storage = build(**options)
    storage.start(observation(0))
    return storage


def test_rollout_starts_with_the_observation_of_the_first_action():
    storage = started()
    obs, rhs, done, mask = storage.current()
    np.testing.assert_array_equal(obs["obs"], observation(0)["obs"])
    assert done.all()
    assert rhs == {}
    assert mask is None
    fill(storage, 1, 5)
    rollout = storage.get_all_buffer_data()
    assert rollout.obs["obs"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rollout.action[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert rollout.done[:, 0].tolist() == [True] + [False] * 5


def test_rollouts_are_contiguous_even_after_preemption():
    storage = started(actor=stub_actor(2), algorithm=stub_algorithm())
    fill(storage, 1, 3, state_size=2, starts=[1])
    assert not storage.full
    first = storage.get_all_buffer_data()
    assert first.num_steps == 3
    np.testing.assert_array_equal(storage.current()[0]["obs"], first.obs["obs"][3])
    assert storage.num_steps == 0
    fill(storage, 4, 5, state_size=2)
    assert storage.full
    second = storage.get_all_buffer_data()
    assert torch.equal(second.obs["obs"][0], first.obs["obs"][3])
    assert torch.equal(second.rhs["policy"][0], first.rhs["policy"][3])
    assert second.done[0].tolist() == [False, True, False]
    assert second.obs["obs"][:, 0, 0].tolist() == [3, 4, 5, 6, 7, 8]


def test_copied_rollout_is_unchanged_by_the_next_rollout():
    storage = started()
    fill(storage, 1, 5, finals=[0], starts=[0])
    rollout = storage.get_all_buffer_data(copy=True)
    before = rollout.map(torch.clone)
    fill(storage, 6, 5, finals=[2], starts=[2], reward=7.0)
    for name in ("done", "action", "reward", "truncated", "final_index"):
        assert torch.equal(getattr(rollout, name), getattr(before, name)), name
    assert torch.equal(rollout.obs["obs"], before.obs["obs"])
    assert torch.equal(rollout.final_obs["obs"], before.final_obs["obs"])


def test_views_are_valid_until_the_next_transition_and_use_no_memory():
    storage = started()
    fill(storage, 1, 5)
    rollout = storage.get_all_buffer_data(copy=False)
    before = rollout.obs["obs"].clone()
    storage.current()
    assert torch.equal(rollout.obs["obs"], before)
    fill(storage, 6, 5)
    assert storage.get_all_buffer_data(copy=False).obs["obs"].data_ptr() == rollout.obs["obs"].data_ptr()


def test_stored_state_is_a_copy_of_the_state_before_the_observation():
    storage = started(actor=stub_actor(2))
    acting = acting_of(1, 2)
    storage.insert_transition(acting, step_of(1))
    acting.rhs["policy"][:] = -1.0
    rollout = storage.get_all_buffer_data()
    assert rollout.rhs["policy"][:, 0, 0].tolist() == [0.0, 1.0]


def test_any_number_of_final_observations_is_stored():
    storage = started(size=100)
    fill(storage, 1, 100, finals=[0, 2], starts=[0, 2])
    rollout = storage.get_all_buffer_data()
    assert rollout.final_index.tolist() == [[t, e] for t in range(100) for e in (0, 2)]
    expected = [101.0 + t + e / 10 for t in range(100) for e in (0, 2)]
    np.testing.assert_allclose(rollout.final_obs["obs"][:, 0], expected, rtol=1e-6)
    fill(storage, 101, 1)
    assert len(storage.get_all_buffer_data().final_index) == 0


def test_observations_keep_their_dtypes():
    storage = build()
    storage.start({"image": np.zeros((E, 1, 2, 2), np.uint8), "vector": np.zeros((E, 2), np.float32),
                   "time": np.full((E, 2), 1e9 + 0.1)})
    obs = storage.current()[0]
    assert [obs[name].dtype for name in ("image", "vector", "time")] == [np.uint8, np.float32, np.float64]
    assert obs["time"].tolist() == [[1e9 + 0.1] * 2] * E


def test_full_storage_refuses_another_transition():
    storage = started()
    fill(storage, 1, 5)
    with pytest.raises(RuntimeError, match=r"call get_all_buffer_data\(\) first"):
        fill(storage, 6, 1)
    storage.get_all_buffer_data()
    fill(storage, 6, 1)


def ready(storage, *rollouts):
    storage.insert_data_slice([learnable(rollout) for rollout in rollouts])
    storage.before_gradients()
    return storage


@pytest.mark.parametrize("num_parts", [1, 4, 7])
def test_each_epoch_uses_each_valid_sample_once_in_nearly_equal_batches(num_parts):
    storage = started(size=11)
    fill(storage, 1, 11, invalid=[1])
    ready(storage, storage.get_all_buffer_data())
    batches = list(storage.generate_batches(num_parts, num_epochs=3))
    assert len(batches) == 3 * num_parts
    expected = sorted(round(t + e / 10, 1) for t in range(11) for e in (0, 2))
    for epoch in range(3):
        parts = batches[epoch * num_parts:(epoch + 1) * num_parts]
        sizes = [part.num_samples for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(round(x, 1) for part in parts for x in part.obs["obs"][:, 0].tolist()) == expected
        assert [part.num_new_samples for part in parts] == (sizes if epoch == 0 else [0] * num_parts)
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert storage.counters == {"inserted": 22, "sampled": 66, "resident": 22}


def test_samples_of_a_batch_belong_together():
    storage = started(size=11)
    fill(storage, 1, 11)
    rollout = storage.get_all_buffer_data()
    ready(storage, rollout)
    advantage, ret = gae(rollout, rollout.other["value"], rollout.other["final_value"], 0.9, 0.95)
    for batch in storage.generate_batches(4):
        for i, number in enumerate(batch.obs["obs"][:, 0].tolist()):
            t, e = int(number + 1e-3), round((number % 1) * 10)
            assert batch.action[i] == t + 1
            assert batch.logp[i] == rollout.other["logp"][t, e]
            assert batch.value[i] == rollout.other["value"][t, e]
            assert batch.advantage[i] == advantage[t, e]
            assert batch.ret[i] == ret[t, e]


def test_batches_of_small_samples_are_views_and_equal_those_of_large_samples(monkeypatch):
    found = []
    for limit in (2**20, 0):
        monkeypatch.setattr(samples, "_SMALL_BYTES", limit)
        storage = build(size=11)
        storage.start(observation(0), np.ones((E, 4), bool))
        fill(storage, 1, 11, invalid=[1], mask=np.arange(4) < np.arange(1, E + 1)[:, None])
        ready(storage, storage.get_all_buffer_data())
        found.append(list(storage.generate_batches(4, num_epochs=2)))
    views, copies = found
    assert {batch.logp.untyped_storage().data_ptr() for batch in views[:4]} == {
        views[0].logp.untyped_storage().data_ptr()}
    assert len({batch.logp.untyped_storage().data_ptr() for batch in copies}) == len(copies)
    for view, copy in zip(views, copies, strict=True):
        assert (view.num_samples, view.num_new_samples, view.last) == (
            copy.num_samples, copy.num_new_samples, copy.last)
        assert view.rhs == copy.rhs == {}
        assert view.valid is copy.valid is None
        for name in ("done", "mask", "action", "logp", "value", "ret", "advantage"):
            assert torch.equal(getattr(view, name), getattr(copy, name)), name
        assert torch.equal(view.obs["obs"], copy.obs["obs"])


def test_first_and_last_batch_see_the_same_observation_0():
    storage = started()
    fill(storage, 1, 5)
    ready(storage, storage.get_all_buffer_data(copy=False))
    batches = list(storage.generate_batches(1, num_epochs=4))
    rows = [sorted(batch.obs["obs"][:, 0].tolist())[:E] for batch in batches]
    assert rows[0] == rows[-1] == observation(0)["obs"][:, 0].tolist()


def test_mini_batch_size_replaces_the_number_of_batches():
    storage = started()
    fill(storage, 1, 5)
    ready(storage, storage.get_all_buffer_data())
    assert [batch.num_samples for batch in storage.generate_batches(1, mini_batch_size=4)] == [4, 4, 4, 3]


def test_preempted_rollout_equals_a_full_rollout_of_that_size():
    batches = []
    for size in (5, 3):
        storage = started(size=size)
        fill(storage, 50, size)  # the shorter rollout below does not overwrite the last rows
        storage.get_all_buffer_data()
        storage.start(observation(0))
        fill(storage, 1, 3)
        ready(storage, storage.get_all_buffer_data(copy=False))
        assert storage.advantage_moments()[0] == 3 * E
        batches.append(list(storage.generate_batches(2)))
    for cut, whole in zip(*batches, strict=True):
        assert torch.equal(cut.obs["obs"], whole.obs["obs"])
        assert torch.equal(cut.advantage, whole.advantage)
        assert torch.equal(cut.ret, whole.ret)


def test_rollouts_of_different_lengths_are_one_set_of_samples():
    storage = started()
    fill(storage, 1, 2)
    short = storage.get_all_buffer_data()
    fill(storage, 3, 5)
    ready(storage, short, storage.get_all_buffer_data())
    seen = sorted(int(x + 1e-3) for batch in storage.generate_batches(4) for x in batch.obs["obs"][:, 0].tolist())
    assert seen == sorted(E * list(range(7)))


def test_empty_rollout_gives_no_batches():
    storage = started()
    fill(storage, 1, 2)
    storage.get_all_buffer_data()
    nothing = storage.get_all_buffer_data()
    assert nothing.num_steps == 0
    ready(storage, nothing)
    assert list(storage.generate_batches(4)) == []
    assert storage.advantage_moments() == (0, 0.0, 0.0)


def test_advantages_are_normalized_once_over_valid_samples():
    storage = started(algorithm=stub_algorithm(advantage_normalization="batch"))
    fill(storage, 1, 5, invalid=[0])
    ready(storage, storage.get_all_buffer_data())
    advantage = torch.cat([batch.advantage for batch in storage.generate_batches(3, num_epochs=2)])
    assert len(advantage) == 2 * 10
    assert advantage.mean().abs() < 1e-6
    assert advantage[:10].std() == pytest.approx(1.0, abs=1e-5)


def test_externally_normalized_advantages_are_not_changed():
    storage = started(algorithm=stub_algorithm(advantage_normalization="batch"))
    fill(storage, 1, 5)
    ready(storage, storage.get_all_buffer_data())
    _, mean, _ = storage.advantage_moments()
    storage.normalize_advantages(mean + 5.0, 2.0)
    after = torch.cat([batch.advantage for batch in storage.generate_batches(1)])
    assert after.mean() == pytest.approx(-2.5, abs=1e-4)


def test_recomputed_advantages_use_values_of_the_current_weights():
    calls = []

    def compute_values(rollout):
        calls.append(1)
        return torch.full((6, E), float(len(calls))), torch.zeros(0)

    storage = started(algorithm=stub_algorithm(recompute_advantages=True, compute_values=compute_values))
    fill(storage, 1, 5, reward=0.0)
    rollout = storage.get_all_buffer_data()
    ready(storage, rollout)
    batches = list(storage.generate_batches(1, num_epochs=3))
    assert len(calls) == 2
    # Without rewards, and with V = 1 everywhere, each return is a weighted mean of 0.9**n for n from 1 to 5.
    assert 0.59 < float(batches[1].ret.min()) <= float(batches[1].ret.max()) <= 0.91
    torch.testing.assert_close(batches[2].ret.sort().values, 2 * batches[1].ret.sort().values)
    assert torch.equal(batches[2].value.sort().values, rollout.other["value"][:-1].flatten().sort().values)


def test_normalized_rewards_are_scaled_and_clipped():
    actor = stub_actor()
    actor.options.normalize_reward = True
    ret = []
    for reward in (1.0, 50.0):
        storage = started(size=1, actor=actor, gae_lambda=0.0, algorithm=stub_algorithm(gamma=0.0))
        fill(storage, 1, 1, reward=reward)
        ready(storage, storage.get_all_buffer_data())
        ret += next(storage.generate_batches(1)).ret.tolist()
    assert ret == pytest.approx([2.0] * E + [10.0] * E)


def test_vanilla_buffer_equals_gae_with_lambda_1():
    def returns(storage):
        storage.start(observation(0))
        fill(storage, 1, 5)
        return next(ready(storage, storage.get_all_buffer_data()).generate_batches(1)).ret

    vanilla = returns(build(cls=VanillaOnPolicyBuffer))
    torch.testing.assert_close(vanilla, returns(build(gae_lambda=1.0)))
    assert not torch.allclose(vanilla, returns(build(gae_lambda=0.9)))


# Sequences


def test_whole_columns_keep_order_and_first_state():
    storage = started(actor=stub_actor(2))
    fill(storage, 1, 5, state_size=2)
    rollout = storage.get_all_buffer_data()
    fill(storage, 6, 2, state_size=2, invalid=[1])
    short = storage.get_all_buffer_data()
    ready(storage, rollout, short)
    batches = list(storage.generate_batches(2))
    assert sorted(batch.obs["obs"].shape[1] for batch in batches) == [2, 3]  # one of six columns has no valid step
    assert sum(batch.num_samples for batch in batches) == 15 + 4
    for batch in batches:
        for column in range(batch.obs["obs"].shape[1]):
            numbers, valid = batch.obs["obs"][:, column, 0], batch.valid[:, column]
            start = int(numbers[0] + 1e-3)
            length = {0: 5, 5: 2}[start]
            assert batch.rhs["policy"][column].tolist() == [float(start)] * 2
            assert batch.action[:length, column].tolist() == list(range(start + 1, start + 1 + length))
            assert batch.done[length:, column].all()
            assert not valid[length:].any()


@pytest.mark.parametrize("num_steps", [6, 5])
def test_chunks_start_with_their_stored_state(num_steps):
    storage = started(size=num_steps, actor=stub_actor(1), sequence_length=2)
    fill(storage, 1, num_steps, state_size=1)
    ready(storage, storage.get_all_buffer_data())
    seen = []
    for batch in storage.generate_batches(4):
        assert batch.obs["obs"].shape[0] == 2
        assert torch.equal(batch.rhs["policy"][:, 0].int(), (batch.obs["obs"][0, :, 0] + 1e-3).int())
        seen += [int(x + 1e-3) for x in batch.obs["obs"][..., 0][batch.valid].tolist()]
    assert sorted(seen) == sorted(E * list(range(num_steps)))


def test_sequences_without_valid_steps_are_omitted():
    storage = build(actor=stub_actor(1), algorithm=stub_algorithm(num_mini_batch=1))
    mask = np.array([[True, False]] * E)
    storage.start(observation(0), mask)
    for number in range(1, 6):
        storage.insert_transition(acting_of(number, 1), step_of(number, invalid=[1] + [0] * (number == 3), mask=mask))
    rollout = learnable(storage.get_all_buffer_data())
    rollout.other["logp"][~rollout.valid] = torch.nan
    storage.insert_data_slice([rollout])
    storage.before_gradients()
    batch = next(storage.generate_batches(1))
    assert batch.obs["obs"].shape[1] == 2
    assert batch.num_samples == 9
    assert batch.mask[~batch.valid].all()
    assert not batch.mask[batch.valid].all()
    assert batch.logp.isfinite().all()


@pytest.mark.parametrize(("options", "context", "message"), [
    ({"size": 0}, {}, "size must be a whole number >= 1"),
    ({"gae_lambda": 1.5}, {}, "gae_lambda"),
    ({"gae_lamda": 0.9}, {}, "did you mean 'gae_lambda'"),
    ({"sequence_length": 4}, {}, "needs an actor with memory"),
    ({}, {"actor": stub_actor(1), "algorithm": stub_algorithm(num_mini_batch=4)}, "fewer than num_mini_batch=4"),
])
def test_wrong_settings_raise(options, context, message):
    with pytest.raises(ConfigError, match=message):
        build(**options, **context)


def test_batch_order_depends_on_the_seed_and_can_be_restored():
    def order(storage):
        return torch.cat([batch.obs["obs"] for batch in storage.generate_batches(2)])

    storages = [started(seed=seed) for seed in (1, 1, 2)]
    for storage in storages:
        fill(storage, 1, 5)
        ready(storage, storage.get_all_buffer_data())
    first, again, other = map(order, storages)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    state = storages[0].state_dict()
    second = order(storages[0])
    storages[2].load_state_dict(state)
    assert torch.equal(order(storages[2]), second)
