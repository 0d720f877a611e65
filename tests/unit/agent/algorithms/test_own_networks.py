"""Test actors with user-defined networks: acting, learning, and errors that name the class."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from pytorchrl import DQN, PPO, SAC, OffPolicyActor, OnPolicyActor, QActor
from pytorchrl.agent.actors import Actor
from pytorchrl.agent.algorithms import OnPolicyAlgorithm
from pytorchrl.errors import ConfigError, ContractError
from pytorchrl.files.tensors import save

SPACE = gym.spaces.Box(-1, 1, (4,), np.float32)
ACTIONS = gym.spaces.Discrete(3)
OBS = {"obs": torch.linspace(-1, 1, 20).view(5, 4)}


class Asymmetric(OnPolicyActor):
    """An actor whose policy sees half of the inputs of the value network."""

    def build_networks(self, generator):
        self.body = nn.Sequential(nn.Linear(2, 6), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(4, 7), nn.Tanh())
        self.policy_head = nn.Linear(6, self.distribution.num_outputs)
        self.value_head = nn.Linear(7, 1)

    def policy_features(self, obs, rhs, done):
        return self.body(obs["obs"][..., ::2]), {}

    def value_features(self, obs, rhs, done):
        return self.critic(obs["obs"]), {}


class Shared(Asymmetric):
    """An actor whose policy head and value head share features, and whose value head has two linear layers."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.is_shared = True
        self.value_head = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))

    value_features = OnPolicyActor.value_features


class Counting(Asymmetric):
    """An actor whose memory is the sum of all observations of an episode so far."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.is_recurrent = True

    def initial_states(self, num_envs):
        return {"sum": torch.zeros(num_envs, 4)}

    def policy_features(self, obs, rhs, done):
        state, rows = rhs["sum"], obs["obs"] if obs["obs"].dim() == 3 else obs["obs"][None]
        features = []
        for row, first in zip(rows, done.view(len(rows), -1), strict=True):
            state = state.masked_fill(first[:, None], 0.0) + row
            features.append(self.body(state[:, ::2]))
        found = torch.stack(features)
        return found if obs["obs"].dim() == 3 else found[0], {"sum": state}


def make(cls, seed=0, **options):
    return cls.create_factory(SPACE, ACTIONS, **options)(device="cpu", seed=seed)


def test_policy_and_value_are_computed_by_the_networks():
    actor = make(Asymmetric)
    action, _, params, value, states = actor.act(OBS, {}, None, deterministic=True)
    logits = actor.policy_head(actor.body(OBS["obs"][:, ::2]))
    torch.testing.assert_close(params, logits)
    assert torch.equal(action, logits.argmax(-1))
    assert (value, states) == (None, {})
    expected = actor.value_head(actor.critic(OBS["obs"])).squeeze(-1)
    torch.testing.assert_close(actor.get_value(OBS, {}, None)[0]["value"], expected)
    evaluated = actor.evaluate_all(OBS, {}, None, action)
    torch.testing.assert_close(evaluated.value, expected)
    torch.testing.assert_close(evaluated.logp, logits.log_softmax(-1).gather(-1, action[:, None])[:, 0])
    torch.testing.assert_close(evaluated.features, actor.body(OBS["obs"][:, ::2]))
    torch.testing.assert_close(evaluated.value_features, actor.critic(OBS["obs"]))


def test_a_shared_head_uses_the_features_of_the_policy():
    actor = make(Shared)
    expected = actor.value_head(actor.body(OBS["obs"][:, ::2])).squeeze(-1)
    torch.testing.assert_close(actor.act(OBS, {}, None)[3], expected)
    evaluated = actor.evaluate_all(OBS, {}, None, torch.zeros(5, dtype=torch.int64))
    assert evaluated.value_features is evaluated.features
    torch.testing.assert_close(evaluated.value, expected)


def test_unrolled_custom_memory_equals_its_acting_steps(build, collect, made_up_steps):
    """Check that unrolling and acting compute equal memory states: the KL divergence of the first batch is 0."""
    parts = build(PPO, actor_class=counting_of(3), num_mini_batch=1, num_epochs=1, actor={"hidden_sizes": (64, 64)})
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    batch, = parts.algorithm.batches(parts.storage)
    _, info = parts.algorithm.compute_gradients(batch)
    assert info["kl"] == pytest.approx(0.0, abs=1e-6)
    assert batch.done.dim() == 2


def counting_of(size):
    class Sized(Counting):
        def build_networks(self, generator):
            super().build_networks(generator)
            self.body, self.critic = nn.Linear((size + 1) // 2, 6), nn.Linear(size, 7)

        def initial_states(self, num_envs):
            return {"sum": torch.zeros(num_envs, size)}
    return Sized


class Replaced(OnPolicyActor):
    """An actor whose first layers are replaced."""

    def build_networks(self, generator):
        super().build_networks(generator)
        for trunk in (self.policy, self.value):
            trunk.extractor.layers[0] = nn.Linear(4, 64)


def test_replaced_layers_are_used():
    actor = make(Replaced)
    first, second = actor.policy.extractor.layers
    params = actor.act(OBS, {}, None)[2]
    torch.testing.assert_close(params, actor.policy_head(torch.tanh(second(torch.tanh(first(OBS["obs"]))))))
    actor.get_value(OBS, {}, None)[0]["value"].sum().backward()
    assert actor.value.extractor.layers[0].weight.grad.any()


@pytest.mark.parametrize("cls", [Asymmetric, Shared])
def test_initial_weights_depend_on_the_seed_and_the_global_rng_is_not_used(cls):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (make(cls, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["body.0.weight"], other["body.0.weight"])


def test_normalizers_and_checkpoints_need_no_code_in_the_subclass(tmp_path):
    actor = make(Asymmetric, normalize_obs=True, normalize_reward=True)
    assert len(actor.obs_moments) == 1
    assert actor.reward_moments is not None
    state = {"all": torch.nn.utils.parameters_to_vector(actor.parameters()).detach() + 1.0, **actor.state_buffers()}
    save(tmp_path / "model.pt", {"format": 1, "acting_state": state})
    loaded = make(Asymmetric, normalize_obs=True, normalize_reward=True, checkpoint=str(tmp_path / "model.pt"))
    assert torch.equal(torch.nn.utils.parameters_to_vector(loaded.parameters()), state["all"])


@pytest.mark.parametrize(("cls", "options", "named"), [
    (Asymmetric, {"hidden_sizes": (9,), "normalize_obs": True}, r"hidden_sizes=\(9,\)"),
    (Asymmetric, {"recurrent_net": "gru"}, "recurrent_net='gru'"),
    (Asymmetric, {"policy_gain": 1.0}, "policy_gain=1.0")])
def test_options_that_custom_networks_do_not_read_are_refused(cls, options, named):
    with pytest.raises(ConfigError, match=rf"Asymmetric.build_networks\(\) does not read {named}, which would have no "
                                          r"effect"):
        make(cls, **options)


class Wide(Asymmetric):
    """An actor with an option that sets the width of its networks."""

    def build_networks(self, generator):
        super().build_networks(generator)
        width, = self.options.hidden_sizes
        self.critic, self.value_head = nn.Linear(4, width), nn.Linear(width, 1)


def test_options_that_custom_networks_read_are_accepted():
    actor = make(Wide, hidden_sizes=(9,))
    assert actor.value_head.in_features == 9
    assert type(actor.options) is Wide.Options


class Remembering(Wide):
    """An actor whose networks keep a reference to the options."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.body.options = self.options


def test_options_stored_in_a_network_are_plain_options():
    actor = make(Remembering, hidden_sizes=(5,))
    kept = actor.body.options
    assert type(kept) is Remembering.Options
    assert kept == actor.options
    assert pickle.loads(pickle.dumps(actor)).body.options == kept


class Unpacking(Asymmetric):
    """An actor that reads all its options with `vars`."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.size = dict(vars(self.options))["hidden_sizes"]


def test_vars_of_the_options_counts_as_reading_them_all():
    assert make(Unpacking, hidden_sizes=(5,)).size == (5,)


class Frozen(Asymmetric):
    """An actor with a layer in evaluation mode, like a pretrained layer."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.body.append(nn.BatchNorm1d(6).eval())


def test_modules_keep_the_mode_that_they_were_built_in():
    modes = {name: module.training for name, module in make(Frozen).named_modules()}
    assert not modes.pop("body.2")
    assert all(modes.values())


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_custom_networks_receive_wide_observations_as_float32(normalize_obs):
    space = {"obs": gym.spaces.Box(-1e9, 1e9, (4,), np.float64)}
    actor = Asymmetric.create_factory(space, ACTIONS, normalize_obs=normalize_obs)(seed=0)
    wide = {"obs": OBS["obs"].double()}
    expected = make(Asymmetric, normalize_obs=normalize_obs).act(OBS, {}, None, deterministic=True)[2]
    torch.testing.assert_close(actor.act(wide, {}, None, deterministic=True)[2], expected)


# Errors


def lacking(cls, **members):
    return type("MyActor", (cls,), members)


def built(**networks):
    def build_networks(self, generator):
        Asymmetric.build_networks(self, generator)
        for name, network in networks.items():
            setattr(self, name, network)
    return {"build_networks": build_networks}


MISTAKES = {
    "no head": (lacking(Asymmetric, build_networks=lambda self, generator: None),
                r"MyActor.build_networks\(\) set policy_head to None; expected a module"),
    "no value": (lacking(OnPolicyActor, build_networks=Asymmetric.build_networks,
                         policy_features=Asymmetric.policy_features),
                 r"MyActor.build_networks\(\) returned networks for policy_features\(\) alone; expected a method "
                 r"value_features"),
    "no policy": (lacking(OnPolicyActor, build_networks=Asymmetric.build_networks,
                          value_features=Asymmetric.value_features),
                  r"MyActor.build_networks\(\) returned no network for policy_features\(\); expected a method "
                  r"policy_features\(\) too"),
    "a head of another size": (lacking(Asymmetric, **built(policy_head=nn.Linear(6, 5))),
                               r"MyActor.policy_head returned a tensor of shape \(3, 5\).*expected a tensor of shape "
                               r"\(3, 3\)"),
    "a value of two": (lacking(Asymmetric, **built(value_head=nn.Linear(7, 2))),
                       r"MyActor.value_head returned .*\(3, 2\)"),
    "a value without its axis": (lacking(Asymmetric, **built(value_head=nn.Sequential(nn.Linear(7, 1), nn.Flatten(0)))),
                                 r"MyActor.value_head returned a tensor of shape \(3,\)"),
    "features alone": (lacking(
        Asymmetric, policy_features=lambda self, obs, rhs, done: self.body(obs["obs"][..., ::2])),
                       r"MyActor.policy_features\(\) returned a tensor .*expected features and the next state"),
    "features of one row": (lacking(Asymmetric, policy_features=lambda self, obs, rhs, done: (torch.zeros(6), {})),
                            r"MyActor.policy_features\(\) returned features as a tensor of shape \(6,\)"),
    "a memory that was not begun": (lacking(Counting,
                                            initial_states=lambda self, num_envs: {"other": torch.zeros(num_envs, 4)},
                                            policy_features=lambda self, obs, rhs, done: (
                                                self.body(obs["obs"][..., ::2]), {"sum": obs["obs"]})),
                                    r"MyActor.policy_features\(\) returned the memory 'sum'"),
}


@pytest.mark.parametrize(("cls", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_contract_violations_are_reported(cls, message):
    with pytest.raises(ContractError, match=message):
        make(cls)


class OwnQ(QActor):
    """A Q actor whose network is a single linear layer."""

    num_values = 3

    def build_networks(self, generator):
        self.q = OneLayer(4, self.num_values)


class OneLayer(nn.Linear):
    def forward(self, obs, mask=None, generator=None):
        return super().forward(obs["obs"])


def test_a_custom_q_network_acts_and_learns():
    actor = make(OwnQ)
    assert torch.equal(actor.act(OBS), actor.q(OBS).argmax(-1))
    algorithm = DQN.create_factory()(actor=actor, seed=0)
    assert algorithm.groups["q"].names == ["weight", "bias"]
    assert torch.equal(algorithm.targets["q"](OBS), actor.q(OBS))


def test_contract_violations_of_a_q_network_are_reported():
    with pytest.raises(ContractError, match=r"MyActor.q\(obs, mask, generator\) returned .*\(3, 2\).*expected .*\(3, "
                                            r"3\)"):
        make(lacking(OwnQ, num_values=2))
    with pytest.raises(ContractError, match=r"MyActor.build_networks\(\) set q to None"):
        make(lacking(QActor, build_networks=lambda self, generator: None))


class OwnPair(OffPolicyActor):
    def build_networks(self, generator):
        self.policy = OneLayer(4, self.num_outputs)
        self.critics = nn.ModuleList([OneLayer(4, 3), OneLayer(4, 3)])


def test_custom_networks_for_sac_act_and_learn():
    actor = make(OwnPair)
    algorithm = SAC.create_factory()(actor=actor, seed=0)
    assert len(algorithm.groups["q"]) == 2 * 15
    torch.testing.assert_close(actor.get_q_scores(OBS), torch.stack([critic(OBS) for critic in actor.critics]))

    def wrong(self, generator):
        OwnPair.build_networks(self, generator)
        self.critics.append(OneLayer(4, 1))
    with pytest.raises(ContractError, match=r"MyActor.critics\[i\]\(obs\) returned .*\(3, 1\)"):
        make(lacking(OwnPair, build_networks=wrong))


@pytest.mark.parametrize(("base", "missing", "arguments"), [
    (OnPolicyAlgorithm, "terms", {}), (Actor, "build_networks", {"observation_space": SPACE, "action_space": ACTIONS})])
def test_a_missing_method_is_reported_before_anything_is_built(base, missing, arguments):
    cls = type("Mine", (base,), {})
    with pytest.raises(ContractError, match=f"Mine does not define {missing}; define every method that "
                       f"{base.__name__} declares abstract"):
        cls.create_factory(**arguments)
