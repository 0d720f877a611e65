"""Tests of videos: while a video is recorded, the agent sees the same observations as in training."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.play import video
from pytorchrl.training.composition import compose
from pytorchrl.envs import atari_factory
from pytorchrl.errors import ConfigError
from pytorchrl.training.training import train

TINY = {"num_envs": 2, "num_steps": 32, "target_steps": 0, "progress": False, "seed": 3}


def identity(env):
    return env


@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Breakout-v5"])
def test_recorded_environment_has_the_spaces_of_training(env):
    if env.startswith("ALE/"):
        pytest.importorskip("ale_py")
    agent = train("ppo", env, **TINY)
    factory = video.single_environment(agent, identity)
    envs = factory(mode="test", seed=1)  # raises an error if the spaces differ from those of training
    try:
        obs, _ = envs.reset()
        assert envs.num_envs == 1
        for leaf, space in agent.agent.train_envs_factory.observation_space.items():
            assert (obs[leaf].shape[1:], obs[leaf].dtype) == (space.shape, space.dtype)
    finally:
        envs.close()


def test_a_recorded_game_equals_that_of_the_vector_environment():
    pytest.importorskip("ale_py")
    agent = compose("ppo", "ALE/Pong-v5", {"num_envs": 1})[0]
    factory = video.single_environment(type("Trained", (), {"agent": agent}), identity)
    pictures = []
    for made in (factory, agent.test_envs_factory):
        envs = made(mode="test", seed=1)
        try:
            envs.reset()
            for _ in range(20):
                step = envs.step(np.zeros(envs.num_envs, dtype=np.int64))
            pictures.append(step.obs["obs"][0].astype(np.float64))
        finally:
            envs.close()
    # The positions of the ball and the paddles may differ, but the background, the image size and the order of frames
    # must agree.
    assert np.abs(pictures[0] - pictures[1]).mean() < 5


def film_of(**options):
    """Return the factory of the environment that is recorded, for an Atari agent with the given options."""
    agent = SimpleNamespace(play_envs=atari_factory("ALE/Pong-v5", 2, **options))
    return video.single_environment(SimpleNamespace(agent=agent), identity)


def test_a_video_uses_the_settings_of_the_game():
    pytest.importorskip("ale_py")
    film = film_of(env_kwargs={"full_action_space": True, "noop_max": 0, "use_fire_reset": False}, max_episode_steps=7)
    envs = film(mode="test", seed=1)  # raises an error if the spaces differ from those of training
    try:
        assert envs.action_space.n == 18
        envs.reset()
        steps = [envs.step(np.zeros(1, np.int64)) for _ in range(7)]
        assert [bool(step.truncated[0]) for step in steps] == 6 * [False] + [True]
    finally:
        envs.close()


def test_a_setting_that_single_games_lack_is_refused():
    pytest.importorskip("ale_py")
    with pytest.raises(ConfigError, match="Atari games cannot be recorded or shown with maxpool"):
        film_of(env_kwargs={"maxpool": False})


def test_exactly_the_requested_episodes_are_recorded(tmp_path, monkeypatch):
    recorders = []

    class FakeRecorder(gym.Wrapper):
        def __init__(self, env, folder, *, episode_trigger, name_prefix, disable_logger):
            super().__init__(env)
            recorders.append((folder, name_prefix, [number for number in range(9) if episode_trigger(number)]))
    monkeypatch.setattr(video, "_Recorder", FakeRecorder)
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _name: True)
    agent = train("ppo", "CartPole-v1", **TINY)
    evaluation = video.record_video(agent, tmp_path / "films", num_episodes=3)
    assert len(evaluation.returns) == 3
    assert recorders == [(str(tmp_path / "films"), "CartPole-v1", [0, 1, 2])]


def test_sampled_actions_are_recorded_if_requested(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_Recorder", lambda env, folder, **options: env)
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _name: True)
    agent = train("ppo", "CartPole-v1", **TINY)
    drawn, best = (video.record_video(agent, tmp_path, num_episodes=4, deterministic=deterministic, seed=1).returns
                   for deterministic in (False, True))
    assert drawn != best


def test_a_folder_that_cannot_be_created_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _name: True)
    (tmp_path / "file").write_text("")
    agent = train("ppo", "CartPole-v1", **TINY)
    with pytest.raises(ConfigError, match="cannot be written"):
        video.record_video(agent, tmp_path / "file" / "films")


class Plain(gym.Env):
    """An environment whose constructor takes no render mode."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012 - as gymnasium declares it

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Rendered(Plain):
    def __init__(self, render_mode=None):
        self.render_mode = render_mode


def test_a_missing_render_mode_is_named_with_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _name: True)
    agent = train("ppo", Rendered, **TINY)
    with pytest.raises(ConfigError, match=r"render_mode='human'; its render modes are \['rgb_array', 'ansi'\]"):
        video.show_episodes(agent)
    monkeypatch.setattr(Plain, "metadata", {"render_modes": []})
    with pytest.raises(ConfigError, match=r"render_mode='rgb_array'; its render modes are \[\]"):
        video.record_video(agent, tmp_path)


def test_a_function_that_takes_no_render_mode_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _name: True)
    agent = train("ppo", Plain, **TINY)
    with pytest.raises(ConfigError, match=r"render_mode=None, but 'rgb_array' is necessary; the function that makes"):
        video.record_video(agent, tmp_path)


def test_episodes_are_shown_in_the_window_of_the_environment(monkeypatch):
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    agent = train("ppo", "CartPole-v1", **TINY)
    modes = []

    def note(env):
        modes.append(env.render_mode)
        monkeypatch.setitem(env.metadata, "render_fps", 10_000)
        return env
    options = agent.agent.test_envs_factory.options
    noted = dataclasses.replace(agent.agent.test_envs_factory, options=dataclasses.replace(options, wrappers=(note,)))
    agent.agent = dataclasses.replace(agent.agent, test_envs_factory=noted)
    evaluation = video.show_episodes(agent, num_episodes=2, seed=1)
    assert len(evaluation.returns) == 2
    assert modes == [None, "human"]  # the first environment is built to read its render modes


def test_answers_of_token_tasks_are_printed(capsys, tmp_path):
    agent = train("grpo", "tokens/SortDigits", target_steps=64, seed=1, progress=False)
    found = video.show_episodes(agent, num_episodes=3, seed=5)
    lines = capsys.readouterr().out.splitlines()
    assert [float(line.rpartition(" ")[2]) for line in lines] == [round(value, 6) for value in found.returns]
    for line in lines:
        prompt, answer = (part.split() for part in line.partition("   reward")[0].split(" -> "))
        assert (len(prompt), prompt[-1], len(answer)) == (5, "10", 4)
    assert list(found.returns) == list(agent.evaluate(3, seed=5, envs=agent.agent.play_envs.with_options(
        vec_env_size=1)).returns)
    with pytest.raises(ConfigError, match=r"token tasks have no frames; print their answers with show_episodes"):
        video.record_video(agent, tmp_path)


def test_each_video_contains_the_frames_of_an_episode(tmp_path):
    pytest.importorskip("moviepy")
    cv2 = pytest.importorskip("cv2")
    agent = train("ppo", "CartPole-v1", **TINY)
    evaluation = video.record_video(agent, tmp_path, num_episodes=2, seed=1)
    path, _ = sorted(tmp_path.glob("*.mp4"))
    film, pictures = cv2.VideoCapture(str(path)), []
    while True:
        is_read, picture = film.read()
        if not is_read:
            break
        pictures.append(picture.astype(np.int64))
    film.release()
    assert len(pictures) == evaluation.lengths[0] + 1
    assert pictures[0].shape == (400, 600, 3)
    assert np.abs(pictures[0] - pictures[-1]).max() > 100  # the cart has moved


class Brighter(gym.Env):
    """Shows a frame that becomes brighter by one in each step."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, length, fps, render_mode=None):
        self.length, self.render_mode = length, render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": fps}

    def reset(self, *, seed=None, options=None):
        self.num_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.zeros(1, np.float32), 1.0, self.num_steps == self.length, False, {}

    def render(self):
        return np.full((32, 32, 3), 10 + 4 * self.num_steps, np.uint8)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # the reader
def test_a_video_has_every_frame_once_and_the_rate_of_the_environment(tmp_path):
    """Gymnasium alone loses the last frame of 5 or 29 steps at 30 frames per second, and repeats frames at 5."""
    reader = pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("moviepy")
    for length, fps in ((1, 30), (5, 30), (29, 30), (20, 5), (13, 43)):
        recorder = video._recorded(Brighter(length, fps, "rgb_array"), video_dir=str(tmp_path), num_episodes=1)
        for _ in range(2):  # the second reset writes the video of the first episode, and records nothing
            recorder.reset()
            for _ in range(length):
                recorder.step(0)
        recorder.close()
        frames = reader.read_frames(str(tmp_path / "env-episode-0.mp4"))
        assert round(next(frames)["fps"]) == fps
        levels = [np.frombuffer(frame, np.uint8).mean() for frame in frames]
        assert np.abs(np.array(levels) - (10 + 4 * np.arange(length + 1))).max() < 2.5, (length, fps)
