"""Tests of random network distillation: rewards, moments and advantages against loops; what is learned, and by whom."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms import APPO, PPO
from pytorchrl.agent.algorithms.rnd import RND
from pytorchrl.agent.moments import merge_moments
from pytorchrl.agent.storages.returns import continuing_gae
from pytorchrl.errors import ConfigError

ON = {"intrinsic_reward": "rnd"}


def with_rewards(build, collect, made_up_steps, *, num_envs=3, count=1, next_step=True, actor=None, **options):
    """Return the parts of a learner and `count` rollouts of one collector, inserted as one train batch."""
    parts = build(PPO, num_envs=num_envs, actor=actor, **{**ON, **options})
    steps = made_up_steps(num_envs, next_step=next_step)
    rollouts = [collect(parts, steps) for _ in range(count)]
    rollouts[0].obs["obs"][4, 0] = 40.0  # an outlier
    parts.storage.insert_from(rollouts, ["collector"] * count)
    parts.storage.before_gradients()
    return parts, rollouts


def network(module, x):
    """Compute a network of `RND` over vectors in float64, with NumPy."""
    def affine(layer, x):
        return x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()

    for layer in module.trunk.extractor.layers:
        x = np.tanh(affine(layer, x))
    for layer in module.layers.layers:
        x = np.maximum(affine(layer, x), 0.0)
    return affine(module.head, x)


def true_next(rollout):
    """Return the next observation of each transition by a loop over `final_index`."""
    rows = rollout.obs["obs"][1:].double().numpy().copy()
    for (t, e), last in zip(rollout.final_index.tolist(), rollout.final_obs["obs"], strict=True):
        rows[t, e] = last.double().numpy()
    return rows


@pytest.mark.parametrize("next_step", [False, True])
def test_rewards_are_errors_divided_by_the_deviation_of_their_discounted_sums(
        build, collect, made_up_steps, next_step):
    """Compare with loops over two rollouts of one collector; sums go on at ends of episodes and of rollouts."""
    parts, rollouts = with_rewards(build, collect, made_up_steps, count=2, next_step=next_step, gamma_intrinsic=0.9)
    rnd = parts.algorithm.intrinsic
    valid = [rollout.valid.numpy() for rollout in rollouts]
    assert next_step != all(map(np.all, valid))
    assert sum(int((rollout.terminated | rollout.truncated).sum()) for rollout in rollouts) >= 4
    rows = [true_next(rollout) for rollout in rollouts]
    for rollout, expected in zip(rollouts, rows, strict=True):
        np.testing.assert_array_equal(rollout.next_observations("obs").numpy(), expected.astype(np.float32))
    seen = np.concatenate([row[mask] for row, mask in zip(rows, valid, strict=True)])
    mean, std = seen.mean(0), np.sqrt(seen.var(0) + 1e-8)
    assert np.abs((seen - mean) / std).max() > 5.5  # is clipped
    running, sums, raw = np.zeros(3), [], []
    for row, mask in zip(rows, valid, strict=True):
        x = np.clip((row - mean) / std, -5, 5)
        raw.append(np.where(mask, ((network(rnd.predictor, x) - network(rnd.target, x)) ** 2).mean(-1), 0.0))
        for rewards, is_valid in zip(raw[-1], mask, strict=True):
            for e in np.flatnonzero(is_valid):
                running[e] = 0.9 * running[e] + rewards[e]
                sums.append(running[e])
    scale = 1 / math.sqrt(np.var(sums) + 1e-8)
    for rollout, expected in zip(rollouts, raw, strict=True):
        np.testing.assert_allclose(rollout.other["intrinsic_reward"], expected * scale, rtol=1e-4, atol=1e-6)
    found = parts.algorithm.take_moments()
    assert found.keys() == {"rnd/obs", "rnd/return"}
    assert float(found["rnd/return"][0]) == len(sums) == len(seen)
    np.testing.assert_allclose(float(found["rnd/return"][1]), np.mean(sums), rtol=1e-4)
    np.testing.assert_allclose(found["rnd/obs"][2], ((seen - mean) ** 2).sum(0), rtol=1e-6)
    assert parts.algorithm.take_moments() == {}  # moments are sent once


def looped_gae(reward, value, valid, gamma, gae_lambda):
    """Compute advantages of one environment as a single endless episode of its valid rows."""
    rows = np.flatnonzero(valid)
    following = [*value[rows[1:]], value[len(valid)]]
    advantage, running = np.zeros(len(valid)), 0.0
    for row, after in zip(rows[::-1], following[::-1], strict=True):
        running = reward[row] + gamma * after - value[row] + gamma * gae_lambda * running
        advantage[row] = running
    return advantage


@pytest.mark.parametrize(("num_envs", "next_step"), [(2, False), (2, True), (9, True)])
def test_intrinsic_advantages_equal_those_of_one_endless_episode(build, collect, made_up_steps, num_envs, next_step):
    parts = build(PPO, num_envs=num_envs, size=40)
    rollout = collect(parts, made_up_steps(num_envs, seed=3, next_step=next_step))
    ended = rollout.terminated | rollout.truncated
    assert int(ended.sum()) >= 5
    generator = np.random.default_rng(0)
    reward, value = (torch.from_numpy(generator.normal(size=(40 + extra, num_envs)).astype(np.float32))
                     for extra in (0, 1))
    advantage, ret = continuing_gae(rollout, reward, value, 0.9, 0.7)
    assert advantage.dtype == ret.dtype == np.float32
    valid = rollout.valid.numpy()
    for e in range(num_envs):
        expected = looped_gae(*(part[:, e].double().numpy() for part in (reward, value)), valid[:, e], 0.9, 0.7)
        np.testing.assert_allclose(advantage[:, e][valid[:, e]], expected[valid[:, e]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ret[valid], (advantage + value[:-1].numpy())[valid], rtol=1e-5, atol=1e-6)


def test_advantages_are_a_weighted_sum_and_losses_have_both_value_heads(build, collect, made_up_steps):
    options = {"advantage_normalization": "none", "int_adv_coef": 0.5, "ext_adv_coef": 3.0, "num_mini_batch": 1}
    parts, (rollout,) = with_rewards(build, collect, made_up_steps, **options)
    plain = build(PPO, num_envs=3, advantage_normalization="none")
    plain.storage.insert_from([rollout], ["collector"])
    plain.storage.before_gradients()
    extrinsic = plain.storage._samples
    value = rollout.other["intrinsic_value"]
    own, ret = continuing_gae(rollout, rollout.other["intrinsic_reward"], value, 0.99, 0.95)
    samples, valid = parts.storage._samples, rollout.valid.flatten()
    expected = 3 * extrinsic.advantage + 0.5 * torch.from_numpy(own.flatten())
    torch.testing.assert_close(samples.advantage[valid], expected[valid])
    torch.testing.assert_close(samples.ret, extrinsic.ret)  # the first head learns the environment's returns only
    torch.testing.assert_close(samples.other["intrinsic_ret"][valid], torch.from_numpy(ret.flatten())[valid])

    (batch,) = parts.storage.generate_batches(1)
    _, info = parts.algorithm.compute_gradients(batch)
    rnd, obs = parts.algorithm.intrinsic, parts.actor.normalize(batch.obs)
    predicted = rnd.value_head(parts.actor.value_features(obs, {}, None)[0]).squeeze(-1)
    assert info["intrinsic_value_loss"] == pytest.approx(
        float((0.5 * (predicted - batch.other["intrinsic_ret"]) ** 2).detach().mean()), rel=1e-5)
    errors = rnd.errors({"obs": batch.other["rnd/obs"]}).detach()
    assert info["predictor_loss"] == pytest.approx(float(errors.mean()), rel=1e-5)
    assert info["intrinsic_reward"] == pytest.approx(float(rollout.other["intrinsic_reward"][rollout.valid].mean()),
                                                     rel=1e-5)
    weights = {"policy_loss": 1, "value_loss": 0.5, "intrinsic_value_loss": 0.5, "predictor_loss": 1, "entropy": -0.01}
    assert info["loss"] == pytest.approx(sum(weight * info[name] for name, weight in weights.items()), rel=1e-5)


def test_updates_change_the_predictor_and_both_heads_but_not_the_random_network(build, collect, made_up_steps, learn):
    parts, rollouts = with_rewards(build, collect, made_up_steps, lr=3e-3)
    rnd = parts.algorithm.intrinsic
    trained = [*parts.actor.parameters(), *rnd.predictor.parameters(), *rnd.value_head.parameters()]
    assert len(parts.params) == sum(parameter.numel() for parameter in trained)
    before = {name: value.clone() for name, value in parts.algorithm.intrinsic.state_dict().items()}
    acting = parts.algorithm.acting_state()
    losses = [info["predictor_loss"] for _ in range(10) for info in learn(parts, rollouts)]
    for name, value in parts.algorithm.intrinsic.state_dict().items():
        part = name.partition(".")[0]
        if part in ("target", "obs_moments", "return_moments"):  # moments are merged by the update worker
            assert torch.equal(value, before[name])
        elif part in ("predictor", "value_head"):
            assert not torch.equal(value, before[name])
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(acting["all"], parts.algorithm.acting_state()["all"])


def test_collectors_receive_neither_networks_nor_moments(build):
    plain, own = build(PPO), build(PPO, **ON)
    states = [parts.algorithm.acting_state() for parts in (plain, own)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    other = build(PPO, **ON, seed=1)
    other.algorithm.load_acting_state(states[1])
    assert torch.equal(other.algorithm.acting_state()["all"], states[1]["all"])
    assert not torch.equal(other.params, own.params)
    other.algorithm.load_gradient_state(own.algorithm.gradient_state())
    assert torch.equal(other.params, own.params)
    for name, value in own.algorithm.intrinsic.target.state_dict().items():
        assert torch.equal(value, other.algorithm.intrinsic.target.state_dict()[name])


def test_networks_do_not_depend_on_the_seed_of_the_worker(build):
    actor = build(PPO).actor
    ours, theirs = (PPO.create_factory(**ON)(actor=actor, seed=seed).intrinsic.state_dict() for seed in (1, 2))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["target.head.weight"], ours["predictor.head.weight"])


def test_merged_moments_are_those_of_the_joined_data(build, collect, made_up_steps):
    """Check that two learners with different rollouts agree after both have merged the moments of both."""
    learners, found, seen = [], [], []
    for seed in (1, 2):
        parts = build(PPO, num_envs=2, **ON)
        rollout = collect(parts, made_up_steps(2, seed=seed, next_step=True))
        parts.storage.insert_from([rollout], ["collector"])
        parts.storage.before_gradients()
        learners.append(parts)
        found.append(parts.algorithm.take_moments())
        seen.append(true_next(rollout)[rollout.valid.numpy()])
    for parts in learners:
        for own in found:
            parts.algorithm.merge_moments(own)
    joined = np.concatenate(seen)
    for parts in learners:
        own = parts.algorithm.intrinsic.obs_moments[0]
        assert int(own.count) == len(joined)
        np.testing.assert_allclose(own.mean, joined.mean(0), rtol=1e-6)
        np.testing.assert_allclose(own.m2 / own.count, joined.var(0), rtol=1e-6)
        count, mean, m2 = merge_moments(*(one["rnd/return"] for one in found))
        returns = parts.algorithm.intrinsic.return_moments
        assert (int(returns.count), float(returns.mean), float(returns.m2)) == (
            int(count), pytest.approx(float(mean)), pytest.approx(float(m2)))
    state = [parts.algorithm.learning_state() for parts in learners]
    assert all(torch.equal(state[0][name], state[1][name]) for name in state[0] if "moments" in name)


def test_rewards_have_full_precision_with_mixed_precision(build, collect, made_up_steps):
    rewards = [with_rewards(build, collect, made_up_steps, mixed_precision=flag)[1][0].other["intrinsic_reward"]
               for flag in (False, True)]
    torch.testing.assert_close(*rewards)


def test_a_rollout_that_is_used_again_keeps_its_rewards_and_counts_once(build, collect, made_up_steps, learn):
    parts, rollouts = with_rewards(build, collect, made_up_steps)
    first = rollouts[0].other["intrinsic_reward"].clone()
    assert parts.algorithm.take_moments()
    learn(parts, rollouts)
    assert torch.equal(rollouts[0].other["intrinsic_reward"], first)
    assert parts.algorithm.take_moments() == {}


def test_discounted_sums_belong_to_collectors_and_end_with_a_reseed(build, collect, made_up_steps):
    parts = build(PPO, num_envs=2, **ON)
    rollout = collect(parts, made_up_steps(2))

    def mean_sum(source):
        rollout.other.pop("intrinsic_reward", None)
        parts.storage.insert_from([rollout], [source])
        parts.storage.before_gradients()
        return float(parts.algorithm.take_moments()["rnd/return"][1])

    first = mean_sum("a")
    assert mean_sum("a") > first
    assert mean_sum("b") == first
    parts.algorithm.reseed(0)
    assert mean_sum("a") == first


def test_the_predictor_learns_from_a_random_share_of_the_samples(build, collect, made_up_steps):
    parts, (rollout,) = with_rewards(build, collect, made_up_steps, num_envs=40, predictor_proportion=0.25)
    drawn = rollout.other["predicted"]
    assert set(drawn.unique().tolist()) == {0.0, 4.0}
    assert float(drawn.mean()) == pytest.approx(1, abs=0.35)  # 320 draws; the standard deviation is 0.1
    (batch,) = parts.storage.generate_batches(1)
    _, info = parts.algorithm.compute_gradients(batch)
    errors = parts.algorithm.intrinsic.errors({"obs": batch.other["rnd/obs"]})
    assert info["predictor_loss"] == pytest.approx(float((errors * batch.other["predicted"]).detach().mean()), rel=1e-5)
    assert "predicted" not in with_rewards(build, collect, made_up_steps)[1][0].other


@pytest.mark.parametrize(("actor", "options", "masked"), [
    ({"recurrent_net": "gru", "recurrent_size": 5}, {"num_mini_batch": 2}, True),
    ({"shared_policy_value_network": True}, {"recompute_advantages": True}, True),
    ({"normalize_obs": True, "normalize_reward": True}, {"advantage_normalization": "batch"}, False),
    ({"block": "simba"}, {"mini_batch_size": 5}, False), ({}, {"mixed_precision": True}, False)])
@pytest.mark.parametrize("next_step", [False, True])
def test_rnd_combines_with_memory_masks_and_other_options(train, actor, options, masked, next_step):
    _, infos = train(PPO, actor=actor, masked=masked, next_step=next_step, lr=3e-3, rollouts=4, **ON, **options)
    assert all(math.isfinite(value) for info in infos for value in info.values())
    losses = [info["predictor_loss"] for info in infos]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_recomputed_advantages_use_the_new_intrinsic_values(build, collect, made_up_steps):
    parts, (rollout,) = with_rewards(
        build, collect, made_up_steps, recompute_advantages=True, advantage_normalization="none")
    batches = parts.storage.generate_batches(1, num_epochs=2)
    next(batches)
    before = parts.storage._samples.other["intrinsic_ret"].clone()
    with torch.no_grad():
        parts.algorithm.intrinsic.value_head.bias += 1.0
    next(batches)
    after, valid = parts.storage._samples.other["intrinsic_ret"], rollout.valid.flatten()
    assert bool((after - before)[valid].gt(0.01).all())


@pytest.mark.parametrize("space", [
    gym.spaces.Discrete(5), gym.spaces.Dict({"a": gym.spaces.Box(0, 255, (3, 16, 16), np.uint8),
                                             "b": gym.spaces.Discrete(3)})], ids=["category", "images"])
def test_networks_fit_every_kind_of_observation(space):
    actor = OnPolicyActor.create_factory(space, gym.spaces.Discrete(2))(seed=1)
    rnd = RND(actor, PPO.create_factory(**ON).options)
    rows = {"obs": torch.tensor([1, 4])} if isinstance(space, gym.spaces.Discrete) else {
        "a": torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8), "b": torch.tensor([0, 2])}
    errors = rnd.errors(rows)
    assert errors.shape == (2,)
    assert bool((errors > 0).all())


@pytest.mark.compiled
def test_compiled_gradients_equal_the_uncompiled_ones(build, collect, made_up_steps):
    results = []
    for compile_ in (False, True):
        parts, _ = with_rewards(build, collect, made_up_steps, compile=compile_, predictor_proportion=0.5)
        (batch,) = parts.storage.generate_batches(1)
        results.append(parts.algorithm.compute_gradients(batch))
    (expected, wanted), (gradients, info) = results
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-4, atol=1e-6)
    assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("cls", "options", "message"), [
    (PPO, {"int_adv_coef": 0.5}, "int_adv_coef needs intrinsic_reward='rnd'"),
    (PPO, {"gamma_intrinsic": 0.5, "predictor_proportion": 0.5}, "gamma_intrinsic, predictor_proportion needs"),
    (PPO, {**ON, "predictor_proportion": 0.0}, "predictor_proportion must be"),
    (PPO, {"intrinsic_reward": "icm"}, "intrinsic_reward must be"),
    (APPO, ON, "intrinsic_reward='rnd' needs rollouts of the newest policy; use PPO")])
def test_settings_without_an_effect_are_refused(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls.create_factory(**options)


def test_a_value_head_that_is_no_linear_layer_is_refused():
    class Own(OnPolicyActor):
        def build_networks(self, generator):
            super().build_networks(generator)
            self.value_head = torch.nn.Sequential(self.value_head)

    actor = Own.create_factory(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2))(seed=1)
    with pytest.raises(ConfigError, match="needs an actor with a linear value_head, got Sequential"):
        PPO.create_factory(**ON)(actor=actor, seed=1)
