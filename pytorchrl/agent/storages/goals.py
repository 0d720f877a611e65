"""Rewards of environments with goals, computed outside of the environments; hindsight experience replay uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np

from pytorchrl.agent.env.common import reward_function
from pytorchrl.agent.env.guard import describe
from pytorchrl.agent.storages.hindsight import ACHIEVED, DESIRED, GoalFunction, values_of
from pytorchrl.errors import ConfigError, Problem, PyTorchRLError
from pytorchrl.support.problems import problems_in
from pytorchrl.support.tracebacks import USER_ERRORS

if TYPE_CHECKING:
    from pytorchrl.agent.env.aliases import AnyVectorEnv
    from pytorchrl.agent.env.vec_env import EnvFactory
    from pytorchrl.agent.factories import StorageFactory


class EnvReward:
    """The `compute_reward` of an environment, followed by the option `reward_transform`.

    The method belongs to an environment that is built in the first call, in the process of the caller, and closed.

    Args:
        envs: Factory of the environments.
    """

    def __init__(self, envs: EnvFactory) -> None:
        self._envs = envs
        self._function: GoalFunction | None = None

    def __call__(self, achieved: np.ndarray, desired: np.ndarray, info: Mapping[str, object]) -> np.ndarray:
        """Return the rewards (N,) for achieved goals (N, ...) and desired goals (N, ...).

        Raises:
            ConfigError: The environment has no `compute_reward`.
        """
        if self._function is None:
            self._function = self._find()
        transform = reward_function(self._envs.options.reward_transform)
        reward = values_of(self._function, achieved, desired, "compute_reward")
        return reward if transform is None else transform(reward)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without the method, which other processes find again."""
        return {**self.__dict__, "_function": None}

    def _find(self) -> GoalFunction:
        options = self._envs.options
        envs = self._envs.with_options(
            vec_env_size=options.vec_env_size if self._envs.has_own_size else 1, log_dir=None,
            backend="sync" if options.backend == "async" else options.backend)(seed=0)
        try:
            found = _method(envs.vector)
        finally:
            envs.close()
        if not callable(found):
            raise ConfigError("the environment has no method compute_reward(achieved_goal, desired_goal, info), with "
                              "which relabel computes rewards; define it, or give goal_reward")
        return found


def _method(vector: AnyVectorEnv) -> object:
    single = getattr(vector.unwrapped, "envs", None)
    if single:
        env: gym.Env[object, object] = single[0]
        return env.get_wrapper_attr("compute_reward") if env.has_wrapper_attr("compute_reward") else None
    return getattr(vector.unwrapped, "compute_reward", None)


def relabels(storage: StorageFactory) -> bool:
    """Return whether a storage, or that of any policy, replaces goals."""
    own = getattr(storage.options, "policies", None) or {"": storage}
    return any(getattr(factory.options, "relabel", None) is not None for factory in own.values())


def with_reward(storage: StorageFactory, envs: EnvFactory) -> StorageFactory:
    """Return a storage's factory that has a function of rewards if it replaces goals."""
    if not relabels(storage) or storage.options.goal_reward is not None:
        return storage
    return storage.with_options(goal_reward=EnvReward(envs))


def goal_problems(storage: StorageFactory, envs: EnvFactory) -> Iterator[Problem]:
    """Yield a problem if a storage replaces goals, but the environments have none or their reward is unknown."""
    if not relabels(storage):
        return
    if hasattr(storage.options, "policies"):
        yield Problem("relabel is for a single policy", "leave relabel out", ("relabel",))
        return
    leaves = envs.observation_space
    achieved, desired = leaves.get(ACHIEVED), leaves.get(DESIRED)
    if achieved is None or desired is None or (achieved.shape, achieved.dtype) != (desired.shape, desired.dtype):
        yield Problem(f"relabel={storage.options.relabel!r} needs observations that are a Dict with {ACHIEVED!r} and "
                      f"{DESIRED!r}, two equal spaces of arrays, got {dict(leaves)}",
                      "give an environment with goals, or leave relabel out", ("relabel",))
    else:
        yield from problems_in(_try, with_reward(storage, envs), np.zeros((2, *(desired.shape or ())), desired.dtype))


def _try(storage: StorageFactory, goals: np.ndarray) -> None:
    """Call the functions of a storage with two goals (2, ...).

    Raises:
        ConfigError: A function raises an exception or returns wrong values.
    """
    for name in ("goal_reward", "goal_terminated"):
        function = getattr(storage.options, name)
        if function is None:
            continue
        try:
            values_of(function, goals, goals, name)
        except PyTorchRLError as failure:
            raise ConfigError(str(failure)) from failure
        except USER_ERRORS as failure:
            raise ConfigError(
                f"{name} raised for achieved goals and desired goals of shape {goals.shape} and an empty info: "
                f"{describe(failure)}; give a function of goals alone, because replay stores no info") from failure
