"""Tests of residual blocks (`block="simba"`): values, initial weights, and the networks that have them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import MLP, DictNet, OffPolicyActor, OnPolicyActor, QActor, Simba
from pytorchrl.agent.actors.blocks import SimbaBlock
from pytorchrl.agent.actors.small_network import SmallNetwork
from pytorchrl.agent.algorithms import DQN, PPO, SAC
from pytorchrl.errors import ConfigError

VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (3, 36, 36), np.uint8)
FOUR, BOX = gym.spaces.Discrete(4), gym.spaces.Box(-1, 1, (2,), np.float32)


def make(cls=OnPolicyActor, space=VECTOR, actions=None, **options):
    actions = actions or (BOX if cls is OffPolicyActor else FOUR)
    return cls.create_factory(space, actions, **{"block": "simba", "hidden_sizes": (8, 8), **options})(seed=2)


def randomized(module):
    """Give all parameters of a module, such as the scales and shifts of its layer norms, values that differ."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module


def reference(weights, x, num_blocks):
    """Compute the features of one row as in the paper, unit by unit in float64."""
    weights = {name: value.detach().double().numpy() for name, value in weights.items()}

    def affine(name, x):
        return [sum(w * v for w, v in zip(row, x, strict=True)) + b
                for row, b in zip(weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True)]

    def norm(name, x):
        mean = sum(x) / len(x)
        variance = sum((v - mean) ** 2 for v in x) / len(x)
        return [(v - mean) / (variance + 1e-5) ** 0.5 * scale + shift
                for v, scale, shift in zip(x, weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True)]

    x = affine("first", x)
    for k in range(num_blocks):
        hidden = [max(v, 0.0) for v in affine(f"blocks.{k}.expand", norm(f"blocks.{k}.norm", x))]
        assert len(hidden) == 4 * len(x)
        x = [v + change for v, change in zip(x, affine(f"blocks.{k}.contract", hidden), strict=True)]
    return norm("norm", x)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_features_equal_those_of_the_paper_computed_unit_by_unit(num_blocks):
    network = randomized(Simba(VECTOR, (5,) * num_blocks))
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    expected = [reference(network.state_dict(), row.double().tolist(), num_blocks) for row in rows]
    torch.testing.assert_close(network(rows), torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-5)


def test_gradients_equal_finite_differences():
    block = randomized(SimbaBlock(3)).double()
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: block(x), (x, *block.parameters()))


@pytest.mark.parametrize("cls", [OnPolicyActor, QActor, OffPolicyActor])
def test_initial_weights_are_those_of_the_paper_in_every_actor(cls):
    actor = make(cls, hidden_sizes=(64, 64))
    networks = [module for module in actor.modules() if isinstance(module, Simba)]
    assert len(networks) == {OnPolicyActor: 2, QActor: 1, OffPolicyActor: 3}[cls]
    for network in networks:
        weight = network.first.weight
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), rtol=0, atol=1e-5)
        assert len(network.blocks) == 2
        for block in network.blocks:
            for layer, inputs, outputs in ((block.expand, 64, 256), (block.contract, 256, 64)):
                assert layer.weight.shape == (outputs, inputs)
                share = layer.weight.detach().std() * (inputs / 2) ** 0.5  # of 16,384 draws
                assert float(share) == pytest.approx(1, abs=0.03)
                assert not layer.bias.any()
    assert torch.equal(*(torch.nn.utils.parameters_to_vector(make(cls).parameters()) for _ in range(2)))


def test_categories_are_encoded_as_for_other_networks():
    network = Simba(FOUR, (6,))
    assert network.first.in_features == 4
    torch.testing.assert_close(network(torch.tensor([2])), network.norm(network.blocks[0](
        network.first(torch.tensor([[0.0, 0.0, 1.0, 0.0]])))))


def test_critics_have_blocks_over_features_and_action():
    actor = make(OffPolicyActor)
    critic = actor.critics[0]
    assert isinstance(critic.trunk.extractor, MLP)  # it has no layers
    assert isinstance(critic.layers, Simba)
    assert critic.layers.first.in_features == 3 + 2
    assert [len(make(OffPolicyActor, hidden_sizes=(8,), critic_hidden_sizes=(16, 16, 16)).critics[0].layers.blocks),
            len(make(OffPolicyActor, hidden_sizes=(8,)).critics[0].layers.blocks)] == [3, 1]
    image = make(OffPolicyActor, IMAGE)
    assert [isinstance(module, Simba) for module in (image.policy.trunk.extractor, image.critics[0].layers)] == [
        False, True]


def test_features_of_several_leaves_are_joined_by_blocks():
    actor = make(space=gym.spaces.Dict({"camera": IMAGE, "state": VECTOR}))
    network = actor.policy.extractor
    assert isinstance(network, DictNet)
    assert isinstance(network.joint, Simba)
    assert [type(extractor).__name__ for extractor in network.extractors] == ["CNN", "Simba"]


@pytest.mark.parametrize(("cls", "algorithm"), [(OnPolicyActor, PPO), (QActor, DQN), (OffPolicyActor, SAC)])
def test_torch_computes_policies_with_blocks(cls, algorithm):
    """Check that the NumPy implementation of small policies, which has no residual blocks, is not used."""
    actor = make(cls)
    built = algorithm.create_factory()(actor=actor, seed=1)
    trunk, head = {OnPolicyActor: lambda: (actor.policy, actor.policy_head),
                   QActor: lambda: (actor.q.trunk, actor.q.advantage_head),
                   OffPolicyActor: lambda: (actor.policy.trunk, actor.policy.head)}[cls]()
    assert not SmallNetwork.supports(trunk, head, "relu")
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    step = built.acting_step({"obs": obs.numpy()}, {}, np.zeros(4, bool), deterministic=True)
    best, _ = actor.best_actions({"obs": obs}, {}, None)
    np.testing.assert_allclose(step.clipped_action, best.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("cls", "space", "options", "message"), [
    (OnPolicyActor, VECTOR, {"hidden_sizes": (64, 32)},
     r"block='simba' needs equal hidden_sizes, one for each residual block, got \(64, 32\); give "
     r"hidden_sizes=\(64, 64\)"),
    (QActor, VECTOR, {"hidden_sizes": ()}, r"got \(\); give hidden_sizes=\(256,\)"),
    (QActor, VECTOR, {"activation": "elu"}, "activation needs block='mlp', because residual blocks have ReLU"),
    (OnPolicyActor, IMAGE, {}, "block='simba' needs a network over vectors"),
    (OnPolicyActor, VECTOR, {"feature_extractor": torch.nn.Identity}, "one for an image or one of your own"),
    (OffPolicyActor, IMAGE, {"policy": "stochastic", "actions": FOUR}, "block='simba' needs a network over vectors"),
    (OffPolicyActor, VECTOR, {"critic_norm": "layer", "critic_dropout": 0.1},
     "critic_norm, critic_dropout needs block='mlp', because residual blocks have layer norms"),
    (OffPolicyActor, VECTOR, {"critic_hidden_sizes": (16, 8)}, r"equal critic_hidden_sizes, .* got \(16, 8\)"),
    (OnPolicyActor, VECTOR, {"block": "simba2"}, "block must be 'mlp' or 'simba'|block must be one of"),
])
def test_settings_without_a_meaning_are_refused(cls, space, options, message):
    with pytest.raises(ConfigError, match=message):
        make(cls, space, **options)


def test_relu_may_be_named_as_the_activation():
    assert isinstance(make(activation="relu").policy.extractor, Simba)
