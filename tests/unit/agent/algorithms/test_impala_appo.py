"""Compare losses of IMPALA and APPO with hand-written losses; test the slow policy and the KL coefficient."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import distributions

from pytorchrl.agent.algorithms import A2C, APPO, IMPALA, PPO
from pytorchrl.agent.algorithms.rnd import IntrinsicOptions
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.schedules import linear
from pytorchrl.agent.storages import VanillaOnPolicyBuffer
from pytorchrl.errors import ConfigError, NonFiniteUpdateError, WeightsError

MEMORY = {"recurrent_net": "gru", "recurrent_size": 5}
SLOW = {"target_network": True}
SETTINGS = [
    {}, {"masked": True}, {"next_step": True}, {"actor": MEMORY},
    {"actor": {**MEMORY, "recurrent_net": "lstm"}, "next_step": True, "masked": True},
    {"actor": MEMORY, "storage": {"sequence_length": 3}},
    {"actor": {**MEMORY, "shared_policy_value_network": True}}, {"actor": {"shared_policy_value_network": True}},
]


def move(parts, seed):
    """Add random noise to the parameters."""
    generator = torch.Generator().manual_seed(seed)
    parts.params.add_(torch.randn(len(parts.params), generator=generator), alpha=0.3)


def slow_of(parts):
    return torch.cat([param.flatten() for param in parts.algorithm._slow.parameters()])


def open_batch(parts, rollout):
    """Return all samples of a rollout in one batch, with targets from the current weights."""
    parts.storage.insert_data_slice([rollout])
    parts.storage.before_gradients()
    (batch,) = parts.storage.generate_batches(1)
    return batch


@pytest.fixture
def older_rollout(build, collect, made_up_steps):
    """Return a function that collects a rollout with weights that differ from the learner's."""
    def run(cls=IMPALA):
        parts = build(cls, seed=5)
        move(parts, seed=1)
        return collect(parts, made_up_steps(4))
    return run


def policy_of(actor, obs):
    """Return logits and values, computed layer by layer."""
    def through(trunk, head):
        x = obs
        for layer in trunk.extractor.layers:
            x = torch.tanh(layer(x))
        return head(x)
    return through(actor.policy, actor.policy_head), through(actor.value, actor.value_head)[:, 0]


# Losses


def test_gradient_of_impala_matches_its_formula(build, older_rollout):
    parts = build(IMPALA, value_loss_coef=0.3, entropy_coef=0.02)
    batch = open_batch(parts, older_rollout())
    gradients, info = parts.algorithm.compute_gradients(batch)
    logits, values = policy_of(parts.actor, batch.obs["obs"])
    policy = distributions.Categorical(logits=logits)
    loss = (-(batch.advantage * policy.log_prob(batch.action)).mean()
            + 0.3 * 0.5 * (batch.ret - values).square().mean() - 0.02 * policy.entropy().mean())
    expected = torch.autograd.grad(loss, list(parts.actor.parameters()))
    torch.testing.assert_close(gradients[0], torch.cat([part.flatten() for part in expected]), rtol=1e-4, atol=1e-6)
    assert info["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_gradient_of_appo_matches_its_formula(build, older_rollout, kl_coef):
    parts = build(APPO, seed=0, advantage_normalization="none", clip_param=0.05, kl_coef=kl_coef)
    move(parts, seed=2)
    batch = open_batch(parts, older_rollout(APPO))
    gradients, info = parts.algorithm.compute_gradients(batch)
    logits, values = policy_of(parts.actor, batch.obs["obs"])
    policy = distributions.Categorical(logits=logits)
    log_ratio = policy.log_prob(batch.action) - batch.logp
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * batch.advantage, ratio.clamp(0.95, 1.05) * batch.advantage)
    kl = (ratio - 1 - log_ratio).mean()
    loss = (-surrogate.mean() + 0.5 * 0.5 * (batch.ret - values).square().mean() - 0.01 * policy.entropy().mean()
            + kl_coef * kl)
    expected = torch.autograd.grad(loss, list(parts.actor.parameters()))
    torch.testing.assert_close(gradients[0], torch.cat([part.flatten() for part in expected]), rtol=1e-4, atol=1e-6)
    assert info["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert info["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert info["kl"] > 1e-3
    assert 0 < info["clip_fraction"] < 1


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_gradient_of_impact_matches_its_formula(build, older_rollout, kl_coef):
    """Check the gradient of a loss whose ratio and KL divergence depend on the slow policy.

    The ratio is clip(mu / slow, 0, is_clip) pi / mu, and the divergence is KL(slow || pi).
    """
    parts = build(APPO, advantage_normalization="none", clip_param=0.1, kl_coef=kl_coef, is_clip=1.1, **SLOW)
    move(parts, seed=2)
    batch = open_batch(parts, older_rollout(APPO))
    gradients, info = parts.algorithm.compute_gradients(batch)
    logits, values = policy_of(parts.actor, batch.obs["obs"])
    policy = distributions.Categorical(logits=logits)
    slow = distributions.Categorical(logits=policy_of(parts.algorithm._slow, batch.obs["obs"])[0].detach())
    weight = (batch.logp - slow.log_prob(batch.action)).exp()
    assert (weight > 1.1).any()  # some importance weights are clipped
    ratio = weight.clamp(0.0, 1.1) * (policy.log_prob(batch.action) - batch.logp).exp()
    surrogate = torch.minimum(ratio * batch.advantage, ratio.clamp(0.9, 1.1) * batch.advantage)
    kl = distributions.kl_divergence(slow, policy).mean()
    loss = (-surrogate.mean() + 0.5 * 0.5 * (batch.ret - values).square().mean() - 0.01 * policy.entropy().mean()
            + kl_coef * kl)
    expected = torch.autograd.grad(loss, list(parts.actor.parameters()))
    torch.testing.assert_close(gradients[0], torch.cat([part.flatten() for part in expected]), rtol=1e-4, atol=1e-6)
    assert info["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert info["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("cls", [APPO, IMPALA])
def test_appo_and_impala_equal_ppo_and_a2c_on_on_policy_data(build, collect, made_up_steps, cls):
    """Check that V-trace equals GAE with lambda = 1 when all importance ratios are 1."""
    plain = {APPO: PPO, IMPALA: A2C}[cls]
    gradients = []
    for kind in (cls, plain):
        parts = build(kind)
        if kind is plain:
            parts.storage = VanillaOnPolicyBuffer.create_factory(size=8)(
                actor=parts.actor, algorithm=parts.algorithm, num_envs=4, seed=0)
        gradient, info = parts.algorithm.compute_gradients(open_batch(parts, collect(parts, made_up_steps(4))))
        gradients.append(gradient[0].clone())
        assert info.get("kl", 0.0) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_appo_without_clipping_equals_impala_on_on_policy_data(build, collect, made_up_steps):
    gradients = []
    for cls, options in ((APPO, {"clip_param": 1e6, "advantage_normalization": "none"}), (IMPALA, {})):
        parts = build(cls, **options)
        batch = open_batch(parts, collect(parts, made_up_steps(4)))
        gradients.append(parts.algorithm.compute_gradients(batch)[0][0].clone())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.every(3)
@pytest.mark.parametrize("slow", [{}, {**SLOW, "kl_coef": 0.3}], ids=["plain", "slow"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_first_batch_of_appo_has_ratio_1(train, settings, slow):
    _, infos = train(APPO, size=12, rollouts=1, lr=1e-2, target_update_interval=4 if slow else 2, **settings, **slow)
    assert infos[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert infos[0]["clip_fraction"] == 0.0
    assert infos[1]["kl"] > 1e-6
    assert all(math.isfinite(value) for info in infos for value in info.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_impala_learns_from_every_layout(train, settings):
    parts, infos = train(IMPALA, size=12, rollouts=3, **settings)
    assert len(infos) == 3
    assert all(math.isfinite(value) for info in infos for value in info.values())
    assert parts.params.isfinite().all()


def test_weighted_mean_over_slices_equals_the_whole_batch(build, older_rollout, collect, made_up_steps):
    """Check that the mean KL, which is appended to the gradient, is averaged with the same weights as the gradient."""
    options = {"advantage_normalization": "none", "kl_coef": 0.4, **SLOW}
    rollouts = [older_rollout(APPO), collect(build(APPO, seed=6), made_up_steps(4, seed=3), 5)]
    whole, *workers = (build(APPO, **options) for _ in range(3))
    for parts in (whole, *workers):
        parts.params.mul_(1.5)
    whole.storage.insert_data_slice(rollouts)
    whole.storage.before_gradients()
    (batch,) = whole.storage.generate_batches(1)
    slices = [open_batch(parts, rollout) for parts, rollout in zip(workers, rollouts, strict=True)]
    assert slices[0].num_samples != slices[1].num_samples
    expected, _ = whole.algorithm.compute_gradients(batch)
    found = [parts.algorithm.compute_gradients(part)[0] for parts, part in zip(workers, slices, strict=True)]
    assert [part.numel() for part in expected] == [len(whole.params), 1]
    for i, wanted in enumerate(expected):
        mean = sum(part[i] * (piece.num_samples / batch.num_samples) for part, piece in zip(found, slices, strict=True))
        torch.testing.assert_close(mean, wanted, rtol=1e-4, atol=1e-6)


# Options


def test_defaults_match_the_documentation():
    impala, appo = IMPALA.create_factory().options, APPO.create_factory().options
    assert (impala.lr, impala.optimizer, impala.max_grad_norm) == (5e-4, "adam", 40.0)
    assert (impala.num_epochs, impala.num_mini_batch, impala.value_loss_coef, impala.entropy_coef) == (1, 1, 0.5, 0.01)
    assert (appo.clip_param, appo.kl_coef, appo.kl_target) == (0.2, 0.0, 0.01)
    assert (appo.target_network, appo.target_update_interval, appo.is_clip) == (False, 2, 2.0)
    assert IMPALA.learns_from is APPO.learns_from is DataKind.OLDER_ROLLOUTS


# Maps each option to (other settings that the option needs to have an effect, a non-default value).
CHANGES = {
    "lr": ({}, 1e-2), "optimizer": ({}, "sgd"), "adam_eps": ({}, 1e-2), "adam_beta1": ({}, 0.5),
    "rmsprop_eps": ({"optimizer": "rmsprop"}, 1e-2), "rmsprop_decay": ({"optimizer": "rmsprop"}, 0.5),
    "weight_decay": ({"optimizer": "adamw"}, 0.5), "momentum": ({"optimizer": "sgd"}, 0.5),
    "max_grad_norm": ({"optimizer": "sgd"}, 1e-3), "gamma": ({}, 0.5), "num_epochs": ({}, 2), "num_mini_batch": ({}, 2),
    "mini_batch_size": ({}, 16),
    "value_loss_coef": ({}, 2.0), "entropy_coef": ({}, 0.5), "advantage_normalization": ({}, "batch"),
    "mixed_precision": ({}, True), "clip_param": ({"lr": 1e-2}, 0.01), "use_clipped_value_loss": ({"lr": 1e-2}, True),
    "clip_param_vf": ({"lr": 1e-2, "use_clipped_value_loss": True}, 0.01), "recompute_advantages": ({"lr": 1e-2}, True),
    "correction": ({"lr": 1e-2}, "none"), "max_weight": ({"lr": 1e-2, "correction": "tis"}, 1.0001),
    "min_weight": ({"lr": 1e-2, "correction": "icepop"}, 0.999), "max_shift": ({"lr": 1e-2, "correction": "ipo"}, 1e-6),
    "max_moment": ({"lr": 1e-2, "correction": "m2po"}, 1e-9),
    "dual_clip": ({"lr": 0.1}, 1.001), "kl_coef": ({"lr": 1e-2}, 1.0),
    "kl_target": ({"kl_coef": 1.0, "lr": 1e-2}, 1e-9),
    "target_network": ({"lr": 1e-2}, True), "target_update_interval": ({"lr": 1e-2, **SLOW}, 5),
    "is_clip": ({"lr": 1e-2, **SLOW}, 0.5),
}
ELSEWHERE = {"target_kl", "compile",  # these options have separate tests
             *(field.name for field in dataclasses.fields(IntrinsicOptions))}  # APPO rejects these options
OF_IMPALA = [field.name for field in dataclasses.fields(IMPALA.Options)
             if field.name in CHANGES and field.name != "advantage_normalization"]  # IMPALA rejects this option


def test_table_of_changes_names_every_option():
    assert {field.name for field in dataclasses.fields(APPO.Options)} == CHANGES.keys() | ELSEWHERE
    assert {field.name for field in dataclasses.fields(IMPALA.Options)} <= CHANGES.keys() | ELSEWHERE


@pytest.mark.parametrize(("cls", "name"), [
    *((APPO, name) for name in CHANGES),
    *((IMPALA, name) for name in OF_IMPALA)])
def test_every_option_changes_training(train, plain_params, cls, name):
    base, value = CHANGES[name]
    plain, changed = plain_params(cls, rollouts=2, **base), train(cls, rollouts=2, **{**base, name: value})[0].params
    assert plain.isfinite().all()
    assert not torch.equal(plain, changed)


def test_target_kl_requests_to_skip_the_remaining_batches(train):
    assert train(APPO, target_kl=1e-9, lr=1e-2)[1][-1]["skip_remaining"] == 1.0


@pytest.mark.parametrize(("options", "message"), [
    ({"kl_coef": -1.0}, "kl_coef must be a number >= 0"), ({"kl_target": 0.0}, "kl_target must be a number > 0"),
    ({"is_clip": 0.0, **SLOW}, "is_clip must be a number > 0"),
    ({"target_update_interval": 0}, "target_update_interval must be a whole number >= 1"),
    ({"kl_target": 0.1}, "needs kl_coef > 0"), ({"target_update_interval": 3}, "needs target_network=True"),
    ({"is_clip": 3.0}, "needs target_network=True"), ({"compile": True, **SLOW}, "leave one of the two out"),
    ({"kl_coef": 1.0, "target_update_interval": 1, **SLOW}, "needs target_update_interval >= 2"),
    ({"replay_times": 2}, "no option 'replay_times'"),
])
def test_wrong_options_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        APPO.create_factory(**options)


@pytest.mark.parametrize("kind", ["batch", "minibatch"])
def test_impala_refuses_to_normalize_advantages(kind):
    with pytest.raises(ConfigError, match=f'"none", got "{kind}"'):
        IMPALA.create_factory(advantage_normalization=kind)


@pytest.mark.parametrize("cls", [IMPALA, APPO])
def test_schedules_reach_their_end(build, cls):
    options = {"lr": linear(1e-3, 0.0), "entropy_coef": linear(0.1, 0.0)}
    if cls is APPO:
        options["clip_param"] = linear(0.2, 0.1)
    algorithm = build(cls, **options).algorithm
    algorithm.follow_schedules(1000, 1000)
    ends = {name: value.end for name, value in options.items()}
    assert {name: algorithm.parameters[name] for name in options} == ends


# The slow policy and the KL coefficient


def test_slow_policy_is_copied_at_its_interval(build):
    parts = build(APPO, target_update_interval=3, optimizer="sgd", actor={"normalize_obs": True}, **SLOW)
    start = parts.params.clone()
    assert torch.equal(slow_of(parts), start)
    parts.actor.obs_moments[0].mean.fill_(0.5)
    for update in range(1, 7):
        parts.algorithm.apply_gradients([torch.ones_like(start)])
        if update % 3:
            assert not torch.equal(slow_of(parts), parts.params)
        else:
            assert torch.equal(slow_of(parts), parts.params)
            assert parts.algorithm._slow.obs_moments[0].mean.eq(0.5).all()


def test_vtrace_uses_the_slow_policy_and_current_values(build, older_rollout):
    parts, rollout = build(APPO, **SLOW), older_rollout(APPO)
    before = parts.algorithm.evaluate_rollout(rollout)
    parts.params.mul_(2.0)
    after = parts.algorithm.evaluate_rollout(rollout)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])
    plain = build(APPO)
    torch.testing.assert_close(plain.algorithm.evaluate_rollout(rollout)[0], before[0])
    plain.params.mul_(2.0)
    logp, *values = plain.algorithm.evaluate_rollout(rollout)
    assert not torch.allclose(logp, before[0])
    for value, expected in zip(values, after[1:], strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("update", [1, 2, 3, 4])
@pytest.mark.parametrize(("kl", "factor"), [
    (0.1001, 1.5), (0.0999, 1.0), (0.05, 1.0), (0.0251, 1.0), (0.0249, 0.5), (0.0, 0.5)])
def test_kl_coefficient_adapts_when_the_slow_policy_is_copied(build, kl, factor, update):
    parts = build(APPO, kl_coef=0.4, kl_target=0.05, **SLOW)
    zero = torch.zeros_like(parts.params)
    for number in range(1, update + 1):
        kls = kl if number == update else 0.05
        info = parts.algorithm.apply_gradients([zero, torch.tensor([kls])])
    assert parts.algorithm.kl_coef == info["kl_coef"] == pytest.approx(0.4 * (factor if update % 2 == 0 else 1.0))


def test_kl_coefficient_adapts_at_every_update_without_a_slow_policy(build):
    parts = build(APPO, kl_coef=0.4)
    zero = torch.zeros_like(parts.params)
    for number in (1, 2):
        parts.algorithm.apply_gradients([zero, torch.tensor([1.0])])
        assert parts.algorithm.kl_coef == pytest.approx(0.4 * 1.5**number)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_refused_update_changes_nothing(build, older_rollout, bad):
    parts = build(APPO, kl_coef=0.4, **SLOW)
    before = parts.whole_state
    gradients, _ = parts.algorithm.compute_gradients(open_batch(parts, older_rollout(APPO)))
    with pytest.raises(NonFiniteUpdateError):
        parts.algorithm.apply_gradients([torch.full_like(gradient, bad) for gradient in gradients])
    assert torch.equal(before, parts.whole_state)


def test_computing_gradients_changes_nothing(build, older_rollout):
    parts = build(APPO, kl_coef=0.4, **SLOW)
    before = parts.whole_state
    batch = open_batch(parts, older_rollout(APPO))
    first = parts.algorithm.compute_gradients(batch)[0][0].clone()
    assert torch.equal(first, parts.algorithm.compute_gradients(batch)[0][0])
    assert torch.equal(before, parts.whole_state)


def test_only_the_gradient_state_sets_slow_policy_and_kl_coefficient(train, build):
    sender, _ = train(APPO, kl_coef=0.4, rollouts=1, num_epochs=1, num_mini_batch=3, lr=1e-2, seed=5, **SLOW)
    assert not torch.equal(slow_of(sender), sender.params)
    assert sender.algorithm.kl_coef != 0.4
    receiver = build(APPO, kl_coef=0.4, seed=1, **SLOW)
    slow = slow_of(receiver).clone()
    for _ in range(10):
        receiver.algorithm.load_acting_state(sender.algorithm.acting_state())
    assert torch.equal(receiver.params, sender.params)
    assert torch.equal(slow_of(receiver), slow)
    assert receiver.algorithm.kl_coef == 0.4
    receiver.algorithm.load_gradient_state(sender.algorithm.gradient_state())
    assert torch.equal(slow_of(receiver), slow_of(sender))
    assert receiver.algorithm.kl_coef == sender.algorithm.kl_coef
    assert sender.algorithm.acting_state().keys() == {"all"}


def test_state_of_another_kind_raises_and_changes_nothing(build):
    plain, slow = build(APPO), build(APPO, seed=3, **SLOW)
    for mine, theirs in ((plain, slow), (slow, plain)):
        before = mine.whole_state
        with pytest.raises(WeightsError, match="target_network"):
            mine.algorithm.load_gradient_state(theirs.algorithm.gradient_state())
        assert torch.equal(before, mine.whole_state)


@pytest.mark.parametrize(("cls", "options"), [
    (IMPALA, {}), (APPO, {}), (APPO, {"kl_coef": 0.4, "target_update_interval": 5, **SLOW})])
def test_restored_algorithm_continues_bit_for_bit(train, build, collect, learn, made_up_steps, cls, options):
    parts, _ = train(cls, **options)
    restored = build(cls, seed=7, **options)
    restored.algorithm.load_state_dict(parts.algorithm.state_dict())
    state = parts.storage.state_dict()
    for one in (parts, restored):
        one.storage.load_state_dict(state)
        learn(one, [collect(one, made_up_steps(4, seed=3))])
    assert torch.equal(parts.whole_state, restored.whole_state)


def test_slow_policy_equal_to_the_acting_policy_changes_nothing(train):
    """Check that a slow policy changes neither the ratio nor V-trace if it equals the policy that acted."""
    plain, slow = (
        train(APPO, rollouts=3, num_epochs=2, num_mini_batch=2, lr=1e-2, **options)[0]
        for options in ({}, {"target_update_interval": 4, **SLOW}))
    torch.testing.assert_close(slow.params, plain.params, rtol=1e-4, atol=1e-5)
    other, _ = train(APPO, rollouts=3, num_epochs=2, num_mini_batch=2, lr=1e-2, target_update_interval=3, **SLOW)
    assert not torch.allclose(other.params, plain.params, rtol=1e-2, atol=1e-3)
