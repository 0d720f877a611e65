"""Environments of Box2D (extra `box2d`): LunarLander, BipedalWalker."""

from __future__ import annotations

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import VEC_ENV_SIZE, is_made_by, suite
from pytorchrl.support.untyped import OptionValue


def _has(env_id: str) -> bool:
    """Return whether an id belongs to the suite: not CarRacing, because options for vectors do not suit its images."""
    return is_made_by("box2d")(env_id) and not env_id.startswith("CarRacing")


@suite("box2d", has=_has)
def box2d_factory(env_id: str, vec_env_size: int = VEC_ENV_SIZE, **options: OptionValue) -> EnvFactory:
    """Return a factory of environments of the Box2D suite.

    Args:
        env_id: The id, such as "LunarLander-v3".
        vec_env_size: Number of environments.
        options: Further arguments of `VecEnv.create_factory`.

    Raises:
        ConfigError: The id is unknown, an option is invalid, or Box2D is not installed.
    """
    return VecEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)
