"""Atari games (extra `atari`), through ale-py's native vector environment.

A step is 4 frames, and its image is the maximum of the last two frames. An observation is a stack of the last 4 images,
which are gray and have 84 x 84 pixels. A game starts with up to 30 no-op frames, and with the action FIRE if the game
waits for it. A game is truncated after 27,000 steps.

In training, each reward is replaced by its sign, and each lost life is a termination, after which the game continues.
In tests, rewards are raw, and lost lives are not terminations. Reported returns are always raw scores of complete
games.

Options that need single environments, such as `wrappers`, need `backend="sync"` or `"async"`. The games are then
preprocessed in the same way by Gymnasium's wrappers, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable

import gymnasium as gym
import numpy as np

from pytorchrl.agent.env.aliases import AnyEnv, AnyWrapper, EnvKwargs, Info, ResetResult
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import VEC_ENV_SIZE, suite
from pytorchrl.support.untyped import OptionValue

_STICKY_PROBABILITY = 0.25  # Machado et al. 2018, section 5
_NOOP_MAX = 30
_STACK, _MOST_STEPS = 4, 27_000


class _FireReset(AnyWrapper):
    """Wrapper that begins a game with the action FIRE if the game waits for it."""

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        observation, info = self.env.reset(seed=seed, options=options)
        if self.env.get_wrapper_attr("get_action_meanings")()[1] == "FIRE":
            observation, _, terminated, truncated, info = self.env.step(1)
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
        return observation, info


def preprocessed(env: AnyEnv) -> AnyEnv:
    """Return a game whose steps and images are those of ale-py's vector environment, without a stack of images."""
    return _FireReset(gym.wrappers.AtariPreprocessing(env, noop_max=_NOOP_MAX, grayscale_newaxis=True))


@suite("atari", has=lambda env_id: env_id.startswith("ALE/"))
def atari_factory(
    env_id: str,
    vec_env_size: int = VEC_ENV_SIZE,
    *,
    sticky: bool = False,
    end_on_life_loss: bool = True,
    reward_transform: str | float | Callable[[np.ndarray], np.ndarray] | None = "sign",
    env_kwargs: EnvKwargs | None = None,
    **options: OptionValue,
) -> EnvFactory:
    """Return a factory of environments of one game.

    Args:
        env_id: The id, such as "ALE/Pong-v5"; only the name of the game is used.
        vec_env_size: Number of games stepped together.
        sticky: Whether each frame repeats the previous action with probability 0.25, in training and in tests.
        end_on_life_loss: Whether a lost life is a termination in training.
        reward_transform: Transformation of the rewards that learners receive in training.
        env_kwargs: Further arguments of `ale_py.AtariVectorEnv` or, with `backend="sync"`, of the game, such as
            `{"full_action_space": True}`.
        options: Further fields of `VecEnv.Options`.

    Raises:
        ConfigError: The game is unknown, or ale-py is not installed.
    """
    sticking = _STICKY_PROBABILITY if sticky else 0.0
    if options.get("backend") in ("sync", "async"):
        single: EnvKwargs = {"frameskip": 1, "repeat_action_probability": sticking}
        wrappers = (preprocessed, *(options.pop("wrappers", None) or ()))
        return VecEnv.create_factory(
            env_id, single | (env_kwargs or {}), vec_env_size, end_on_life_loss=end_on_life_loss,
            reward_transform=reward_transform, wrappers=wrappers,
            **({"frame_stack": _STACK, "max_episode_steps": _MOST_STEPS} | options))
    kwargs: EnvKwargs = {
        "repeat_action_probability": sticking, "noop_max": _NOOP_MAX,
        "use_fire_reset": True, "reward_clipping": False, "episodic_life": False, "life_loss_info": False,
    }
    if options.get("backend") == "envpool":  # EnvPool has another name for reward_clipping, and no life_loss_info
        kwargs["reward_clip"] = kwargs.pop("reward_clipping")
        del kwargs["life_loss_info"]
    return VecEnv.create_factory(
        env_id, kwargs | (env_kwargs or {}), vec_env_size, end_on_life_loss=end_on_life_loss,
        reward_transform=reward_transform, **({"backend": "vector"} | options))
