"""Compare the NumPy implementation of small policies of SAC, TD3 and DDPG with the torch implementation."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.algorithms import DDPG, SAC, TD3

SPACE = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
ACTIONS = gym.spaces.Box(np.float32([[-1.0, -3.0]]), np.float32([[2.0, 0.5]]))


class OwnSAC(SAC):
    def choose(self, obs, done, deterministic, mask):
        return torch.zeros(len(done), 1, 2)


def make(cls, actor=None, actions=ACTIONS, **options):
    policy = "stochastic" if issubclass(cls, SAC) else "deterministic"
    built = OffPolicyActor.create_factory(SPACE, actions, policy=policy, **(actor or {}))(seed=3)
    return cls.create_factory(start_steps=0, **options)(actor=built, seed=4)


def act(algorithm, num=3, deterministic=False):
    obs = {"obs": np.random.default_rng(num).standard_normal((num, 5), np.float32)}
    return algorithm.acting_step(obs, {}, np.zeros(num, np.bool_), deterministic)


def in_torch(algorithm):
    """Make an algorithm act in torch, as it does for large networks."""
    algorithm.choose_small = lambda obs, deterministic: None
    return algorithm


@pytest.mark.every(3)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize(("cls", "actor", "options"), [
    (SAC, {}, {}), (SAC, {"normalize_obs": True}, {}), (SAC, {"activation": "tanh", "hidden_sizes": (8,)}, {}),
    (TD3, {}, {"noise_std": 0.7}), (DDPG, {}, {"noise": "none"})])
def test_actions_equal_those_of_torch_with_the_same_random_numbers(cls, actor, options, num, deterministic):
    algorithm, reference = make(cls, actor, **options), in_torch(make(cls, actor, **options))
    for one in (algorithm, reference):
        torch.manual_seed(0)
        one.apply_gradients([torch.randn(len(group)) for group in one.groups.values()])
    for _ in range(3):
        got, expected = act(algorithm, num, deterministic), act(reference, num, deterministic)
        assert got.action.dtype == got.clipped_action.dtype == np.float32
        assert got.action.shape == (num, 1, 2)
        np.testing.assert_allclose(got.action, expected.action, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.clipped_action, expected.clipped_action, rtol=1e-5, atol=1e-6)
    assert algorithm.choose_small({"obs": np.zeros((num, 5), np.float32)}, deterministic) is not None


@pytest.mark.parametrize("high", [0.1, 0.4, 1 / 3])
def test_actions_at_the_ends_are_within_float64_bounds(high):
    space = gym.spaces.Box(np.array([-high, high / 2]), np.array([high, high]), dtype=np.float64)
    algorithm = make(DDPG, actions=space, noise_std=1e6)
    for num in (1, 3, 5):  # five environments act in torch
        step = act(algorithm, num)
        assert set(np.abs(step.action.flat)) == {1.0}
        assert all(space.contains(action.astype(np.float64)) for action in step.clipped_action)
    for end in (-1.0, 1.0):
        assert space.contains(algorithm.actor.to_env(torch.full((1, 2), end))[0].numpy().astype(np.float64))


@pytest.mark.parametrize(("algorithm", "num"), [
    (make(SAC), 5), (make(OwnSAC), 1), (make(SAC, {"log_std_bound": "tanh"}), 1), (make(DDPG, noise="ou"), 1),
    (make(SAC, actions=gym.spaces.Discrete(3)), 1)])
def test_other_policies_and_many_environments_use_torch(algorithm, num):
    assert algorithm.choose_small({"obs": np.zeros((num, 5), np.float32)}, False) is None
    assert len(act(algorithm, num).action) == num
