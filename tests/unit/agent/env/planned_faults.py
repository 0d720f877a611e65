"""Environments with planned faults: a plan lists the environment, the method and the call number of each fault."""

from __future__ import annotations

import functools
import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from pytorchrl.agent.env import VecEnv

MODES = pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
NUM_ENVS = 4


class Walk(gym.Env):
    """Environment with a random walk that ends at random; all observations share one array."""

    def __init__(self, kind="box"):
        self._kind = kind
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = box if kind in ("box", "info_mask") else spaces.Dict({
            "place": box, "count": spaces.Discrete(100), "action_mask": spaces.MultiBinary(3)})
        self.action_space = spaces.Discrete(3)
        self._place, self._t = np.zeros(2, np.float32), 0

    def _look(self):
        mask = np.zeros(3, np.int8)
        mask[self._t % 3] = 1
        info = {"lives": 3 - self._t // 2, **({"action_mask": mask} if self._kind == "info_mask" else {})}
        return (self._place if self._kind in ("box", "info_mask") else {
            "place": self._place, "count": self._t, "action_mask": mask}), info

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._t = 0
        self._place[:] = self._random.normal(size=2)
        return self._look()

    def step(self, action):
        self._t += 1
        self._place += self._random.normal(size=2) + float(action)
        observation, info = self._look()
        end = self._random.random()
        return observation, float(self._place[0]), end < 0.1, end > 0.95, info


class Planned(gym.Wrapper):
    """Wrapper that raises in the calls that `plan` lists as (number of the environment, method, number of the call).

    Environments are numbered in the order of their creation. The factory probes environment 0, and environments 1 to E
    are the first environments of the vector. The entry ("step", "always") makes every call of `step` raise, except in
    environment 0. Each call appends (number of the environment, method) to `log`.
    """

    def __init__(self, env, plan, log, copies, error=lambda: RuntimeError("planned")):
        super().__init__(env)
        self._plan, self._log, self._error, self._copy = plan, log, error, next(copies)
        self._calls = {"step": itertools.count(), "reset": itertools.count(), "close": itertools.count()}
        self._maybe_raise("constructor", 0)

    def _maybe_raise(self, call, number):
        self._log.append((self._copy, call))
        if (self._copy, call, number) in self._plan or (self._copy > 0 and (call, "always") in self._plan):
            self._place_is_spoilt()
            raise self._error()

    def _place_is_spoilt(self):
        if isinstance(self.unwrapped, Walk):
            self.unwrapped._place[:] = 1e6  # simulate a call that changes the observation before it raises

    def reset(self, **kwargs):
        self._maybe_raise("reset", next(self._calls["reset"]))
        return self.env.reset(**kwargs)

    def step(self, action):
        self._maybe_raise("step", next(self._calls["step"]))
        return self.env.step(action)

    def close(self):
        self._maybe_raise("close", next(self._calls["close"]))
        self.env.close()


def planned(plan=(), env_fn=Walk, env_kwargs=None, num_envs=NUM_ENVS, error=lambda: RuntimeError("planned"), **options):
    """Return a vector environment with planned faults, and the log of all calls of its environments.

    By default, environments are restarted even in their first episodes.
    """
    options = {"on_env_error": "restart", **options}
    log = []
    wrap = functools.partial(Planned, plan=set(plan), log=log, copies=itertools.count(), error=error)
    factory = VecEnv.create_factory(env_fn, env_kwargs, num_envs, wrappers=(wrap,), backend="sync", **options)
    return factory(seed=5), log


def play(env, num_steps):
    """Play random actions; return (obs, mask, None) for the reset, and (obs, mask, step) for each step.

    Observations and masks are copies.
    """
    obs, mask = env.reset()
    rows = [({name: leaf.copy() for name, leaf in obs.items()}, None if mask is None else mask.copy(), None)]
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        step = env.step(rng.integers(0, 2, env.num_envs))
        rows.append(({name: leaf.copy() for name, leaf in step.obs.items()},
                     None if step.mask is None else step.mask.copy(), step))
    return rows
