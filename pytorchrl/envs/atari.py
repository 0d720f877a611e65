"""Atari games (extra `atari`), through ale-py's native vector environment.

A step is 4 frames, and its image is the maximum of the last two frames. An observation is a stack of the last 4 images,
which are gray and have 84 x 84 pixels. A game starts with up to 30 no-op frames, and with the action FIRE if the game
waits for it. A game is truncated after 27,000 steps.

In training, each reward is replaced by its sign, and each lost life is a termination, after which the game continues.
In tests, rewards are raw, and lost lives are not terminations. Reported returns are always raw scores of complete
games.

Options that need single environments, such as `wrappers`, need `backend="sync"` or `"async"`. The games are then
preprocessed in the same way by Gymnasium's wrappers, which is slower.

The ids of papers, such as "BreakoutNoFrameskip-v4", stand for the same environments as "ALE/Breakout-v5" here. The
older ids "Breakout-v0" and "Breakout-v4" skip frames at random, so they are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import gymnasium as gym
import numpy as np

from pytorchrl.agent.env.aliases import AnyEnv, AnyWrapper, EnvKwargs, Info, ResetResult
from pytorchrl.agent.env.single import OLD_ID
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.envs.suites import VEC_ENV_SIZE, suite
from pytorchrl.errors import ConfigError
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


def _has(env_id: str) -> bool:
    """Return whether an id is one of ALE, or an older id of a game that ALE has; nothing is imported."""
    old = OLD_ID.fullmatch(env_id)
    if old is None or env_id.startswith("ALE/"):
        return old is None and env_id.startswith("ALE/")
    registered = gym.registry.get(env_id)
    if registered is not None:
        return "ale_py" in str(registered.entry_point)
    return old["frames"] is not None or f"ALE/{old['game']}-v5" in gym.registry


def _id_of_ale(env_id: str) -> str:
    """Return the id of ALE for an older id.

    Raises:
        ConfigError: The older id stands for other environments.
    """
    module, _, name = env_id.rpartition(":")
    old = OLD_ID.fullmatch(name)
    if old is None:
        return env_id
    wanted = f"ALE/{old['game']}-v5"
    if (old["frames"], old["version"]) not in (("NoFrameskip", "4"), (None, "5")):
        sticky = " with sticky=True" if old["version"] == "0" else ""
        raise ConfigError(f"{env_id!r} is an old id of Atari, whose environments differ from those of papers; did you "
                          f"mean {wanted!r}{sticky}? To train on it nevertheless, pass a function, such as lambda: "
                          f"gymnasium.make({name!r})")
    return f"{module}:{wanted}" if module else wanted


@suite("atari", has=_has)
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
        env_id: The id, such as "ALE/Pong-v5" or "PongNoFrameskip-v4"; only the name of the game is used.
        vec_env_size: Number of games stepped together.
        sticky: Whether each frame repeats the previous action with probability 0.25, in training and in tests.
        end_on_life_loss: Whether a lost life is a termination in training.
        reward_transform: Transformation of the rewards that learners receive in training.
        env_kwargs: Further arguments of `ale_py.AtariVectorEnv` or, with `backend="sync"`, of the game, such as
            `{"full_action_space": True}`.
        options: Further fields of `VecEnv.Options`.

    Raises:
        ConfigError: The game is unknown, ale-py is not installed, or the id stands for other environments.
    """
    env_id = _id_of_ale(env_id) if isinstance(env_id, str) else env_id
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
