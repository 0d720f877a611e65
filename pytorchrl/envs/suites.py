"""Register suites of environments: which ids belong to a suite, and the function that makes their factories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.env.vec_env import EnvFactory

F = TypeVar("F", bound=Callable[..., EnvFactory])

DEFAULT = "classic"
"""The suite whose presets hold for environments of no suite."""


@dataclass(frozen=True)
class Suite:
    """A suite of environments.

    Attributes:
        name: The name under which presets are registered.
        has: Whether an id, without a leading `module:`, belongs to the suite.
        make_factory: Makes the factory; called with the id, the number of environments and the user's options.
    """

    name: str
    has: Callable[[str], bool]
    make_factory: Callable[..., EnvFactory]


_by_name: dict[str, Suite] = {}


def suite(name: str, *, has: Callable[[str], bool]) -> Callable[[F], F]:
    """Register the decorated function as the one that makes the environments of a suite.

        @suite("mazes", has=lambda env_id: env_id.startswith("mazes/"))
        def maze_factory(env_id, vec_env_size=8, **options):
            return VecEnv.create_factory(make_maze, {"env_id": env_id}, vec_env_size, **options)

    Args:
        name: Name of the suite; a suite that was registered under this name before is replaced.
        has: Whether an id, without a leading `module:`, belongs to the suite. If several suites have an id, the one that was
            registered last takes it.
    """
    def register(make_factory: F) -> F:
        _by_name.pop(name, None)
        _by_name[name] = Suite(name, has, make_factory)
        return make_factory

    return register


def suite_of(env: object) -> Suite | None:
    """Return the suite of an environment: of an id or of Gymnasium's `EnvSpec`; None for any other object, and if no suite has the id."""
    env_id = env.id if isinstance(env, EnvSpec) else env
    if not isinstance(env_id, str):
        return None
    own_id = env_id.split(":")[-1]
    return next((suite for suite in reversed(_by_name.values()) if suite.has(own_id)), None)


def is_made_by(package: str) -> Callable[[str], bool]:
    """Return a function that says whether Gymnasium makes an id from a module whose path contains `package`."""
    def has(env_id: str) -> bool:
        spec = gym.registry.get(env_id)
        return spec is not None and package in str(spec.entry_point)

    return has
