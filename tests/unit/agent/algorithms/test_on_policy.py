"""Test properties that all on-policy algorithms share: options, updates, slices, states and schedules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pytorchrl.agent.algorithms import A2C, PPO
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.schedules import linear
from pytorchrl.agent.moments import mean_and_std
from pytorchrl.errors import ConfigError, NonFiniteUpdateError, WeightsError

MEMORY = {"recurrent_net": "gru", "recurrent_size": 5}


# Options


RND = {"intrinsic_reward": "rnd"}
# Maps each option to (other settings that the option needs to have an effect, a non-default value).
CHANGES = {
    "lr": ({}, 1e-2), "optimizer": ({}, "sgd"), "adam_eps": ({}, 1e-2), "adam_beta1": ({}, 0.5),
    "rmsprop_eps": ({"optimizer": "rmsprop"}, 1e-2), "rmsprop_decay": ({"optimizer": "rmsprop"}, 0.5),
    "weight_decay": ({"optimizer": "adamw"}, 0.5), "momentum": ({"optimizer": "sgd"}, 0.5),
    "max_grad_norm": ({"optimizer": "sgd"}, 1e-3), "gamma": ({}, 0.5), "num_epochs": ({}, 1), "num_mini_batch": ({}, 2),
    "mini_batch_size": ({}, 16),
    "value_loss_coef": ({}, 2.0), "entropy_coef": ({}, 0.5), "advantage_normalization": ({}, "none"),
    "mixed_precision": ({}, True), "clip_param": ({"lr": 1e-2}, 0.01), "use_clipped_value_loss": ({"lr": 1e-2}, True),
    "clip_param_vf": ({"lr": 1e-2, "use_clipped_value_loss": True}, 0.01), "recompute_advantages": ({"lr": 1e-2}, True),
    "correction": ({"lr": 1e-2}, "none"), "max_weight": ({"lr": 1e-2, "correction": "tis"}, 1.0001),
    "min_weight": ({"lr": 1e-2, "correction": "icepop"}, 0.999), "max_shift": ({"lr": 1e-2, "correction": "ipo"}, 1e-6),
    "max_moment": ({"lr": 1e-2, "correction": "m2po"}, 1e-9),
    "dual_clip": ({"lr": 0.1}, 1.001), "intrinsic_reward": ({}, "rnd"), "gamma_intrinsic": (RND, 0.5),
    "int_adv_coef": (RND, 3.0), "ext_adv_coef": (RND, 0.5), "predictor_proportion": (RND, 0.5),
}
ELSEWHERE = {"target_kl", "compile"}  # these options have separate tests


def test_table_of_changes_names_every_option():
    assert {field.name for field in dataclasses.fields(PPO.Options)} == CHANGES.keys() | ELSEWHERE
    assert {field.name for field in dataclasses.fields(A2C.Options)} <= CHANGES.keys() | ELSEWHERE


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_training(train, plain_params, name):
    base, value = CHANGES[name]
    plain, changed = plain_params(rollouts=1, **base), train(rollouts=1, **{**base, name: value})[0].params
    changed = changed[:len(plain)]  # networks of an intrinsic reward come last
    assert plain.isfinite().all()
    assert not torch.equal(plain, changed)


@pytest.mark.parametrize("cls", [PPO, A2C])
def test_algorithm_builds_from_defaults_and_learns(train, cls):
    parts, infos = train(cls)
    assert parts.algorithm.learns_from is DataKind.ROLLOUTS
    assert len(infos) == 2 * parts.algorithm.num_epochs * parts.algorithm.num_mini_batch
    assert all(math.isfinite(value) for info in infos for value in info.values())


def test_defaults_of_a2c_are_its_own():
    options = A2C.create_factory().options
    assert (options.lr, options.optimizer, options.num_epochs, options.num_mini_batch) == (7e-4, "rmsprop_tf", 1, 1)
    assert options.advantage_normalization == "none"


@pytest.mark.parametrize(("options", "message"), [
    ({"clip_parm": 0.1}, "did you mean 'clip_param'"), ({"lr": -1.0}, "lr must be a number >= 0"),
    ({"optimizer": "adm"}, "did you mean 'adam'"), ({"gamma": 1.1}, "gamma"), ({"num_epochs": 0}, "num_epochs"),
    ({"clip_param": linear(0.0, 0.2)}, "clip_param must be > 0"),
    ({"dual_clip": 1.0}, "dual_clip must be a number > 1"),
    ({"recompute_advantages": True, "advantage_normalization": "batch"}, "recompute_advantages"),
])
def test_wrong_options_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        PPO.create_factory(**options)


# Updates


@pytest.mark.every(3)
@pytest.mark.parametrize("actor", [{}, MEMORY], ids=["mlp", "gru"])
@pytest.mark.parametrize("normalization", ["none", "batch"])
@pytest.mark.parametrize("cls", [PPO, A2C])
@pytest.mark.parametrize("num_slices", [2, 3])
def test_weighted_mean_over_slices_equals_the_whole_batch(
    build, collect, made_up_steps, cls, normalization, num_slices, actor
):
    options = {"advantage_normalization": normalization, "num_epochs": 5, "num_mini_batch": 1, "actor": actor}
    if cls is A2C:
        options["lr"] = 0.02  # the first steps are small, because rmsprop_tf starts with a mean square of 1
    collector = build(cls, **options)
    rollouts = [collect(collector, made_up_steps(4, seed=seed, next_step=True), 8 - seed) for seed in range(num_slices)]
    whole, *workers = [build(cls, **options) for _ in range(1 + num_slices)]
    whole.storage.insert_data_slice(rollouts)
    for worker, rollout in zip(workers, rollouts, strict=True):
        worker.storage.insert_data_slice([rollout])
    for parts in (whole, *workers):
        parts.storage.before_gradients()
    if normalization == "batch":
        mean, std = mean_and_std(worker.storage.advantage_moments() for worker in workers)
        for worker in workers:
            worker.storage.normalize_advantages(mean, std)
    batches = [parts.storage.generate_batches(1, num_epochs=5) for parts in (whole, *workers)]
    for batch, *slices in zip(*batches, strict=True):
        assert batch.num_samples == sum(part.num_samples for part in slices)
        gradient = sum(
            worker.algorithm.compute_gradients(part)[0][0] * (part.num_samples / batch.num_samples)
            for worker, part in zip(workers, slices, strict=True))
        whole.algorithm.compute_gradients(batch)
        whole.algorithm.apply_gradients()
        for worker in workers:
            worker.algorithm.apply_gradients([gradient])
    expected = whole.params
    for worker in workers:
        assert torch.equal(worker.params, workers[0].params)
        assert (worker.params - expected).norm() <= 1e-6 * expected.norm()
    assert (expected - collector.params).norm() > 1e-3 * expected.norm()


def test_gradients_are_clipped_when_applied_and_not_before(build, collect, made_up_steps):
    parts = build(PPO, optimizer="sgd", lr=1.0, max_grad_norm=1e-3)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    gradients, _ = parts.algorithm.compute_gradients(next(parts.storage.generate_batches(1)))
    norm = float(gradients[0].norm())
    assert norm > 1e-2
    before = parts.params.clone()
    # The gradients of two workers point in opposite directions, so their mean is small and must not be clipped.
    info = parts.algorithm.apply_gradients([(gradients[0] + -0.999999 * gradients[0]) / 2])
    assert info["grad_norm"] < 1e-3
    moved = float((parts.params - before).norm())
    assert moved == pytest.approx(info["grad_norm"], rel=0.3)
    before = parts.params.clone()
    assert parts.algorithm.apply_gradients(gradients)["grad_norm"] == pytest.approx(norm)
    assert float((parts.params - before).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_computing_gradients_changes_nothing(build, collect, made_up_steps):
    parts = build(PPO)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    before = parts.whole_state
    batch = next(parts.storage.generate_batches(1))
    first = parts.algorithm.compute_gradients(batch)[0][0].clone()
    assert torch.equal(first, parts.algorithm.compute_gradients(batch)[0][0])
    assert torch.equal(before, parts.whole_state)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_raises_and_changes_nothing(train, bad):
    parts, _ = train()
    before = parts.whole_state
    gradient = torch.zeros_like(parts.params)
    gradient[3] = bad
    with pytest.raises(NonFiniteUpdateError, match="norm of the gradient"):
        parts.algorithm.apply_gradients([gradient])
    assert torch.equal(before, parts.whole_state)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_makes_the_gradient_nan_and_changes_nothing(
        build, collect, made_up_steps, monkeypatch, bad):
    parts = build(PPO)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    before = parts.whole_state
    terms = PPO.terms

    def bad_terms(self, *args):  # the added constant affects the loss, but not its derivative
        found, measures = terms(self, *args)
        return {**found, "policy_loss": found["policy_loss"] + bad}, measures
    monkeypatch.setattr(PPO, "terms", bad_terms)
    gradients, info = parts.algorithm.compute_gradients(next(parts.storage.generate_batches(1)))
    assert not math.isfinite(info["loss"])
    assert gradients[0].isnan().all()
    for given in (gradients, None):
        with pytest.raises(NonFiniteUpdateError, match="norm of the gradient is nan"):
            parts.algorithm.apply_gradients(given)
    assert torch.equal(before, parts.whole_state)


@pytest.mark.parametrize("actor", [{}, MEMORY], ids=["mlp", "gru"])
def test_reruns_are_bit_identical_and_another_seed_differs(train, actor):
    runs = [train(seed=seed, actor=actor, next_step=True)[0].whole_state for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(("limit", "value"), [("_CHUNK_BYTES", 5 * 4 * 3), ("_CACHE_ROWS", 5)])
def test_values_of_a_large_rollout_are_computed_in_chunks(build, collect, made_up_steps, monkeypatch, limit, value):
    parts = build(PPO, actor={**MEMORY, "shared_policy_value_network": True})
    rollout = collect(parts, made_up_steps(4))
    whole = parts.algorithm.compute_values(rollout)
    monkeypatch.setattr(f"pytorchrl.agent.algorithms.rollouts.{limit}", value)
    sizes, values_of = [], type(parts.algorithm)._values_of
    monkeypatch.setattr(type(parts.algorithm), "_values_of", lambda algorithm, *args: sizes.append(
        len(args[2])) or values_of(algorithm, *args))
    for chunked, expected in zip(parts.algorithm.compute_values(rollout), whole, strict=True):
        torch.testing.assert_close(chunked, expected)
    assert max(sizes) == 5
    # All rows of the stored values except the last row were computed while acting.
    torch.testing.assert_close(rollout.other["value"], whole[0])


# Current parameters


def test_schedules_end_at_the_target_and_affect_updates(build):
    parts = build(PPO, lr=linear(1e-3, 0.0), clip_param=linear(0.2, 0.1, steps=500), entropy_coef=linear(0.1, 0.0))
    algorithm = parts.algorithm
    assert algorithm.parameters["lr"] == 1e-3
    assert algorithm.follow_schedules(500, 1000) == pytest.approx({"lr": 5e-4, "clip_param": 0.1, "entropy_coef": 0.05})
    algorithm.follow_schedules(1000, 1000)
    assert (algorithm.parameters["lr"], algorithm.parameters["clip_param"]) == (0.0, 0.1)
    before = parts.params.clone()
    assert algorithm.apply_gradients([torch.ones_like(before)])["lr"] == 0.0
    assert torch.equal(parts.params, before)


def test_updated_parameter_takes_effect_and_ends_its_schedule(build):
    algorithm = build(PPO, lr=linear(1e-3, 0.0)).algorithm
    algorithm.update_algorithm_parameter("lr", 5e-5)
    algorithm.follow_schedules(1000, 1000)
    assert algorithm.parameters["lr"] == algorithm.options.lr == 5e-5
    algorithm.update_algorithm_parameter("clip_param", linear(0.3, 0.1))
    assert algorithm.follow_schedules(0, 1000) == {"clip_param": 0.3}
    algorithm.update_algorithm_parameter("max_grad_norm", None)
    assert "max_grad_norm" not in algorithm.parameters


@pytest.mark.parametrize(("name", "value", "error"), [
    ("learning_rate", 1e-3, KeyError), ("num_epochs", 2, KeyError), ("lr", -1.0, ConfigError),
    ("lr", "1", ConfigError)])
def test_parameter_that_cannot_be_updated_raises_and_changes_nothing(build, name, value, error):
    algorithm = build(PPO).algorithm
    before = dict(algorithm.parameters)
    with pytest.raises(error, match="lr"):
        algorithm.update_algorithm_parameter(name, value)
    assert algorithm.parameters == before


# States


def test_receiving_weights_ten_times_changes_nothing_else(train, build):
    sender = build(PPO, seed=5)
    parts, _ = train()
    before = parts.algorithm.state_dict()
    for _ in range(10):
        parts.algorithm.load_acting_state(sender.algorithm.acting_state())
    after = parts.algorithm.state_dict()
    assert torch.equal(parts.params, sender.params)
    for name, moment in before["optimizers"]["all"].items():
        assert torch.equal(moment, after["optimizers"]["all"][name])
    assert before["gradient"]["parameters"] == after["gradient"]["parameters"]
    assert torch.equal(before["generator"], after["generator"])


def test_acting_state_is_a_copy_with_the_normalizers(build, collect, made_up_steps):
    parts = build(PPO, actor={"normalize_obs": True, "normalize_reward": True})
    state = parts.algorithm.acting_state()
    rollout = collect(parts, made_up_steps(4))
    parts.actor.merge_moments(parts.actor.moments_of(rollout, rollout.reward))
    parts.params.add_(1.0)
    moved = parts.algorithm.acting_state()
    assert state.keys() == moved.keys()
    assert len(state) > 1
    assert not any(torch.equal(state[name], moved[name]) for name in state)
    other = build(PPO, seed=3, actor={"normalize_obs": True, "normalize_reward": True})
    other.algorithm.load_acting_state(moved)
    assert all(torch.equal(value, moved[name]) for name, value in other.algorithm.acting_state().items())


def test_received_read_only_arrays_are_loaded_and_never_written(build):
    sender, receiver = build(PPO, seed=5, actor={"normalize_obs": True}), build(PPO, actor={"normalize_obs": True})
    arrays = {name: value.numpy() for name, value in sender.algorithm.acting_state().items()}
    for array in arrays.values():
        array.flags.writeable = False  # arrays received from Ray are read-only too
    receiver.algorithm.load_acting_state(arrays)
    assert torch.equal(receiver.params, sender.params)
    receiver.params.add_(1.0)
    sent = sender.algorithm.acting_state()
    assert all(torch.equal(torch.tensor(array), sent[name]) for name, array in arrays.items())


def test_acting_state_that_does_not_fit_raises_and_changes_nothing(build):
    parts, other = build(PPO), build(PPO, actor={"hidden_sizes": (9,)})
    before = parts.params.clone()
    with pytest.raises(WeightsError, match="shape"):
        parts.algorithm.load_acting_state(other.algorithm.acting_state())
    with pytest.raises(WeightsError, match="needs"):
        parts.algorithm.load_acting_state({**parts.algorithm.acting_state(), "extra": torch.zeros(1)})
    assert torch.equal(parts.params, before)


def test_gradient_state_contains_current_parameters(build):
    sender, receiver = build(PPO, clip_param=linear(0.2, 0.1)), build(PPO, clip_param=linear(0.2, 0.1), seed=9)
    sender.algorithm.follow_schedules(1, 1)
    receiver.algorithm.load_gradient_state(sender.algorithm.gradient_state())
    assert receiver.algorithm.parameters["clip_param"] == 0.1
    assert torch.equal(receiver.params, sender.params)


def test_restored_algorithm_continues_bit_for_bit(train, build, collect, learn, made_up_steps):
    parts, _ = train(lr=linear(1e-3, 0.0))
    restored = build(PPO, lr=linear(1e-3, 0.0), seed=7)
    restored.algorithm.load_state_dict(parts.algorithm.state_dict())
    for one in (parts, restored):
        one.algorithm.follow_schedules(1, 4)
    state = parts.storage.state_dict()
    for one in (parts, restored):
        one.storage.load_state_dict(state)
        learn(one, [collect(one, made_up_steps(4, seed=3))])
    assert torch.equal(parts.whole_state, restored.whole_state)
