"""Show a trained agent in the window of its environment, or record videos with Gymnasium (extra `video`)."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import warnings
from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np

from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.aliases import Action, AnyEnv, AnyWrapper, EnvFn, EnvWrapper, Observation, ResetResult
from pytorchrl.agent.env.tokens import TokenEnv, TokenTask
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.errors import ConfigError, install_hint
from pytorchrl.support.tracebacks import brief_errors
from pytorchrl.support.untyped import Forwarded, OptionValue

if TYPE_CHECKING:
    from pytorchrl.agent.data import Evaluation
    from pytorchrl.training.training import TrainedAgent

_FRAME_SKIP = 4
# Settings of ale-py's vector environment. Those in `_OF_GAMES` also apply to a single game. Those in `_OF_LEARNING` are
# ignored for a single game, because they do not affect the frames.
_OF_GAMES = ("repeat_action_probability", "full_action_space", "difficulty", "mode")
_OF_LEARNING = {"reward_clipping", "reward_clip", "episodic_life", "life_loss_info"}


@brief_errors
def record_video(
    agent: TrainedAgent, video_dir: str | os.PathLike[str], *, num_episodes: int = 1, deterministic: bool = True,
    seed: int | None = None,
) -> Evaluation:
    """Play episodes one after the other in a single environment, and write each as an mp4 file.

    Args:
        agent: The agent that plays.
        video_dir: Directory of the files, `<environment>-episode-<n>.mp4`, created if missing. Existing files are
            replaced.
        num_episodes: Number of episodes, at least 1.
        deterministic: Whether the policy takes its best action instead of sampling one.
        seed: Seed of the environment; None: the seed of the experiment.

    Returns:
        The returns and lengths of these episodes.

    Raises:
        ConfigError: The environments have several agents, the extra `video` is missing, the directory cannot be
            written, or the environment does not render images.
    """
    refuse_several_agents(agent)
    if isinstance(agent.agent.play_envs.options, TokenEnv.Options):
        raise ConfigError("token tasks have no frames; print their answers with show_episodes (--render human)")
    if importlib.util.find_spec("moviepy") is None:
        raise ConfigError(f"recording videos needs the extra `video`: {install_hint('video')}")
    try:
        os.makedirs(video_dir, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{os.fspath(video_dir)!r} cannot be written: {error}") from error
    _check_mode(agent, "rgb_array")
    recorder = functools.partial(_recorded, video_dir=os.fspath(video_dir), num_episodes=num_episodes)
    return agent.evaluate(num_episodes, deterministic=deterministic, seed=seed,
                          envs=single_environment(agent, recorder))


@brief_errors
def show_episodes(
    agent: TrainedAgent, *, num_episodes: int = 1, deterministic: bool = True, seed: int | None = None,
) -> Evaluation:
    """Play episodes one after the other in a single environment, which shows them in its window.

    Of token tasks, the prompt, the answer and the reward of each episode are printed.

    Args:
        agent: The agent that plays.
        num_episodes: Number of episodes, at least 1.
        deterministic: Whether the policy takes its best action instead of sampling one.
        seed: Seed of the environment; None: the seed of the experiment.

    Returns:
        The returns and lengths of these episodes.

    Raises:
        ConfigError: The environments have several agents, or the environment has no window.
    """
    refuse_several_agents(agent)
    envs = agent.agent.play_envs
    if isinstance(envs.options, TokenEnv.Options):
        wrappers = (*envs.options.wrappers, _printing)
        return agent.evaluate(num_episodes, deterministic=deterministic, seed=seed,
                              envs=envs.with_options(vec_env_size=1, wrappers=wrappers))
    _check_mode(agent, "human")
    shown = functools.partial(_require_mode, mode="human")
    return agent.evaluate(num_episodes, deterministic=deterministic, seed=seed,
                          envs=single_environment(agent, shown, "human"))


def _printing(task: TokenTask) -> TokenTask:
    """Return a task that prints each episode when its answer has ended."""
    compute = task.reward

    def reward(prompt: list[int], answer: list[int]) -> float:
        found = compute(prompt, answer)
        sys.stdout.write(f"{' '.join(map(str, prompt))} -> {' '.join(map(str, answer))}   reward {found:g}\n")
        return found

    task.reward = reward  # type: ignore[method-assign]
    return task


def refuse_several_agents(agent: TrainedAgent) -> None:
    """Raise `ConfigError` if the environments have several agents."""
    if isinstance(agent.agent.play_envs, MultiAgentEnvFactory):
        raise ConfigError("only single-agent environments can be recorded or shown, and this run has several agents; "
                          "evaluate it without recording")


def _check_mode(agent: TrainedAgent, mode: str) -> None:
    """Build and close one environment; raise `ConfigError` if it cannot be rendered in the mode `mode`."""
    modes: list[str] = []

    def look(env: AnyEnv) -> AnyEnv:
        modes.extend(env.metadata.get("render_modes") or ())
        return env

    single_environment(agent, look, None)(mode="test", seed=0).close()
    # If Gymnasium makes the environment from an id, Gymnasium can also show the rendered images in a window.
    has_window = not callable(agent.agent.play_envs.options.env_fn) and "rgb_array" in modes
    if mode not in modes and not (mode == "human" and has_window):
        raise ConfigError(f"{agent.agent.play_envs.options.env_fn} cannot be rendered with render_mode={mode!r}; its "
                          f"render modes are {modes}")


def _require_mode(env: AnyEnv, mode: str) -> AnyEnv:
    """Return `env`; raise `ConfigError` if it was built with another render mode."""
    if env.render_mode != mode:
        raise ConfigError(f"{env} has render_mode={env.render_mode!r}, but {mode!r} is necessary; the function that "
                          "makes it must take the keyword render_mode and pass it on")
    return env


class _Recorder(gym.wrappers.RecordVideo[Observation, Action]):
    """Gymnasium's recorder, which writes every frame exactly once.

    Gymnasium adds up the frames' durations, and moviepy rounds down: at 30 frames per second, 6 frames become 5, and
    the last one is lost. At some rates, frames are repeated.
    """

    def stop_recording(self) -> None:
        """Write the video of the episode."""
        from moviepy import VideoClip

        frames, fps = [np.asarray(frame) for frame in self.recorded_frames], self.frames_per_sec
        clip = VideoClip(lambda t: frames[round(t * fps)], duration=(len(frames) + 0.5) / fps)
        clip.write_videofile(os.path.join(self.video_folder, f"{self._video_name}.mp4"), fps=fps, logger=None)
        self.recorded_frames, self.recording, self._video_name = [], False, None


def _recorded(env: AnyEnv, *, video_dir: str, num_episodes: int) -> AnyEnv:
    env = _require_mode(env, "rgb_array")
    name = "env" if env.spec is None else env.spec.id.replace("/", "-").replace(":", "-")
    for number in range(num_episodes):
        path = os.path.join(video_dir, f"{name}-episode-{number}.mp4")
        if os.path.islink(path):  # the recorder would overwrite the file to which the link leads
            os.unlink(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # RecordVideo warns that the folder already exists
        return _Recorder(
            env, video_dir, episode_trigger=lambda number: number < num_episodes, name_prefix=name,
            disable_logger=True)


def single_environment(
    agent: TrainedAgent, recorder: EnvWrapper, render_mode: str | None = "rgb_array",
) -> EnvFactory:
    """Return a factory of one test environment whose innermost wrapper is `recorder`.

    Args:
        agent: The agent whose test environment is used.
        recorder: Function that wraps the environment.
        render_mode: Render mode of the environment; None: the environment is not rendered.

    Raises:
        ConfigError: The vector environment of an Atari game has a setting that a single game does not support.
    """
    factory = agent.agent.play_envs
    options = factory.options
    is_atari = isinstance(options.env_fn, str) and options.env_fn.split(":")[-1].startswith("ALE/")
    rendering = {"render_mode": render_mode} if render_mode and _takes_mode(options.env_fn) else {}
    changed: dict[str, OptionValue] = {
        "vec_env_size": 1, "backend": "sync", "wrappers": (recorder, *options.wrappers),
        "env_kwargs": {**options.env_kwargs, **rendering},
    }
    if is_atari:
        changed |= _single_game(options, recorder, rendering)
    return factory.with_options(**changed)


def _takes_mode(env_fn: EnvFn) -> bool:
    """Return whether an environment can be built with the keyword `render_mode`."""
    if not callable(env_fn):
        return True
    parameters = inspect.signature(env_fn).parameters.values()
    return any(one.name == "render_mode" or one.kind is one.VAR_KEYWORD for one in parameters)


def _single_game(
    options: VecEnv.Options, recorder: EnvWrapper, rendering: dict[str, str],
) -> dict[str, OptionValue]:
    """Return the options to change so that the environment is one game, preprocessed as in the vector environment.

    Raises:
        ConfigError: The vector environment has a setting that Gymnasium's wrappers do not support.
    """
    settings = {"noop_max": 30, "use_fire_reset": True, **options.env_kwargs, **options.test_env_kwargs}
    preprocessed = functools.partial(
        _preprocessed, noop_max=settings.pop("noop_max"), fires=settings.pop("use_fire_reset"))
    of_game = {name: settings.pop(name) for name in _OF_GAMES if name in settings}
    if others := sorted(settings.keys() - _OF_LEARNING):
        raise ConfigError(
            f"Atari games cannot be recorded or shown with {', '.join(others)}; evaluate without recording")
    limit = options.max_episode_steps
    return {
        "env_kwargs": {**of_game, "frameskip": 1, **rendering}, "test_env_kwargs": {},
        # The limit applies inside the wrappers, where each step is one frame.
        "max_episode_steps": None if limit is None else _FRAME_SKIP * limit,
        "wrappers": (recorder, preprocessed), "frame_stack": 1, "end_on_life_loss": False,
    }


def _preprocessed(env: AnyEnv, noop_max: int, fires: bool) -> AnyEnv:
    env = gym.wrappers.AtariPreprocessing(
        env, noop_max=noop_max, frame_skip=_FRAME_SKIP, screen_size=84, grayscale_obs=True)
    return gym.wrappers.FrameStackObservation(_FireAtReset(env) if fires else env, 4, padding_type="zero")


class _FireAtReset(AnyWrapper):
    """A wrapper that presses FIRE at each reset, to start games that wait for it."""

    def reset(self, **options: Forwarded) -> ResetResult:
        """Reset the game, and press FIRE if the game has this action."""
        obs, info = self.env.reset(**options)
        meanings = self.env.get_wrapper_attr("get_action_meanings")()
        if "FIRE" not in meanings:
            return obs, info
        obs, _, terminated, truncated, info = self.env.step(meanings.index("FIRE"))
        return self.env.reset(**options) if terminated or truncated else (obs, info)
