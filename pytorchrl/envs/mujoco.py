"""Environments of MuJoCo v5 (extra `mujoco`): HalfCheetah, Hopper, Ant and others.

Actors clip actions to the bounds of the action space. Most environments have the bounds -1 and 1; exceptions include
Humanoid, InvertedPendulum and Pusher. Observations are float32. Set MUJOCO_GL=egl to render without a screen.
"""

from __future__ import annotations

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import VEC_ENV_SIZE, is_made_by, suite
from pytorchrl.support.untyped import OptionValue


@suite("mujoco", has=is_made_by("mujoco"))
def mujoco_factory(env_id: str, vec_env_size: int = VEC_ENV_SIZE, **options: OptionValue) -> EnvFactory:
    """Return a factory of environments of the MuJoCo suite.

    Args:
        env_id: The id, such as "HalfCheetah-v5".
        vec_env_size: Number of environments.
        options: Further arguments of `VecEnv.create_factory`.

    Raises:
        ConfigError: The id is unknown, an option is invalid, or MuJoCo is not installed.
    """
    return VecEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)
