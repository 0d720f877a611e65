"""Replay algorithms learn in a loop of a few lines, with arrays as their storage and no scheme."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor, QActor
from pytorchrl.agent.algorithms import DDPG, DQN, SAC, TD3
from pytorchrl.agent.data import ReplayBatch
from pytorchrl.agent.options import linear

torch.set_num_threads(1)  # networks this small only wait for more


class Transitions:
    """One-step transitions in the order in which they came, drawn uniformly."""

    def __init__(self, gamma, seed, size):
        self.gamma, self.size, self.count, self.rng = gamma, size, 0, np.random.default_rng(seed)
        self.columns = None

    @property
    def counters(self):
        return {"inserted": self.count}

    def insert(self, *row):
        if self.columns is None:
            self.columns = [np.empty((self.size, *np.shape(value)), np.asarray(value).dtype) for value in row]
        for column, value in zip(self.columns, row, strict=True):
            column[self.count] = value
        self.count += 1

    def generate_batches(self, num_mini_batch, mini_batch_size):
        for _ in range(num_mini_batch):
            ids = self.rng.integers(self.count, size=mini_batch_size)
            obs, action, reward, terminated, next_obs = (torch.from_numpy(column[ids]) for column in self.columns)
            yield ReplayBatch(
                obs={"obs": obs}, action=action, ret=reward, discount=self.gamma * (1 - terminated),
                next_obs={"obs": next_obs}, weight=torch.ones(mini_batch_size), ids=torch.from_numpy(ids))


def train(env_id, algorithm_factory, actor_class, actor_options, steps, seed=1):
    """The loop; returns the algorithm."""
    env = gym.make(env_id)
    env.action_space.seed(seed)
    actor = actor_class.create_factory(env.observation_space, env.action_space, **actor_options)(seed=seed)
    algorithm = algorithm_factory(actor=actor, seed=seed)
    storage = Transitions(algorithm.gamma, seed, steps)
    obs, first = env.reset(seed=seed)[0], True
    for step in range(1, steps + 1):
        acting = algorithm.acting_step({"obs": obs[None]}, {}, np.array([first]))
        next_obs, reward, terminated, truncated, _ = env.step(acting.clipped_action[0])
        storage.insert(obs, acting.action[0], np.float32(reward), np.float32(terminated), next_obs)
        first = terminated or truncated
        obs = env.reset()[0] if first else next_obs
        if step % algorithm.update_every == 0:
            algorithm.follow_schedules(step, steps)
            for batch in algorithm.batches(storage):
                algorithm.apply_gradients(algorithm.compute_gradients(batch)[0])
    return algorithm


def evaluate(algorithm, env_id, episodes=10):
    """Mean return of the deterministic policy."""
    env, total = gym.make(env_id), 0.0
    for episode in range(episodes):
        obs, ended, first = env.reset(seed=10_000 + episode)[0], False, True
        while not ended:
            acting = algorithm.acting_step({"obs": obs[None]}, {}, np.array([first]), deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(acting.clipped_action[0])
            ended, first, total = terminated or truncated, False, total + float(reward)
    return total / episodes
