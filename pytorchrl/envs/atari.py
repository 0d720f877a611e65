"""Atari games (extra `atari`), through ale-py's native vector environment.

Preprocessing is the usual one: 84 x 84 grey pictures, of every 4 frames the maximum of the last two, 4 of them stacked;
up to 30 idle frames at the start of a game, FIRE pressed where a game waits for it. Games are cut after 27 000 steps.
Training and testing differ: learners see the sign of rewards and a termination at each lost life (the game goes on),
tests see neither. Returns reported are always raw scores of whole games.
"""

from __future__ import annotations

from typing import Any

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import suite

_STICKY_PROBABILITY = 0.25  # Machado et al. 2018, section 5
_NOOP_MAX = 30


@suite("atari", has=lambda env_id: env_id.startswith("ALE/"))
def atari_factory(
    env_id: str,
    vec_env_size: int = 8,
    *,
    sticky: bool = False,
    end_on_life_loss: bool = True,
    reward_transform: str | float | None = "sign",
    env_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> EnvFactory:
    """Environments of one game; called with `mode="test"` the factory builds them for testing.

    Args:
        env_id: "ALE/Pong-v5"; of the id only the game counts.
        vec_env_size: Games played together.
        sticky: Whether each frame repeats the last action with probability 0.25, in training and tests.
        end_on_life_loss: Whether a lost life is a termination in training.
        reward_transform: What learners see of rewards in training.
        env_kwargs: Further settings of `ale_py.AtariVectorEnv`, e.g. `{"full_action_space": True}`.
        options: Further fields of `VecEnv.Options`.

    Raises:
        ConfigError: An unknown game, or ale-py is not installed.
    """
    kwargs: dict[str, Any] = {
        "repeat_action_probability": _STICKY_PROBABILITY if sticky else 0.0, "noop_max": _NOOP_MAX,
        "use_fire_reset": True, "reward_clipping": False, "episodic_life": False, "life_loss_info": False,
    }
    if options.get("backend") == "envpool":  # other names, and a lost life is always in its info
        kwargs["reward_clip"] = kwargs.pop("reward_clipping")
        del kwargs["life_loss_info"]
    return VecEnv.create_factory(
        env_id, kwargs | (env_kwargs or {}), vec_env_size, end_on_life_loss=end_on_life_loss,
        reward_transform=reward_transform, **({"backend": "vector"} | options))
