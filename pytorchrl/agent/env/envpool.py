"""EnvPool (extra `envpool`) as a Gymnasium vector environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from pytorchrl.agent.env.aliases import AnySpace, AnyVectorEnv, EnvFn, EnvKwargs, Info, Observation
from pytorchrl.errors import ConfigError
from pytorchrl.support.code import import_extra

if TYPE_CHECKING:
    from pytorchrl.agent.env.single import Blueprint


class EnvPoolVector(AnyVectorEnv):
    """Vector environment that EnvPool steps in its own threads.

    The step after an episode's end resets the environment. `reset` ignores seeds, because the constructor sets them.

    If an episode terminates in the step in which it reaches its time limit, EnvPool 1.2.5 reports only a truncation.
    `backend="sync"` reports a termination in this case.

    Args:
        blueprint: The task, the number of environments, their seeds and the number of threads.

    Attributes:
        pool: The EnvPool object that contains the environments.

    Raises:
        ConfigError: EnvPool is not installed, does not have the task, or rejects an option.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP

    def __init__(self, blueprint: Blueprint) -> None:
        if blueprint.autoreset == "same_step":
            raise ConfigError("EnvPool supports only autoreset='next_step', got 'same_step'; use another backend")
        task = _task_id(blueprint.env_fn)
        kwargs: EnvKwargs = dict(blueprint.env_kwargs)
        if blueprint.max_episode_steps is not None:
            kwargs["max_episode_steps"] = blueprint.max_episode_steps
        envpool = import_extra("envpool", "envpool", "backend='envpool'")
        known = envpool.list_all_envs()
        if task not in known:
            raise ConfigError(f"EnvPool has no task {task!r}; see envpool.list_all_envs()")
        try:
            self.pool = envpool.make(
                task, env_type="gymnasium", num_envs=blueprint.num_envs, seed=blueprint.seeds,
                num_threads=blueprint.num_threads, **kwargs)
        except (AssertionError, KeyError, TypeError, ValueError) as failure:
            raise ConfigError(f"EnvPool rejects {kwargs} for {task!r}: {failure}") from failure
        self.num_envs = blueprint.num_envs
        # The pool's spaces describe a single environment.
        self.single_observation_space: AnySpace = self.pool.observation_space
        self.single_action_space: AnySpace = self.pool.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: object = None, options: Info | None = None) -> tuple[Observation, Info]:
        """Start a new episode in all environments."""
        observations, info = self.pool.reset()
        return observations, _flat(info)

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step all environments."""
        observations, reward, terminated, truncated, info = self.pool.step(actions)
        return observations, reward, terminated.astype(np.bool_), truncated.astype(np.bool_), _flat(info)

    def close_extras(self, **kwargs: object) -> None:
        """Stop the threads of the pool."""
        self.pool.close()


def _flat(info: Info) -> Info:
    """Return the entries of `info` that are arrays."""
    return {key: value for key, value in info.items() if isinstance(value, np.ndarray)}


def _task_id(env_fn: EnvFn) -> str:
    name = env_fn.id if isinstance(env_fn, EnvSpec) else env_fn
    if not isinstance(name, str):
        raise ConfigError(f"backend='envpool' needs the id of a task of EnvPool, got {env_fn!r}")
    return name.removeprefix("ALE/")


