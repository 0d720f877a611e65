"""Finds the suite of an id."""

from __future__ import annotations

from typing import Any

from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.atari import atari_factory


def make_factory(env_id: Any, vec_env_size: int = 8, **options: Any) -> EnvFactory:
    """The factory for an id, prepared as its suite needs: `ALE/...` ids get Atari's preprocessing.

    Args:
        env_id: A Gymnasium id, or anything else that `VecEnv.create_factory` takes.
        vec_env_size: Number of environments.
        options: Further arguments of the suite's function or of `VecEnv.create_factory`.

    Raises:
        ConfigError: An unknown id (names the nearest), a wrong option, or a missing package (names the extra).
    """
    name = env_id.id if isinstance(env_id, EnvSpec) else env_id
    if isinstance(name, str) and name.split(":")[-1].startswith("ALE/"):
        return atari_factory(env_id, vec_env_size, **options)
    return VecEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)
