"""Register suites of environments. A suite has two functions: one recognizes its ids, the other returns factories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.env.tokens import TokenTask
from pytorchrl.agent.env.vec_env import EnvFactory

F = TypeVar("F", bound=Callable[..., EnvFactory])

VEC_ENV_SIZE = 8
"""Number of environments that the functions of suites build if the caller leaves `vec_env_size` out."""


@dataclass(frozen=True)
class Suite:
    """Suite of environments.

    Attributes:
        name: Name of the suite; presets of options for its environments are registered under this name.
        has: Function that returns whether an id, without a leading `module:`, belongs to the suite.
        make_factory: Function that returns the factory for an id, a number of environments and the user's options.
    """

    name: str
    has: Callable[[str], bool]
    make_factory: Callable[..., EnvFactory]


_by_name: dict[str, Suite] = {}


def suite(name: str, *, has: Callable[[str], bool]) -> Callable[[F], F]:
    """Register the decorated function, which returns factories of the environments of a suite.

        @suite("mazes", has=lambda env_id: env_id.startswith("mazes/"))
        def maze_factory(env_id, vec_env_size=8, **options):
            return VecEnv.create_factory(make_maze, {"env_id": env_id}, vec_env_size, **options)

    Args:
        name: Name of the suite; an earlier suite of that name is replaced.
        has: Function that returns whether an id, without a leading `module:`, belongs to the suite. If an id
            belongs to several suites, the suite registered last is used.
    """
    def register(make_factory: F) -> F:
        _by_name.pop(name, None)
        _by_name[name] = Suite(name, has, make_factory)
        return make_factory

    return register


def suite_of(env: object) -> Suite | None:
    """Return the suite of an id or of Gymnasium's `EnvSpec`; None for ids without a suite, and for other objects."""
    env_id = env.id if isinstance(env, EnvSpec) else env
    if isinstance(env, type) and issubclass(env, TokenTask):
        return _by_name.get("tokens")
    if not isinstance(env_id, str):
        return None
    own_id = env_id.split(":")[-1]
    return next((suite for suite in reversed(_by_name.values()) if suite.has(own_id)), None)


def is_made_by(*packages: str) -> Callable[[str], bool]:
    """Return a function for `Suite.has`: whether the entry point of an id contains the name of one of the packages."""
    def has(env_id: str) -> bool:
        spec = gym.registry.get(env_id)
        return spec is not None and any(package in str(spec.entry_point) for package in packages)

    return has
