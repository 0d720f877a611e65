from __future__ import annotations

import copy
import math
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.flat import FlatParameters
from pytorchrl.errors import CheckpointError, ConfigError, NonFiniteDataError, SpaceError
from pytorchrl.files.tensors import save

VECTOR = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (2, 36, 40), np.uint8)
CONTINUOUS = gym.spaces.Box(-1, 1, (3,), np.float32)
TWO = gym.spaces.Discrete(2)
NESTED = gym.spaces.Dict(
    camera=gym.spaces.Dict(left=IMAGE), kind=gym.spaces.Discrete(3), bits=gym.spaces.MultiBinary(2), arm=VECTOR)
OBSERVATIONS = {
    "vector": VECTOR, "image": IMAGE, "matrix": gym.spaces.Box(-1, 1, (2, 3), np.float32),
    "discrete": gym.spaces.Discrete(5), "multi_discrete": gym.spaces.MultiDiscrete([2, 3]),
    "multi_binary": gym.spaces.MultiBinary(3), "ram": gym.spaces.Box(0, 255, (8,), np.uint8), "dict": NESTED,
    "tuple": gym.spaces.Tuple((VECTOR, gym.spaces.Discrete(2))),
}
ACTIONS = {
    "discrete": gym.spaces.Discrete(3), "multi_discrete": gym.spaces.MultiDiscrete([2, 4]),
    "multi_binary": gym.spaces.MultiBinary(3), "box": CONTINUOUS,
}


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _actor(observation_space=VECTOR, action_space=TWO, seed=1, **options):
    return OnPolicyActor.create_factory(observation_space, action_space, **options)(device="cpu", seed=seed)


def _obs(actor, *lead, seed=0):
    """Return random observations; each leaf has the shape (*lead, *space.shape)."""
    rng, obs = np.random.default_rng(seed), {}
    for leaf, space in actor.options.observation_space.items():
        shape = (*lead, *space.shape)
        if isinstance(space, gym.spaces.Box) and space.dtype == np.float32:
            obs[leaf] = torch.as_tensor(rng.normal(size=shape).astype(np.float32))
        elif isinstance(space, gym.spaces.Box):
            obs[leaf] = torch.as_tensor(rng.integers(0, 256, shape, dtype=np.uint8))
        else:
            high = space.n if isinstance(space, gym.spaces.Discrete) else getattr(space, "nvec", 2)
            obs[leaf] = torch.as_tensor(rng.integers(0, high, shape))
    return obs


def _act(actor, obs, rhs=None, done=None, **options):
    with torch.inference_mode():
        return actor.act(obs, rhs or {}, done, generator=_generator(), **options)


def _clone(tree):
    return {name: tensor.clone() for name, tensor in tree.items()}


# ---- spaces


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_actors_act_and_learn_for_every_pair_of_spaces(observations, actions):
    space = ACTIONS[actions]
    actor = _actor(OBSERVATIONS[observations], space)
    flat = FlatParameters(actor.parameters())
    obs = _obs(actor, 5)
    action, clipped, params, _, rhs = _act(actor, obs)
    assert action.shape == (5, *space.shape)
    assert all(space.contains(row.astype(space.dtype)) for row in clipped.numpy())
    assert rhs == {}
    action = action.clone()
    logp, entropy, value = actor.evaluate(obs, {}, None, action)
    assert logp.shape == entropy.shape == value.shape == (5,)
    ratio = (logp - actor.log_prob_from_params(params, action)).exp()
    torch.testing.assert_close(ratio, torch.ones(5))
    (logp.sum() + entropy.sum() + value.sum()).backward()
    assert bool(flat.grad.isfinite().all())


@pytest.mark.parametrize("options", [{}, {"recurrent_net": "gru", "recurrent_size": 6}], ids=["plain", "gru"])
def test_sequences_give_the_same_results_as_single_rows(options):
    actor = _actor(NESTED, CONTINUOUS, **options)
    obs, done = _obs(actor, 3, 2), torch.zeros(3, 2, dtype=torch.bool)
    action = torch.randn(3, 2, 3, generator=_generator())
    rhs = actor.initial_states(2)
    logp, entropy, value = actor.evaluate(obs, rhs, done, action)
    assert logp.shape == entropy.shape == value.shape == (3, 2)
    for t in range(3):
        row = {leaf: x[t] for leaf, x in obs.items()}
        expected_value, _ = actor.get_value(row, rhs, done[t])
        expected, _, _, rhs_next = actor.evaluate_actions(row, rhs, done[t], action[t])
        torch.testing.assert_close(logp[t], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value[t], expected_value["value"], atol=1e-5, rtol=1e-5)
        if rhs:
            _, value_next = actor.get_value(row, rhs, done[t])
            rhs = {name: (value_next if name == "value" else rhs_next)[name] for name in rhs}


def test_spaces_without_network_or_distribution_raise_and_name_the_leaf():
    with pytest.raises(SpaceError, match="camera/words"):
        OnPolicyActor.create_factory(gym.spaces.Dict(camera=gym.spaces.Dict(words=gym.spaces.Text(4))), TWO)
    with pytest.raises(SpaceError, match="Text"):
        OnPolicyActor.create_factory(VECTOR, gym.spaces.Text(4))
    with pytest.raises(SpaceError, match="image"):
        OnPolicyActor.create_factory(VECTOR, TWO, feature_extractor="cnn")
    small = gym.spaces.Dict(eye=gym.spaces.Box(0, 255, (3, 20, 20), np.uint8))
    with pytest.raises(SpaceError, match=r"'eye'.*36 x 36"):
        OnPolicyActor.create_factory(small, TWO, feature_extractor="cnn")


def test_unknown_and_wrong_options_raise():
    with pytest.raises(ConfigError, match="did you mean 'hidden_sizes'"):
        OnPolicyActor.create_factory(VECTOR, TWO, hidden_size=(3,))
    with pytest.raises(ConfigError, match="did you mean 'impala'"):
        OnPolicyActor.create_factory(VECTOR, TWO, feature_extractor="impalla")
    with pytest.raises(ConfigError, match="recurrent_net"):
        OnPolicyActor.create_factory(VECTOR, TWO, recurrent_net="rnn")
    with pytest.raises(ConfigError, match="hidden_sizes"):
        OnPolicyActor.create_factory(VECTOR, TWO, hidden_sizes=(0,))
    with pytest.raises(ConfigError, match="out_features"):
        _actor(feature_extractor=lambda space: nn.Identity())


# ---- acting


def test_act_and_evaluate_agree_with_get_action_and_evaluate_actions():
    actor = _actor(VECTOR, CONTINUOUS)
    obs = _obs(actor, 6)
    action, clipped, params, value, _ = _act(actor, obs)
    assert value is None  # a separate value network is not run while acting
    with torch.inference_mode():
        long = actor.get_action(obs, {}, None, generator=_generator())
    logp, entropy, value = actor.evaluate(obs, {}, None, action.clone())
    for got, expected in zip(long, (action, clipped, logp, {}, entropy, params), strict=True):
        torch.testing.assert_close(got, expected, check_dtype=True)
    torch.testing.assert_close(actor.evaluate_actions(obs, {}, None, action.clone())[0], logp)
    torch.testing.assert_close(actor.get_value(obs, {}, None)[0]["value"], value)
    assert torch.equal(clipped, action.clamp(-1, 1))


def test_deterministic_actions_are_the_mode_for_any_generator():
    for space in ACTIONS.values():
        actor = _actor(VECTOR, space)
        obs = _obs(actor, 20)
        with torch.inference_mode():
            draws = [actor.act(obs, {}, None, deterministic, generator=_generator(seed))[0]
                     for deterministic in (True, False) for seed in (0, 1)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[2], draws[3])


def test_actions_are_near_zero_at_the_start():
    actor = _actor(VECTOR, CONTINUOUS)
    assert float(_act(actor, _obs(actor, 200), deterministic=True)[0].abs().mean()) < 0.05


def test_masks_make_probability_exactly_zero():
    actor = _actor(VECTOR, gym.spaces.Discrete(4))
    obs = _obs(actor, 300)
    mask = torch.rand(300, 4, generator=_generator()) < 0.5
    mask[:, 3] = True
    for deterministic in (True, False):
        action, _, params, _, _ = _act(actor, obs, deterministic=deterministic, mask=mask)
        assert bool(mask.gather(1, action.unsqueeze(-1)).all())
    probabilities = torch.stack([
        actor.evaluate(obs, {}, None, torch.full((300,), a), mask)[0].exp() for a in range(4)], -1)
    assert not probabilities[~mask].any()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(300))
    action = action.clone()
    torch.testing.assert_close(
        actor.log_prob_from_params(params, action, mask), actor.evaluate(obs, {}, None, action, mask)[0])
    mask[7] = False
    with pytest.raises(NonFiniteDataError, match=r"\[7\]"):
        _act(actor, obs, mask=mask)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("net", ["gru", "lstm"])
def test_recurrent_rollout_has_ratio_one_even_with_resets(net, shared):
    actor = _actor(recurrent_net=net, recurrent_size=7, shared_policy_value_network=shared)
    obs, done = _obs(actor, 9, 3), torch.rand(9, 3, generator=_generator()) < 0.3
    done[0] = True
    rhs = first = actor.initial_states(3)
    assert set(rhs) == ({"policy"} if shared else {"policy", "value"})
    assert all(state.shape == (3, 7 * (2 if net == "lstm" else 1)) for state in rhs.values())
    rows = []
    for t in range(9):
        before = _clone(rhs)
        inputs = {"obs": obs["obs"][t].clone()}
        action, _, params, value, rhs_next = _act(actor, inputs, rhs, done[t])
        assert all(torch.equal(before[name], rhs[name]) for name in rhs)  # `act` does not change its inputs
        assert torch.equal(inputs["obs"], obs["obs"][t])
        rows.append((action, actor.log_prob_from_params(params, action), value))
        rhs = rhs_next
    action, logp, value = (torch.stack(column).clone() for column in zip(*rows, strict=True))
    new_logp, _, new_value = actor.evaluate(obs, first, done, action)
    torch.testing.assert_close((new_logp - logp).exp(), torch.ones(9, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(new_value, value, atol=1e-6, rtol=0)
    last = {**actor.evaluate_actions(obs, first, done, action)[3]}
    last |= {"value": actor.get_value(obs, first, done)[1]["value"]} if not shared else {}
    for name in rhs:
        torch.testing.assert_close(last[name], rhs[name], atol=1e-6, rtol=0)


def test_memory_affects_actions_and_its_inputs_are_required():
    actor = _actor(recurrent_net="gru", recurrent_size=6)
    obs, done = _obs(actor, 2), torch.tensor([False, True])
    rhs = {name: torch.randn(2, 6, generator=_generator()) for name in actor.initial_states(2)}
    zero = actor.get_value(obs, actor.initial_states(2), done)[0]["value"]
    moved = actor.get_value(obs, rhs, done)[0]["value"]
    assert zero[0] != moved[0]
    assert zero[1] == moved[1]  # `done` resets the memory of environment 1
    with pytest.raises(ConfigError, match="done"):
        actor.get_value(obs, rhs, None)
    with pytest.raises(ConfigError, match="state"):
        actor.get_value(obs, {}, done)


# ---- parameters


@pytest.mark.parametrize(("options", "policy_gain"), [({}, 0.01), ({"policy_gain": 1.0}, 1.0)])
def test_heads_start_orthogonal_with_their_gains(options, policy_gain):
    actor = _actor(VECTOR, gym.spaces.Discrete(3), **options)
    for layer, gain in ((actor.policy_head, policy_gain), (actor.value_head, 1.0),
                        (actor.policy.extractor.layers[0], math.sqrt(2))):
        singular = torch.linalg.svdvals(layer.weight.detach())
        torch.testing.assert_close(singular, torch.full_like(singular, gain), atol=1e-5, rtol=0)
        assert not layer.bias.any()


def test_weights_depend_on_the_seed_and_the_global_rng_is_not_used():
    before = torch.get_rng_state()
    first, second, other = (
        torch.cat([p.detach().flatten() for p in _actor(seed=seed, recurrent_net="lstm").parameters()])
        for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shared", [True, False])
def test_every_parameter_is_in_the_flat_group_and_gets_a_gradient(shared):
    actor = _actor(NESTED, CONTINUOUS, recurrent_net="gru", recurrent_size=5, shared_policy_value_network=shared)
    flat = FlatParameters(dict(actor.named_parameters()))
    assert len(flat) == sum(p.numel() for p in actor.parameters())
    assert "distribution.log_std" in flat.names
    obs, done = _obs(actor, 4, 2), torch.zeros(4, 2, dtype=torch.bool)
    logp, entropy, value = actor.evaluate(obs, actor.initial_states(2), done, torch.ones(4, 2, 3))
    (logp.sum() + entropy.sum() + value.sum()).backward()
    without = [name for name, gradient in flat.split(flat.grad).items() if not gradient.any()]
    assert without == []


def test_acting_uses_the_flat_vector_even_after_copies():
    actor = _actor()
    obs = _obs(actor, 3)
    flat = FlatParameters(actor.parameters())
    twins = [copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))]
    before = _act(actor, obs)[2]
    flat.data.add_(0.1)
    after = _act(actor, obs)[2]
    assert not torch.equal(before, after)
    for twin in twins:
        torch.testing.assert_close(_act(twin, obs)[2], before)
        for mine, others in zip(twin.parameters(), actor.parameters(), strict=True):
            mine.data.copy_(others)
        torch.testing.assert_close(_act(twin, obs)[2], after)


def test_factory_can_be_pickled_and_printed():
    factory = OnPolicyActor.create_factory(NESTED, TWO, hidden_sizes=(8,))
    obs = _obs(factory(device="cpu", seed=2), 2)
    results = [_act(f(device="cpu", seed=2), obs)[2] for f in (factory, pickle.loads(pickle.dumps(factory)))]
    assert torch.equal(*results)
    assert "hidden_sizes=(8,)" in repr(factory)


# ---- options


def test_sizes_activation_and_log_std():
    actor = _actor(VECTOR, CONTINUOUS, hidden_sizes=(8, 7, 6), activation="relu", log_std_init=-0.5)
    assert [layer.out_features for layer in actor.policy.extractor.layers] == [8, 7, 6]
    assert bool((actor.policy.extractor(_obs(actor, 9)["obs"]) >= 0).all())
    assert actor.distribution.log_std.tolist() == [-0.5] * 3
    assert _act(actor, _obs(actor, 2))[2][:, 3:].tolist() == [[-0.5] * 3] * 2
    assert _actor(recurrent_net="gru").initial_states(2)["policy"].shape == (2, 256)
    assert _actor(recurrent_net="lstm").initial_states(2)["policy"].shape == (2, 1024)


def test_policy_and_value_share_a_network_by_default_for_images_only():
    assert _actor(IMAGE).is_shared
    assert _actor(NESTED).is_shared
    assert not _actor(VECTOR).is_shared
    shared, apart = _actor(shared_policy_value_network=True), _actor(IMAGE, shared_policy_value_network=False)
    assert _act(shared, _obs(shared, 2))[3].shape == (2,)
    assert not {id(p) for p in apart.policy.parameters()} & {id(p) for p in apart.value.parameters()}
    assert not torch.equal(apart.policy.extractor.conv1.weight, apart.value.extractor.conv1.weight)


def test_checkpoint_loads_weights_and_normalizers(tmp_path):
    options = {"normalize_obs": True, "normalize_reward": True}
    source = _actor(seed=1, **options)
    source.merge_moments(source.moments_of(_rollout(source), torch.randn(6, 2, generator=_generator())))
    path = tmp_path / "model.pt"
    state = {"all": torch.cat([p.detach().flatten() for p in source.parameters()]), **source.state_buffers()}
    save(path, {"format": 1, "acting_state": state})
    loaded, fresh = _actor(seed=2, checkpoint=str(path), **options), _actor(seed=2, **options)
    obs = _obs(source, 4)
    assert torch.equal(_act(loaded, obs)[2], _act(source, obs)[2])
    assert not torch.equal(_act(fresh, obs)[2], _act(source, obs)[2])
    assert loaded.reward_scale() == source.reward_scale() != 1.0
    with pytest.raises(CheckpointError, match="parameters"):
        _actor(checkpoint=str(path), hidden_sizes=(3,), **options)
    save(path, {"format": 1, "acting_state": {"all": state["all"]}})
    with pytest.raises(CheckpointError, match="normalize_obs"):
        _actor(checkpoint=str(path), **options)


def test_checkpoint_that_cannot_be_loaded_raises(tmp_path):
    with pytest.raises(CheckpointError, match="there is no model"):
        _actor(checkpoint=str(tmp_path / "none.pt"))
    broken = tmp_path / "broken.pt"
    for content in (b"", b"no model", b"PK\x03\x04 cut off"):
        broken.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            _actor(checkpoint=str(broken))
    save(broken, {"format": 1, "acting_state": np.random.default_rng})
    with pytest.raises(CheckpointError, match="cannot be read"):
        _actor(checkpoint=str(broken))
    save(broken, {"format": 1, "weights": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="acting state"):
        _actor(checkpoint=str(broken))


# ---- normalizers


def _rollout(actor, seed=0):
    obs = {leaf: x if x.dtype == torch.uint8 else x * 3 + 5 for leaf, x in _obs(actor, 7, 2, seed=seed).items()}
    valid = torch.rand(6, 2, generator=_generator(seed)) < 0.7
    flags = torch.zeros(6, 2, dtype=torch.bool)
    return RolloutData(
        obs=obs, done=torch.zeros(7, 2, dtype=torch.bool), rhs={}, mask=None, action=torch.zeros(6, 2),
        reward=torch.zeros(6, 2), terminated=flags, truncated=flags, valid=valid,
        final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={})


def test_moments_count_each_valid_observation_once():
    actor = _actor(gym.spaces.Dict(arm=VECTOR, eye=IMAGE), normalize_obs=True, normalize_reward=True)
    rollouts = [_rollout(actor, seed) for seed in (0, 1)]
    returns = [torch.randn(6, 2, generator=_generator(seed)) * 4 + 100 for seed in (0, 1)]
    for rollout, discounted in zip(rollouts, returns, strict=True):
        found = actor.moments_of(rollout, discounted)
        assert set(found) == {"obs/arm", "reward"}  # images are not normalized
        actor.merge_moments(found)
    seen = torch.cat([r.obs["arm"][:-1][r.valid] for r in rollouts]).double().numpy()
    normalizer = actor.obs_moments[0]
    assert int(normalizer.count) == len(seen) == sum(r.num_valid() for r in rollouts)
    np.testing.assert_allclose(normalizer.mean.numpy(), seen.mean(0), rtol=1e-10)
    gains = torch.cat([g[r.valid] for g, r in zip(returns, rollouts, strict=True)]).double().numpy()
    assert actor.reward_scale() == pytest.approx(1 / gains.std(), rel=1e-6)
    with pytest.raises(ConfigError, match="discounted_returns"):
        actor.moments_of(rollouts[0])


def test_observations_are_normalized_everywhere_with_frozen_statistics():
    actor, plain = _actor(normalize_obs=True), _actor()
    actor.merge_moments(actor.moments_of(_rollout(actor)))
    state = _clone(actor.state_buffers())
    assert len(state) == 5
    obs = _obs(actor, 4)
    normalized = {"obs": actor.obs_moments[0].normalize(obs["obs"])}
    assert not torch.equal(obs["obs"], normalized["obs"])
    action, _, params, _, _ = _act(actor, obs)
    torch.testing.assert_close(params, _act(plain, normalized)[2])
    action = action.clone()
    torch.testing.assert_close(actor.evaluate(obs, {}, None, action), plain.evaluate(normalized, {}, None, action))
    torch.testing.assert_close(actor.get_value(obs, {}, None), plain.get_value(normalized, {}, None))
    assert all(torch.equal(state[name], value) for name, value in actor.state_buffers().items())
    assert plain.moments_of(_rollout(plain)) == {}
    assert plain.reward_scale() == 1.0
    assert plain.state_buffers() == {}


# ---- compilation


@pytest.mark.compiled
@pytest.mark.parametrize(("case", "bf16"), [
    ("lstm", False), ("image", True),
    *[pytest.param(case, False, marks=pytest.mark.thorough) for case in ("categorical", "gaussian", "image")],
    *[pytest.param(case, True, marks=pytest.mark.thorough) for case in ("categorical", "gaussian", "lstm")]])
def test_evaluate_is_one_graph(case, bf16):
    options = {"recurrent_net": "lstm", "recurrent_size": 4} if case == "lstm" else {"normalize_obs": True}
    actor = _actor(IMAGE if case == "image" else VECTOR, CONTINUOUS if case == "gaussian" else TWO, **options)
    FlatParameters(actor.parameters())
    lead = (3, 2) if case == "lstm" else (4,)
    obs, rhs = _obs(actor, *lead), actor.initial_states(2)
    done = torch.zeros(lead, dtype=torch.bool)
    action = torch.zeros(*lead, 3) if case == "gaussian" else torch.zeros(lead, dtype=torch.int64)
    mask = torch.tensor([True, False]).expand(*lead, 2) if case == "categorical" else None
    compiled = torch.compile(actor.evaluate, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        results = compiled(obs, rhs, done, action, mask)
        expected = actor.evaluate(obs, rhs, done, action, mask)
    for got, other in zip(results, expected, strict=True):
        torch.testing.assert_close(got, other)
        assert got.dtype == torch.float32
