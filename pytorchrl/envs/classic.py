"""Small environments: classic control (CartPole, Pendulum), toy text (FrozenLake), and those of this package.

No extra is needed. The ids of this package are registered here.
"""

from __future__ import annotations

import gymnasium as gym

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import VEC_ENV_SIZE, is_made_by, suite
from pytorchrl.support.untyped import OptionValue

_is_made_by_gymnasium = is_made_by(*(f"gymnasium.envs.{name}" for name in ("classic_control", "toy_text", "phys2d",
                                                                          "tabular")))

# Name of an environment written in torch -> module of `pytorchrl.envs.tensors`, time limit. Versions and time limits
# are those of Gymnasium.
_IN_TORCH: dict[str, tuple[str, int | None]] = {
    "CartPole-v1": ("classic", 500), "Pendulum-v1": ("classic", 200), "Acrobot-v1": ("classic", 500),
    "MountainCar-v0": ("classic", 200), "MountainCarContinuous-v0": ("classic", 999), "PointMaze-v0": ("maze", 100),
    "Recall-v0": ("memory", None)}

gym.register("pytorchrl/Recall-v0", entry_point="pytorchrl.envs.memory:Recall")
for _name, (_module, _limit) in _IN_TORCH.items():
    gym.register(f"pytorchrl/Torch{_name}", max_episode_steps=_limit,
                 vector_entry_point=f"pytorchrl.envs.tensors.{_module}:Torch{_name.partition('-')[0]}")


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
