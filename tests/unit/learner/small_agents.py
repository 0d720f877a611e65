"""Tiny agents of every kind of policy, and an environment whose observations need every kind of conversion."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

import pytorchrl as prl

TINY = {"num_envs": 2, "num_steps": 32, "hidden_sizes": (8,), "progress": False, "seed": 3}
MEMORY = {"recurrent_size": 5}


class Pictures(gym.Env):
    """An environment of images (H, W, C) whose best action is the brightest third of the image."""

    observation_space = spaces.Box(0, 255, (36, 39, 3), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self._draw(), {}

    def step(self, action):
        self.left -= 1
        return self._draw(), float(action == self.bright), self.left == 0, False, {}

    def _draw(self):
        self.bright = int(self.np_random.integers(3))
        picture = self.np_random.integers(0, 100, (36, 39, 3), dtype=np.uint8)
        picture[:, 13 * self.bright:13 * self.bright + 13] += 100
        return picture


class Mixed(gym.Env):
    """An environment with a nested observation, action masks, and actions that count from 5."""

    observation_space = spaces.Dict({
        "picture": spaces.Box(0, 255, (5, 6, 3), np.uint8),
        "body": spaces.Dict({
            "place": spaces.Box(-5.0, 5.0, (2,), np.float64), "mode": spaces.Discrete(3, start=2),
            "flags": spaces.MultiBinary(2), "counts": spaces.MultiDiscrete([2, 3], start=[1, 4])}),
        "action_mask": spaces.Box(0, 1, (4,), np.int8)})
    action_space = spaces.Discrete(4, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.left = 8
        return self._observe(), {}

    def step(self, action):
        assert self.allowed[action - 5]
        self.left -= 1
        return self._observe(), 1.0, self.left == 0, False, {}

    def _observe(self):
        obs = self.observation_space.sample()
        self.allowed = self.np_random.integers(0, 2, 4, dtype=np.int8)
        self.allowed[self.np_random.integers(4)] = 1
        return {**obs, "action_mask": self.allowed}


class MaskInInfo(gym.Wrapper):
    """A wrapper that forbids the actions whose step has the wrong parity."""

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.steps = 0
        return obs, {**info, "action_mask": self._mask()}

    def step(self, action):
        assert self._mask()[action]
        self.steps += 1
        *result, info = self.env.step(action)
        return (*result, {**info, "action_mask": self._mask()})

    def _mask(self):
        return np.array([self.steps % 3 != 0, self.steps % 3 != 1])


def masked_cartpole():
    return MaskInInfo(gym.make("CartPole-v1"))


# Name -> algorithm, environment and options. An agent that normalizes observations is trained for a moment, because
# otherwise its normalizers change nothing.
AGENTS = {
    "ppo": ("ppo", "CartPole-v1", {"normalize_obs": True, "target_steps": 64}),
    "ppo-continuous": ("ppo", "Pendulum-v1", {}),
    "ppo-images": ("ppo", Pictures, {}),
    "ppo-gru": ("ppo", "CartPole-v1", {"recurrent_net": "gru", "num_mini_batch": 1, **MEMORY}),
    "ppo-lstm": ("ppo", "Pendulum-v1", {"recurrent_net": "lstm", "normalize_obs": True, "target_steps": 64,
                                        "num_mini_batch": 1, **MEMORY}),
    "ppo-mixed": ("ppo", Mixed, {"normalize_obs": True, "target_steps": 64}),
    "ppo-masked": ("ppo", masked_cartpole, {}),
    "ppo-masked-gru": ("ppo", masked_cartpole, {"recurrent_net": "gru", "num_mini_batch": 1, **MEMORY}),
    "sac": ("sac", "Pendulum-v1", {}),
    "sac-gru": ("sac", "Pendulum-v1", {"recurrent_net": "gru", "normalize_obs": True, **MEMORY}),
    "dqn": ("dqn", "CartPole-v1", {"dueling": True, "test_epsilon": 0.5}),
    "c51": ("c51", "CartPole-v1", {"dueling": True, "num_atoms": 5}),
    "r2d2": ("r2d2", "CartPole-v1", {"recurrent_net": "gru", "prev_action_reward": True, **MEMORY}),
    "independent": ("ppo", "mpe2.simple_speaker_listener_v4", {"policies": "independent"}),
}


def make_env(name):
    """Return the environment of a single agent."""
    env = AGENTS[name][1]
    return gym.make(env) if isinstance(env, str) else env()


@functools.cache
def agent_of(name):
    """Return the agent called `name`; each is built once, so tests must not change it.

    The weights are changed at random until actions depend on the observation, which those of a new network hardly do.
    """
    algorithm, env, options = AGENTS[name]
    made = prl.train(algorithm, env, **{"target_steps": 0, **TINY, **options})
    if name == "independent":
        return made
    seen = observations(make_env(name))
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        state = {
            key: value + 0.3 * torch.randn(value.shape, generator=generator) * (key in ("all", "q", "pi"))
            for key, value in made.acting_state.items()}
        agent = prl.TrainedAgent(agent=made.agent, acting_state=state, seed=3)
        masks = {"mask": [True] * 2} if agent.policy.spaces.has_mask_in_info else {}
        actions = [agent.act(obs, **masks) for obs in seen]
        actions = [action[0] if isinstance(action, tuple) else action for action in actions]
        if max(map(actions.count, actions)) < 0.75 * len(actions):
            return agent
    raise AssertionError(f"the actions of {name} do not depend on the observation")


def observations(env):
    """Return the observations of some steps with random actions."""
    found = []
    for seed in range(5):
        obs, info = env.reset(seed=seed)
        env.action_space.seed(seed)
        for _ in range(6):
            found.append(obs)
            mask = obs.get("action_mask") if isinstance(obs, dict) else info.get("action_mask")
            action = env.action_space.sample(None if mask is None else mask.astype(np.int8))
            obs, *_, info = env.step(action)
    return found
