"""Step functional environments of JAX, which are written for one environment, as a vector of environments.

| form | methods | examples |
|---|---|---|
| gymnax | `reset(key, params)`, `step(key, state, action, params)` | gymnax |
| Brax | `reset(rng) -> State`, `step(state, action) -> State` | Brax, MuJoCo Playground |

The environments are stepped by one compiled function. It resets those whose episode ended, and returns the last
observations of these episodes, so values after a time limit are exact.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import Action, AnySpace, EnvObject, Info, Observation
from pytorchrl.errors import ConfigError, EnvError

_NO_LIMIT = 2**30  # steps


class _Outcome(NamedTuple):
    """The result of a step of one environment; arrays of JAX have the interface of those of NumPy."""

    state: object
    obs: Observation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def is_functional(env: object) -> bool:
    """Return whether an object, or the first item of a pair as gymnax.make returns it, is an environment of JAX."""
    reset = getattr(_parts(env)[0], "reset", None)
    if inspect.isclass(env) or not callable(reset) or not callable(getattr(_parts(env)[0], "step", None)):
        return False
    try:
        names = list(inspect.signature(reset).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] in (["key"], ["rng"])


class FunctionalVector:
    """N copies of a functional environment, with the methods that `ObjectVector` expects.

    Args:
        env: The environment, or a pair of it and its parameters.
        num_envs: N.
        max_episode_steps: Number of steps after which an episode is cut off; None: only by the environment itself.

    Raises:
        ConfigError: The environment resets itself, so that its last observations are lost.
    """

    def __init__(self, env: EnvObject, num_envs: int, max_episode_steps: int | None) -> None:
        self._jax = importlib.import_module("jax")
        self._env, self._params = _parts(env)
        self.num_envs = num_envs
        self._limit = _NO_LIMIT if max_episode_steps is None else max_episode_steps
        if hasattr(self._env, "action_size"):
            self._begin, self._advance = self._env.reset, self._advance_brax
        else:
            if self._params is None:
                self._params = getattr(self._env, "default_params", None)
            self._begin, self._advance = self._begin_gymnax, self._advance_gymnax
        self.single_action_space = self._action_space()
        self._reset_all = self._jax.jit(self._jax.vmap(self._begin_counted))
        self._step_all = self._jax.jit(self._stepped)
        self._key = self._jax.random.key(0)
        self._state: object = None

    def reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        """Start new episodes in all environments."""
        if seed is not None:
            self._key = self._jax.random.key(seed)
        self._key, key = self._jax.random.split(self._key)
        self._state, obs = self._reset_all(self._jax.random.split(key, self.num_envs))
        return obs, {}

    def step(self, actions: Action) -> tuple[Observation, Observation, Observation, Observation, Info]:
        """Step all environments, and reset those whose episode ended."""
        self._key, self._state, obs, reward, terminated, truncated, final = self._step_all(
            self._key, self._state, actions)
        return obs, reward, terminated, truncated, {"final_obs": final}

    def _begin_counted(self, key: object) -> tuple[tuple[object, int], Observation]:
        """Start an episode; return the state, with the number of its steps, and the first observation."""
        begun = self._begin(key)
        if not hasattr(self._env, "action_size"):
            obs, state = begun
            return (state, 0), self._floats(obs)
        if any(name.endswith("first_obs") for name in begun.info):
            raise ConfigError(
                f"{type(self._env).__name__} resets itself, so the last observations of its episodes are lost; give "
                "the environment without this wrapper (in Brax, auto_reset=False), and set max_episode_steps")
        return (begun, 0), self._floats(begun.obs)

    def _begin_gymnax(self, key: object) -> object:
        return getattr(self._env, "reset_env", self._env.reset)(key, self._params)

    def _stepped(self, key: object, states: tuple[object, np.ndarray], actions: Action) -> tuple[object, ...]:
        jax, numpy = self._jax, self._jax.numpy
        key, of_step, of_reset = jax.random.split(key, 3)
        before, counts = states
        outcome = jax.vmap(self._advance)(jax.random.split(of_step, self.num_envs), before, actions)
        obs = self._floats(outcome.obs)
        counts = counts + 1
        terminated = outcome.terminated
        truncated = (outcome.truncated | (counts >= self._limit)) & ~terminated
        ended = terminated | truncated
        after = ((outcome.state, counts), obs)

        def restart(current: object) -> object:
            new = jax.vmap(self._begin_counted)(jax.random.split(of_reset, self.num_envs))
            return jax.tree.map(lambda first, later: numpy.where(
                ended.reshape(-1, *[1] * (later.ndim - 1)), first, later).astype(later.dtype), new, current)

        # A reset may take longer than a step, so nothing is reset unless an episode ended.
        states, first = jax.lax.cond(ended.any(), restart, lambda current: current, after)
        return key, states, first, outcome.reward.astype(np.float32), terminated, truncated, obs

    def _floats(self, obs: Observation) -> Observation:
        """Return observations with whole numbers and flags as floats, except for bytes, which are images."""
        return self._jax.tree.map(lambda leaf: leaf if leaf.dtype.kind == "f" or leaf.dtype == np.uint8 else (
            leaf.astype(np.float32)), obs)

    def _advance_brax(self, key: object, state: object, action: Action) -> _Outcome:
        after = self._env.step(state, action)
        done = after.done.astype(bool)
        cut = after.info["truncation"].astype(bool) if "truncation" in after.info else done & False
        return _Outcome(after, after.obs, after.reward, done & ~cut, cut)

    def _advance_gymnax(self, key: object, state: object, action: Action) -> _Outcome:
        step = getattr(self._env, "step_env", self._env.step)
        obs, after, reward, done, _ = step(key, state, action, self._params)
        done = self._jax.numpy.asarray(done).astype(bool)
        # The environment counts the end of its time as `done`, so it is asked whether the state is also an end without
        # a limit of time.
        unlimited = self._unlimited
        cut = done & False if unlimited is None else done & ~self._env.is_terminal(after, unlimited)
        return _Outcome(after, obs, self._jax.numpy.asarray(reward), done & ~cut, cut)

    @functools.cached_property
    def _unlimited(self) -> object:
        """The parameters without a limit of time; None if the environment does not state its limit."""
        limited = hasattr(self._params, "max_steps_in_episode") and hasattr(self._env, "is_terminal")
        return self._params.replace(max_steps_in_episode=_NO_LIMIT) if limited else None

    def _action_space(self) -> AnySpace:
        if hasattr(self._env, "action_size"):
            return spaces.Box(-1.0, 1.0, (int(self._env.action_size),), np.float32)
        space = self._env.action_space
        return converted_space(space(self._params) if callable(space) else space)


def _parts(env: EnvObject) -> tuple[EnvObject, EnvObject]:
    return env if isinstance(env, tuple) and len(env) == 2 else (env, None)


def converted_space(space: EnvObject) -> AnySpace:
    """Return a space of gymnax as a space of Gymnasium.

    Raises:
        EnvError: It is neither discrete nor continuous.
    """
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "low"):
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), space.shape) for bound in (space.low, space.high))
        return spaces.Box(low, high, tuple(space.shape), np.float32)
    raise EnvError(f"expected a discrete or continuous action space, got {space!r}; wrap the environment in one with "
                   "Discrete or Box actions")
