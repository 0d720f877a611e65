"""Compare losses of PPO and A2C with a plain reference in float64, and check properties of gradients and info."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pytorchrl.agent.algorithms import A2C, APPO, PPO
from pytorchrl.agent.data import Batch, Evaluated
from pytorchrl.errors import ConfigError

CLIP, VALUE_COEF, ENTROPY_COEF = 0.2, 0.7, 0.03


def random_batch(seed, size, has_valid):
    rng = np.random.default_rng(seed)
    new = [torch.tensor(rng.normal(0, 0.5, size), dtype=torch.float32, requires_grad=True) for _ in range(3)]
    valid = torch.as_tensor(rng.random(size) < 0.7) if has_valid else None
    fields = [torch.tensor(rng.normal(0, scale, size), dtype=torch.float32) for scale in (0.5, 0.5, 1.0, 2.0)]
    batch = Batch({}, torch.zeros(size, dtype=torch.bool), {}, None, torch.zeros(size), valid, *fields)
    return new, batch


def reference(new, recorded, normalize, clipped_value, dual_clip):
    """Compute the loss, the reported metrics and the gradients in float64, one sample at a time."""
    logp, entropy, value = [x.detach().double().requires_grad_() for x in new]
    valid = range(len(logp)) if recorded.valid is None else recorded.valid.nonzero().flatten().tolist()
    old_logp, old_value, ret, advantage = [
        x.double() for x in (recorded.logp, recorded.value, recorded.ret, recorded.advantage)]
    chosen = advantage[list(valid)]
    if normalize:
        advantage = (advantage - chosen.mean()) / (chosen.std() + 1e-8)
    policy, values, kl, clipped = [], [], [], 0
    for i in valid:
        ratio = torch.exp(logp[i] - old_logp[i])
        term = torch.minimum(ratio * advantage[i], torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantage[i])
        if dual_clip and advantage[i] < 0:
            term = torch.maximum(term, dual_clip * advantage[i])
        policy.append(-term)
        error = (value[i] - ret[i]) ** 2
        if clipped_value:
            near = old_value[i] + torch.clamp(value[i] - old_value[i], -clipped_value, clipped_value)
            error = torch.maximum(error, (near - ret[i]) ** 2)
        values.append(error / 2)
        kl.append(ratio - 1 - (logp[i] - old_logp[i]))
        clipped += bool(abs(ratio - 1) > CLIP)
    mean = lambda parts: sum(parts) / len(parts)  # noqa: E731
    parts = [mean(policy), mean(values), mean([entropy[i] for i in valid]), mean(kl)]
    loss = parts[0] + VALUE_COEF * parts[1] - ENTROPY_COEF * parts[2]
    gradients = torch.autograd.grad(loss, (logp, entropy, value))
    return [loss.item(), *(part.item() for part in parts), clipped / len(policy)], gradients


@pytest.mark.parametrize("has_valid", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"advantage_normalization": "none"}, {"use_clipped_value_loss": True}, {"dual_clip": 1.5},
    {"use_clipped_value_loss": True, "clip_param_vf": 0.4},
])
def test_ppo_loss_and_gradient_equal_the_reference(build, options, has_valid):
    algorithm = build(PPO, clip_param=CLIP, **options).algorithm
    new, recorded = random_batch(3, 64, has_valid)
    weights = torch.tensor([1.0, VALUE_COEF, -ENTROPY_COEF])
    batch = algorithm.prepare_batch(recorded)
    loss, measured = algorithm.loss(Evaluated(*new, new[0]), batch, algorithm.parameters, weights)
    assert algorithm.info_names == ("loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction")
    expected, gradients = reference(
        new, recorded, options.get("advantage_normalization") != "none",
        options.get("clip_param_vf", CLIP) if options.get("use_clipped_value_loss") else None, options.get("dual_clip"))
    np.testing.assert_allclose(measured.numpy(), expected, rtol=2e-6, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(loss, new), gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)


def test_a2c_loss_equals_the_formula(build):
    algorithm = build(A2C).algorithm
    (logp, entropy, value), recorded = random_batch(4, 64, True)
    loss, measured = algorithm.loss(
        Evaluated(logp, entropy, value, logp), recorded, algorithm.parameters,
        torch.tensor([1.0, VALUE_COEF, -ENTROPY_COEF]))
    keep = recorded.valid
    policy = -(logp * recorded.advantage)[keep].mean()
    critic = 0.5 * (value - recorded.ret)[keep].square().mean()
    expected = policy + VALUE_COEF * critic - ENTROPY_COEF * entropy[keep].mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(measured, torch.stack([expected, policy, critic, entropy[keep].mean()]).detach())


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [
    {}, {"masked": True}, {"next_step": True},
    {"actor": {"recurrent_net": "gru", "recurrent_size": 5}},
    {"actor": {"recurrent_net": "lstm", "recurrent_size": 5}, "next_step": True, "masked": True},
    {"actor": {"recurrent_net": "gru", "recurrent_size": 5}, "storage": {"sequence_length": 3}},
    {"actor": {"recurrent_net": "gru", "recurrent_size": 5, "shared_policy_value_network": True}},
    {"actor": {"shared_policy_value_network": True}},
], ids=str)
def test_first_batch_has_ratio_1(train, settings):
    _, infos = train(size=12, rollouts=1, lr=1e-2, **settings)
    assert infos[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert infos[0]["clip_fraction"] == 0.0
    assert infos[-1]["kl"] > 1e-6


@pytest.mark.parametrize("cls", [PPO, APPO])
def test_invalid_steps_do_not_affect_the_gradient(build, collect, made_up_steps, cls):
    """Check that invalid steps do not affect the gradient, even if their probability ratio is infinite.

    Multiplying the loss of such a step by 0 is not enough, because its gradient would be NaN.
    """
    options = {"kl_coef": 0.5} if cls is APPO else {}
    parts = build(cls, actor={"recurrent_net": "gru", "recurrent_size": 5}, storage={"sequence_length": 3},
                  num_mini_batch=1, **options)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    batch = next(parts.storage.generate_batches(1))
    assert not batch.valid.all()
    expected = [gradient.clone() for gradient in parts.algorithm.compute_gradients(batch)[0]]
    batch.logp[~batch.valid] = -1e4
    for gradient, other in zip(parts.algorithm.compute_gradients(batch)[0], expected, strict=True):
        assert torch.equal(gradient, other)


@pytest.mark.parametrize("net", ["gru", "lstm"])
def test_final_values_use_the_memory_after_the_last_observation(build, collect, made_up_steps, net):
    parts = build(PPO, actor={"recurrent_net": net, "recurrent_size": 5}, size=20)
    rollout = collect(parts, made_up_steps(4))
    assert len(rollout.final_index) > 3
    for (t, e), final, value in zip(rollout.final_index.tolist(), rollout.final_obs["obs"],
                                    rollout.other["final_value"], strict=True):
        with torch.no_grad():
            _, after = parts.actor.get_value({"obs": rollout.obs["obs"][t, e:e + 1]}, {
                name: state[t, e:e + 1] for name, state in rollout.rhs.items()}, rollout.done[t, e:e + 1])
            expected = parts.actor.get_value({"obs": final[None]}, after, torch.zeros(1, dtype=torch.bool))[0]["value"]
        torch.testing.assert_close(value, expected[0])


def test_stored_values_equal_evaluated_values(build, collect, made_up_steps):
    parts = build(PPO, actor={"recurrent_net": "gru", "recurrent_size": 5}, num_mini_batch=1)
    rollout = collect(parts, made_up_steps(4))
    parts.storage.insert_data_slice([rollout])
    parts.storage.before_gradients()
    batch = next(parts.storage.generate_batches(1))
    _, _, value = parts.actor.evaluate(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
    torch.testing.assert_close(value, batch.value, atol=1e-6, rtol=1e-6)


def test_ppo_without_clipping_has_the_gradient_of_a2c_on_its_first_batch(build, collect, made_up_steps):
    gradients = []
    for cls, options in ((PPO, {"clip_param": 1e6, "advantage_normalization": "none"}), (A2C, {})):
        parts = build(cls, **options)
        parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
        parts.storage.before_gradients()
        gradients.append(parts.algorithm.compute_gradients(next(parts.storage.generate_batches(1)))[0][0].clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_every_parameter_of_the_actor_gets_a_gradient(build, collect, made_up_steps):
    parts = build(A2C, actor={"shared_policy_value_network": True})
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    gradient = parts.algorithm.compute_gradients(next(parts.storage.generate_batches(1)))[0][0]
    assert len(gradient) == sum(param.numel() for param in parts.actor.parameters())
    assert all(part.abs().sum() > 0 for part in parts.algorithm.groups["all"].split(gradient).values())


def test_target_kl_requests_to_skip_the_remaining_batches(train):
    _, infos = train(target_kl=1e-9, lr=1e-2)
    assert infos[0]["skip_remaining"] == 0.0
    assert infos[-1]["skip_remaining"] == 1.0
    _, infos = train()
    assert "skip_remaining" not in infos[0]


def test_skip_remaining_accepts_averaged_info(build):
    algorithm = build(PPO, target_kl=0.02).algorithm
    assert not algorithm.skip_remaining({"kl": 0.03 - 1e-6})
    assert algorithm.skip_remaining({"kl": 0.03 + 1e-6})


def test_advantages_are_equal_under_both_autoreset_modes(build, play_script):
    """Check that both autoreset modes produce the same advantages for two environments with scripted episodes.

    The first environment plays episodes of 3 steps (terminated), 4 (truncated), 2 (truncated) and 3 (terminated); the
    second environment plays them in reverse order. Both environments end with 2 steps of an unfinished episode.
    """
    advantages = {mode: play_script(build(PPO, num_envs=2, size=40), mode) for mode in ("same_step", "next_step")}
    assert len(advantages["same_step"]) == 2 * 14
    np.testing.assert_allclose(advantages["same_step"], advantages["next_step"], rtol=1e-6, atol=1e-6)
    assert math.isfinite(sum(advantages["same_step"]))


def test_clip_param_vf_without_value_clipping_is_refused():
    with pytest.raises(ConfigError, match="clip_param_vf needs use_clipped_value_loss=True"):
        PPO.create_factory(clip_param_vf=0.1)
    PPO.create_factory(clip_param_vf=0.1, use_clipped_value_loss=True)
