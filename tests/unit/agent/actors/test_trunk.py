"""Test the feature extractors of an actor: built-in extractors chosen by name, and user-defined extractors."""

from __future__ import annotations

import copy
import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from pytorchrl.agent.actors import Embedding, ImpalaCNN, OnPolicyActor
from pytorchrl.agent.actors.blocks import DictNet
from pytorchrl.agent.actors.extractors import CNN, MLP
from pytorchrl.agent.actors.resnets import FixupCNN

VECTOR = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (2, 36, 40), np.uint8)
TWO = gym.spaces.Discrete(2)
NESTED = gym.spaces.Dict(
    camera=gym.spaces.Dict(left=IMAGE), kind=gym.spaces.Discrete(3), bits=gym.spaces.MultiBinary(2), arm=VECTOR)


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


@pytest.mark.parametrize(("space", "name", "expected"), [
    (VECTOR, "auto", MLP), (IMAGE, "auto", CNN), (IMAGE, "cnn", CNN), (IMAGE, "impala", ImpalaCNN),
    (IMAGE, "fixup", FixupCNN), (IMAGE, "mlp", MLP), (NESTED, "auto", DictNet), (NESTED, "impala", DictNet)])
def test_feature_extractor_by_name(space, name, expected):
    actor = _actor(space, feature_extractor=name)
    assert type(actor.policy.extractor) is expected
    if expected is DictNet:
        kinds = {type(net) for net in actor.policy.extractor.extractors}
        assert kinds == {MLP, CNN if name == "auto" else ImpalaCNN}


def test_feature_extractor_from_the_user():
    def small(space):
        net = nn.Sequential(nn.Linear(space.shape[0], 9), nn.BatchNorm1d(9), nn.ReLU())
        net.out_features = 9
        return net

    before = torch.get_rng_state()
    actor, twin = _actor(feature_extractor=small), _actor(feature_extractor=small)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(actor.policy.extractor[0].weight, twin.policy.extractor[0].weight)
    assert not torch.equal(actor.policy.extractor[0].weight, actor.value.extractor[0].weight)
    assert actor.policy_head.in_features == 9
    assert "policy.extractor.1.running_mean" in actor.state_buffers()
    assert _actor(IMAGE, feature_extractor=functools.partial(ImpalaCNN, out_features=33)).policy.out_features == 33
    embedded = _actor(gym.spaces.Discrete(4), feature_extractor=functools.partial(Embedding, out_features=6))
    with pytest.raises(IndexError, match="from 0 to 3"):
        _act(embedded, {"obs": torch.tensor([4])})


def test_buffers_that_a_network_replaces_are_found():
    class Counting(nn.Linear):
        out_features = 2

        def __init__(self, space):
            super().__init__(space.shape[0], 2)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("cache", torch.zeros(()), persistent=False)

        def forward(self, obs):
            self.count = self.count + 1
            return super().forward(obs)

    actor = _actor(feature_extractor=Counting)
    names = {f"{network}.extractor.count" for network in ("policy", "value")}
    assert actor.state_buffers().keys() == names
    twin = copy.deepcopy(actor)
    for network in (actor.policy, actor.value):
        network.extractor(torch.zeros(1, 4))
    for name in names:
        assert actor.state_buffers()[name] is actor.get_buffer(name)
        assert twin.state_buffers()[name] is twin.get_buffer(name)
        assert actor.get_buffer(name) == twin.get_buffer(name) + 1


def test_feature_extractor_from_the_user_sees_all_leaves():
    class Pick(nn.Module):
        def __init__(self, spaces):
            super().__init__()
            self.leaves, self.out_features = list(spaces), 4

        def forward(self, obs):
            return obs["arm"]

    actor = _actor(NESTED, feature_extractor=Pick)
    assert set(actor.policy.extractor.leaves) == {"camera/left", "kind", "bits", "arm"}
    assert _act(actor, _obs(actor, 3))[2].shape == (3, 2)
