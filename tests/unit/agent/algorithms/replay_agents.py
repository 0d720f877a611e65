"""Build small replay algorithms of every kind, update them with random batches, and let them act."""

from __future__ import annotations


import gymnasium as gym
import numpy as np
import torch

from pytorchrl.agent.actors import OffPolicyActor, QActor
from pytorchrl.agent.algorithms import DDPG, DQN, SAC, TD3
from pytorchrl.agent.data import ReplayBatch

SPACE = gym.spaces.Box(-1, 1, (3,), np.float32)
BOX = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
DISCRETE = gym.spaces.Discrete(4)
KINDS = {
    "dqn": (DQN, QActor, DISCRETE, {}), "noisy_dqn": (DQN, QActor, DISCRETE, {"noisy": True, "dueling": True}),
    "ddpg": (DDPG, OffPolicyActor, BOX, {"policy": "deterministic", "num_critics": 1}),
    "td3": (TD3, OffPolicyActor, BOX, {"policy": "deterministic"}), "sac": (SAC, OffPolicyActor, BOX, {}),
    "discrete_sac": (SAC, OffPolicyActor, DISCRETE, {}),
}
OBS = {"obs": np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)}
ROWS = np.zeros(6, bool)


def make(kind, seed=5, actor=None, **options):
    cls, actor_class, space, actor_options = KINDS[kind]
    networks = {"hidden_sizes": (6,), **actor_options, **dict(actor or ())}
    built = actor_class.create_factory(SPACE, space, **networks)(seed=2)
    return cls.create_factory(**options)(actor=built, seed=seed)


def make_batch(algorithm, size=8, seed=0):
    rng = np.random.default_rng(seed)
    discrete = isinstance(algorithm.actor.options.action_space, gym.spaces.Discrete)
    action = rng.integers(4, size=size) if discrete else rng.uniform(-1, 1, (size, 2)).astype(np.float32)
    obs, next_obs = (torch.as_tensor(rng.normal(size=(size, 3)).astype(np.float32)) for _ in range(2))
    return ReplayBatch(
        obs={"obs": obs}, action=torch.as_tensor(action),
        ret=torch.as_tensor(3 * rng.normal(size=size).astype(np.float32)),
        discount=torch.full((size,), algorithm.gamma), next_obs={"obs": next_obs}, weight=torch.ones(size),
        ids=torch.arange(size), num_samples=size)


def update(algorithm, times=1, first=0):
    for number in range(first, first + times):
        gradients, _ = algorithm.compute_gradients(make_batch(algorithm, seed=number))
        algorithm.apply_gradients(gradients)
    return algorithm


def act(algorithm, times=1, **how):
    return np.concatenate([algorithm.acting_step(OBS, {}, ROWS, **how).action for _ in range(times)])


def assert_explores(actions, greedy, epsilon, allowed):
    """Check that each of E environments explores with probability epsilon, independently of the other environments.

    Args:
        actions: (S, E), the actions of S steps with equal observations.
        greedy: (E,), the best action of each environment.
        epsilon: Probability of a random action.
        allowed: (E, n) bool, the allowed actions, from which random actions are drawn uniformly.
    """
    chosen = np.eye(allowed.shape[1])[actions]  # (S, E, n)
    expected = epsilon * allowed / allowed.sum(-1, keepdims=True) + (1 - epsilon) * np.eye(allowed.shape[1])[greedy]
    np.testing.assert_allclose(chosen.mean(0), expected, atol=0.06)
    for e in range(1, len(greedy)):  # the joint distribution of two environments is the product of their distributions
        joint = chosen[:, e - 1, :, None] * chosen[:, e, None, :]
        np.testing.assert_allclose(joint.mean(0), np.outer(expected[e - 1], expected[e]), atol=0.06)


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, list):  # the state of a schedule is [name, *numbers]
        return [torch.tensor(value[1:])]
    return [] if value is None else [torch.as_tensor(value).clone()]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def finish_start(algorithm):
    algorithm.follow_schedules(algorithm.start_steps, 10**6)
    return algorithm
