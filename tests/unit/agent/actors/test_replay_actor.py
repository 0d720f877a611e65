"""Test actors of replay algorithms: spaces, initialization, dueling and noisy heads, squashed actions, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import MLP, OffPolicyActor, QActor
from pytorchrl.agent.actors.replay_actor import NoisyLinear
from pytorchrl.agent.actors.squashed import bound_log_std, squashed_log_prob, squashed_sample
from pytorchrl.agent.algorithms import SAC
from pytorchrl.agent.data import RolloutData
from pytorchrl.errors import CheckpointError, ConfigError, NonFiniteDataError, SpaceError
from pytorchrl.files.tensors import save

VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL_IMAGE = gym.spaces.Box(0, 255, (3, 12, 12), np.uint8)
NESTED = gym.spaces.Dict({"camera": gym.spaces.Dict({"left.1": VECTOR}), "kind": gym.spaces.Discrete(3)})
OBSERVATIONS = {"vector": VECTOR, "image": IMAGE, "nested": NESTED, "discrete": gym.spaces.Discrete(5)}
FOUR = gym.spaces.Discrete(4)
BOX = gym.spaces.Box(np.array([[-2.0, 0.0]], np.float32), np.array([[2.0, 5.0]], np.float32))


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _actor(cls=QActor, observations=VECTOR, actions=FOUR, seed=1, **options):
    return cls.create_factory(observations, actions, **{"hidden_sizes": (8,), **options})(seed=seed)


def _obs(actor, rows=5, seed=0):
    rng, obs = np.random.default_rng(seed), {}
    for leaf, space in actor.options.observation_space.items():
        if isinstance(space, gym.spaces.Discrete):
            obs[leaf] = torch.as_tensor(rng.integers(0, space.n, rows))
        elif space.dtype == np.uint8:
            obs[leaf] = torch.as_tensor(rng.integers(0, 256, (rows, *space.shape), dtype=np.uint8))
        else:
            obs[leaf] = torch.as_tensor(rng.normal(size=(rows, *space.shape)).astype(np.float32))
    return obs


def _weights(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


# ---- both actors


@pytest.mark.every(3)
@pytest.mark.parametrize("observations", OBSERVATIONS)
@pytest.mark.parametrize(("cls", "actions", "options"), [
    (QActor, FOUR, {}), (QActor, FOUR, {"dueling": True, "noisy": True}), (OffPolicyActor, FOUR, {}),
    (OffPolicyActor, BOX, {}), (OffPolicyActor, BOX, {"policy": "deterministic"})])
def test_actors_act_and_score_for_every_pair_of_spaces(cls, actions, options, observations):
    actor = _actor(cls, OBSERVATIONS[observations], actions, **options)
    obs = _obs(actor)
    before = {leaf: rows.clone() for leaf, rows in obs.items()}
    action = actor.act(obs, generator=_generator())
    assert action.shape == (5, *actions.shape)
    assert action.dtype == (torch.int64 if actions is FOUR else torch.float32)
    assert all(actions.contains(row) for row in actor.to_env(action).detach().numpy().astype(actions.dtype))
    scores = actor.get_q_scores(obs, action)
    assert scores.shape == ((5,) if cls is QActor else (2, 5))
    if actions is FOUR:
        every = actor.get_q_scores(obs)
        assert every.shape == (*scores.shape, 4)
        torch.testing.assert_close(every[..., range(5), action], scores)
    assert all(torch.equal(obs[leaf], rows) for leaf, rows in before.items())


@pytest.mark.parametrize("cls", [QActor, OffPolicyActor])
def test_layers_are_initialized_like_torch_layers(cls):
    actor = _actor(cls, IMAGE, hidden_sizes=(300, 200))
    for network in actor.networks().values():
        layers = [m for m in network.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
        assert len(layers) >= 5
        for layer in layers:
            bound = 1 / math.sqrt(layer.weight[0].numel())
            assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound + 1e-7
            assert float(layer.bias.detach().abs().max()) <= bound + 1e-7
            assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_weights_depend_on_the_seed_and_the_global_rng_is_not_used():
    state = torch.get_rng_state()
    first, again, other = (_actor(OffPolicyActor, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(_weights(first), _weights(again))
    assert not torch.equal(_weights(first), _weights(other))


def test_fixup_and_user_defined_extractors_keep_their_initialization():
    fixup = _actor(QActor, SMALL_IMAGE, feature_extractor="fixup")
    blocks = [module for name, module in fixup.q.named_modules() if name.endswith("conv2")]
    assert len(blocks) == 6
    assert all(not block.weight.any() for block in blocks)
    own = _actor(QActor, VECTOR, feature_extractor=_Constant)
    assert torch.equal(own.q.trunk.extractor.weight, torch.ones(2, 3))


class _Constant(torch.nn.Linear):
    out_features = 2

    def __init__(self, space):
        super().__init__(space.shape[0], 2)
        torch.nn.init.ones_(self.weight)


@pytest.mark.parametrize("options", [
    {"hidden_sizes": (9,)}, {"activation": "tanh"}, {"block": "simba"}, {"dueling": True}, {"noisy": True},
    {"feature_extractor": MLP}])
def test_options_of_q_actor_change_its_scores(options):
    plain, other = _actor(), _actor(**options)
    assert not torch.equal(plain.get_q_scores(_obs(plain), generator=_generator()),
                           other.get_q_scores(_obs(plain), generator=_generator()))


def test_tables_of_options_are_complete():
    shared = {"observation_space", "action_space", "feature_extractor", "hidden_sizes", "activation", "block",
              "normalize_obs", "checkpoint",
              "distribution", "num_atoms", "v_min", "v_max"}  # the last four: test_return_distributions
    assert {field.name for field in dataclasses.fields(QActor.Options)} == shared | {
        "dueling", "noisy", "norm", "recurrent_net", "recurrent_size",
        "prev_action_reward"}  # the memory options are tested in test_r2d2 and test_previous_action_reward
    assert {field.name for field in dataclasses.fields(OffPolicyActor.Options)} == shared | {
        "policy", "num_critics", "log_std_bound", "obs_groups", "recurrent_net", "recurrent_size",
        "critic_norm", "critic_dropout", "critic_hidden_sizes"}  # test_critic_layers tests the latter three


@pytest.mark.parametrize("cls", [QActor, OffPolicyActor])
def test_factory_prints_and_pickles(cls):
    factory = cls.create_factory(VECTOR, FOUR, hidden_sizes=(8,))
    assert "hidden_sizes=(8,)" in repr(factory)
    assert torch.equal(_weights(pickle.loads(pickle.dumps(factory))(seed=1)), _weights(factory(seed=1)))


@pytest.mark.parametrize(("cls", "actions", "options", "error", "message"), [
    (QActor, BOX, {}, SpaceError, "QActor needs Discrete actions, got Box.*; actors for such Box actions: "
                                  ".*OffPolicyActor"),
    (OffPolicyActor, gym.spaces.MultiBinary(3), {}, SpaceError,
     "OffPolicyActor needs Box or Discrete actions.*; actors for such MultiBinary actions: .*OnPolicyActor"),
    (OffPolicyActor, gym.spaces.Box(-np.inf, np.inf, (2,)), {}, SpaceError, "finite bounds"),
    (OffPolicyActor, gym.spaces.Box(-3e38, 3e38, (2,)), {}, SpaceError, "a finite distance between them"),
    (OffPolicyActor, gym.spaces.Box(0.0, 1e300, (2,), np.float64), {}, SpaceError, "a finite distance between them"),
    (OffPolicyActor, FOUR, {"policy": "deterministic"}, ConfigError, "needs a Box"),
    (OffPolicyActor, FOUR, {"log_std_bound": "tanh"}, ConfigError, "log_std_bound=.tanh. needs"),
    (OffPolicyActor, BOX, {"policy": "deterministic", "log_std_bound": "tanh"}, ConfigError,
     "log_std_bound=.tanh. needs"),
    (OffPolicyActor, BOX, {"num_critics": 0}, ConfigError, "num_critics must be a whole number >= 1"),
    (OffPolicyActor, FOUR, {"critic_norm": "layer", "critic_dropout": 0.1}, ConfigError,
     "critic_norm, critic_dropout needs a Box of actions"),
    (OffPolicyActor, BOX, {"critic_norm": "group"}, ConfigError, "critic_norm must be one of"),
    (OffPolicyActor, BOX, {"critic_dropout": 1.0}, ConfigError, "critic_dropout must be a number .*0.9"),
    (OffPolicyActor, BOX, {"critic_dropout": 0.1, "critic_hidden_sizes": ()}, ConfigError, "need hidden layers"),
    (QActor, FOUR, {"duelling": True}, ConfigError, "did you mean 'dueling'"),
    (QActor, FOUR, {"feature_extractor": "cnn"}, SpaceError, "needs an image leaf"),
    (QActor, FOUR, {"hidden_sizes": (0,)}, ConfigError, "hidden_sizes must be a tuple or list of whole numbers >= 1"),
])
def test_wrong_options_are_refused_at_once(cls, actions, options, error, message):
    with pytest.raises(error, match=message):
        cls.create_factory(VECTOR, actions, **options)


def test_observations_are_normalized_by_merged_moments():
    actor = _actor(OffPolicyActor, VECTOR, BOX, normalize_obs=True)
    rng = np.random.default_rng(0)
    rows = torch.as_tensor(rng.normal(3.0, 2.0, (41, 2, 3)).astype(np.float32))
    flags = torch.zeros(40, 2, dtype=torch.bool)
    rollout = RolloutData(
        obs={"obs": rows}, done=torch.zeros(41, 2, dtype=torch.bool), rhs={}, mask=None, action=torch.zeros(40, 2),
        reward=torch.zeros(40, 2), terminated=flags, truncated=flags, valid=~flags,
        final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={})
    before = actor.get_q_scores({"obs": rows[0]}, torch.zeros(2, 1, 2))
    actor.merge_moments(actor.moments_of(rollout))
    seen = actor.normalize({"obs": rows[:40]})["obs"].reshape(-1, 3)
    torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    assert not torch.equal(actor.get_q_scores({"obs": rows[0]}, torch.zeros(2, 1, 2)), before)
    assert actor.reward_moments is None
    assert any("obs_moments" in name for name in actor.state_buffers())


def test_checkpoint_loads_policy_and_normalizers_or_raises(tmp_path):
    trained = _actor(OffPolicyActor, VECTOR, BOX, seed=3)
    algorithm = SAC.create_factory()(actor=trained, seed=0)
    path = tmp_path / "model.pt"
    save(path, {"format": 1, "version": 1, "acting_state": algorithm.acting_state()})
    loaded = _actor(OffPolicyActor, VECTOR, BOX, seed=4, checkpoint=str(path))
    assert torch.equal(_weights(loaded.policy), _weights(trained.policy))
    assert not torch.equal(_weights(loaded.critics), _weights(trained.critics))
    with pytest.raises(CheckpointError, match="this actor has"):
        _actor(OffPolicyActor, VECTOR, BOX, hidden_sizes=(9,), checkpoint=str(path))
    with pytest.raises(CheckpointError, match="must contain the acting_state of an actor"):
        _actor(QActor, checkpoint=str(path))


# ---- Q actor


@pytest.mark.parametrize(("observations", "options", "names"), [
    (VECTOR, {"hidden_sizes": (8, 8)}, ["extractor"] * 2), (IMAGE, {}, ["extractor"] * 4),
    (IMAGE, {"feature_extractor": "impala"}, ["extractor"]), (IMAGE, {"feature_extractor": "fixup"}, ["extractor"]),
    (NESTED, {"hidden_sizes": (8,)}, ["extractor"] * 2 + ["joint"] * 2)])
def test_norm_normalizes_every_hidden_layer(observations, options, names):
    actor = _actor(QActor, observations, norm="layer", **options)
    found = [name for name, module in actor.q.named_modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(found) == len(names)
    assert sum("joint" in name for name in found) == names.count("joint")
    obs = _obs(actor)
    assert not torch.equal(actor.get_q_scores(obs), _actor(QActor, observations, **options).get_q_scores(obs))


@pytest.mark.parametrize(("observations", "options"), [
    (VECTOR, {"hidden_sizes": ()}), (SMALL_IMAGE, {"feature_extractor": MLP})])
def test_a_norm_that_would_reach_no_layer_is_refused(observations, options):
    with pytest.raises(ConfigError, match=r"norm='layer' needs hidden layers of this library, .*; leave norm out"):
        QActor.create_factory(observations, FOUR, norm="layer", **options)


def test_only_allowed_actions_are_taken():
    actor = _actor()
    obs = _obs(actor, 40)
    mask = torch.rand(40, 4, generator=_generator()) < 0.4
    mask[:, 2] |= ~mask.any(1)
    action = actor.act(obs, mask)
    scores = actor.get_q_scores(obs).detach()
    for row in range(40):
        assert action[row] == max(np.flatnonzero(mask[row]), key=lambda a, row=row: float(scores[row, a]))
    mask[3] = False
    with pytest.raises(NonFiniteDataError, match=r"rows \[3\]"):
        actor.act(obs, mask)


def test_dueling_mean_is_over_allowed_actions():
    actor = _actor(dueling=True)
    obs = _obs(actor, 6)
    mask = torch.tensor([[True, True, False, True]] * 5 + [[False] * 4])
    features, _ = actor.q.trunk.forward(obs, None, None)
    value, advantage = actor.q.value_head(features), actor.q.advantage_head(features)
    scores = actor.get_q_scores(obs, mask=mask)
    torch.testing.assert_close(scores[:5], (value + advantage - advantage[:, [0, 1, 3]].mean(1, keepdim=True))[:5])
    torch.testing.assert_close(actor.get_q_scores(obs).mean(1, keepdim=True), value)
    assert scores[5].isfinite().all()


def test_noisy_layer_shares_factorized_noise_among_rows():
    layer = NoisyLinear(3, 2, _generator(1))
    x = torch.randn(4, 3, generator=_generator(2))
    noise = torch.empty(5).normal_(generator=_generator(7))
    noise = noise.sign() * noise.abs().sqrt()
    weight = layer.weight + layer.weight_sigma * torch.outer(noise[3:], noise[:3])
    bias = layer.bias + layer.bias_sigma * noise[3:]
    torch.testing.assert_close(layer(x, _generator(7)), x @ weight.T + bias)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
    assert float(layer.weight_sigma.detach()[0, 0]) == pytest.approx(0.5 / math.sqrt(3))


# ---- policies for Box action spaces


def log_density(u, mean, log_std):
    return squashed_log_prob((u - mean) / log_std.exp(), u, log_std)


def test_squashed_log_probability_has_known_values():
    def log_prob(u, mean, log_std):
        return float(log_density(*(torch.tensor([value], dtype=torch.float64) for value in (u, mean, log_std))))

    assert log_prob(0.7, 0.3, -0.5) == pytest.approx(-0.181861, abs=1e-6)
    normal = -0.5 * math.log(2 * math.pi)
    assert normal - log_prob(20.0, 20.0, 0.0) == pytest.approx(-38.61, abs=0.01)
    assert normal - log_prob(-400.0, -400.0, 0.0) == pytest.approx(-798.61, abs=0.01)


def test_squashed_density_integrates_to_one():
    u = torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(-1)
    density = log_density(u, torch.tensor([0.4], dtype=torch.float64), torch.tensor([-0.3], dtype=torch.float64)).exp()
    assert float(torch.trapezoid(density, torch.tanh(u[:, 0]))) == pytest.approx(1.0, abs=1e-6)


def test_squashed_sample_returns_its_log_probability():
    mean, log_std = torch.randn(6, 2, generator=_generator()), torch.full((6, 2), -1.0)
    action, logp = squashed_sample(mean, log_std, _generator(3))
    torch.testing.assert_close(logp, log_density(torch.atanh(action), mean, log_std), rtol=1e-3, atol=1e-4)


def test_squashed_sample_has_the_values_and_gradients_of_the_distribution_in_torch():
    def gradients(sample):
        mean = torch.linspace(-8, 8, 34).reshape(17, 2).requires_grad_()  # row 8 contains values close to 0
        log_std = torch.linspace(-3, 1, 34).reshape(17, 2).requires_grad_()
        action, logp = sample(mean, log_std)
        (logp.sum() + (action * torch.arange(2.0)).sum()).backward()
        return logp.detach(), mean.grad, log_std.grad

    def of_torch(mean, log_std):
        noise = torch.empty(mean.shape).normal_(generator=_generator(3))
        transform = torch.distributions.TanhTransform(cache_size=1)
        distribution = torch.distributions.TransformedDistribution(
            torch.distributions.Normal(mean, log_std.exp()), transform)
        action = transform(mean + log_std.exp() * noise)
        return action, distribution.log_prob(action).sum(-1)

    torch.testing.assert_close(gradients(lambda mean, log_std: squashed_sample(mean, log_std, _generator(3))),
                               gradients(of_torch), rtol=1e-4, atol=1e-4)


def test_log_std_is_bounded_by_clip_or_tanh():
    outputs = torch.tensor([-100.0, 0.0, 100.0])
    assert bound_log_std(outputs, "clip").tolist() == [-20.0, 0.0, 2.0]
    assert bound_log_std(outputs, "tanh").tolist() == [-5.0, -1.5, 2.0]
    plain, bent = (_actor(OffPolicyActor, VECTOR, BOX, log_std_bound=bound) for bound in ("clip", "tanh"))
    obs = _obs(plain)
    assert not torch.equal(plain.act(obs, generator=_generator()), bent.act(obs, generator=_generator()))


@pytest.mark.parametrize("policy", ["stochastic", "deterministic"])
def test_actions_are_scaled_to_the_box_outside_of_the_policy(policy):
    actor = _actor(OffPolicyActor, VECTOR, BOX, policy=policy)
    ends = torch.tensor([[[-1.0, -1.0]], [[0.0, 0.0]], [[1.0, 1.0]]])
    assert actor.to_env(ends).tolist() == [[[-2.0, 0.0]], [[0.0, 2.5]], [[2.0, 5.0]]]
    obs = _obs(actor, 500)
    action = actor.act(obs, generator=_generator())
    assert action.abs().max() <= 1
    best = actor.act(obs, deterministic=True)
    outputs = actor.policy(obs)[:, :2].view(-1, 1, 2)
    torch.testing.assert_close(best, torch.tanh(outputs))
    assert torch.equal(action, best) == (policy == "deterministic")


def test_deterministic_discrete_action_is_the_mode():
    actor = _actor(OffPolicyActor, VECTOR, FOUR)
    obs = _obs(actor, 300)
    assert torch.equal(actor.act(obs, deterministic=True), actor.policy(obs).argmax(-1))
    drawn = actor.act(obs, generator=_generator())
    assert len(drawn.unique()) == 4
    assert torch.equal(drawn, actor.act(obs, generator=_generator()))


def test_networks_share_no_parameters():
    actor = _actor(OffPolicyActor, VECTOR, BOX, num_critics=3)
    networks = [actor.policy, *actor.critics]
    assert len(networks) == 4
    storages = [parameter.data_ptr() for network in networks for parameter in network.parameters()]
    assert len(storages) == len(set(storages)) == len(list(actor.parameters()))
    scores = actor.get_q_scores(_obs(actor), torch.zeros(5, 1, 2))
    assert len({row.sum().item() for row in scores}) == 3


def test_mask_without_discrete_actions_is_refused():
    actor = _actor(OffPolicyActor, VECTOR, BOX)
    with pytest.raises(SpaceError, match="Discrete"):
        actor.act(_obs(actor), mask=torch.ones(5, 2, dtype=torch.bool))
