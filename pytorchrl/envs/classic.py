"""Small environments: classic control (CartPole, Pendulum), toy text (FrozenLake) and Recall. No extra is needed."""

from __future__ import annotations

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import VEC_ENV_SIZE, is_made_by, suite
from pytorchrl.support.untyped import OptionValue

_is_made_by_gymnasium = is_made_by(*(f"gymnasium.envs.{name}" for name in ("classic_control", "toy_text", "phys2d",
                                                                          "tabular")))


# Ids of this package are registered only when they are first used.
@suite("classic", has=lambda env_id: env_id.startswith("pytorchrl/") or _is_made_by_gymnasium(env_id))
def classic_factory(env_id: str, vec_env_size: int = VEC_ENV_SIZE, **options: OptionValue) -> EnvFactory:
    """Return a factory of environments of classic control or toy text.

    Args:
        env_id: The id, such as "CartPole-v1".
        vec_env_size: Number of environments.
        options: Further arguments of `VecEnv.create_factory`.

    Raises:
        ConfigError: The id is unknown, or an option is invalid.
    """
    return VecEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)
