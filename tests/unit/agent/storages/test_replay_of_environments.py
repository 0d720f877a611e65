"""Test that stacked frames are restored from single frames, including at the start and end of episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import VecEnv
from pytorchrl.agent.data import ActingStep
from pytorchrl.agent.storages import ReplayBuffer
from pytorchrl.agent.storages.rollout_rows import RolloutRows
from pytorchrl.envs import atari_factory


class Pictures(gym.Env):
    """Environment with random images in episodes of 3 to 9 steps."""

    observation_space = gym.spaces.Box(0, 255, (1, 6, 6), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 10))
        return self.picture(), {}

    def picture(self):
        return self.np_random.integers(0, 256, (1, 6, 6), dtype=np.uint8)

    def step(self, action):
        self.left -= 1
        return self.picture(), 1.0, self.left <= 0, False, {}


def play_into(storages, envs, num_rollouts, num_steps):
    """Collect rollouts with random actions, and insert each rollout into all storages."""
    rng = np.random.default_rng(0)
    rows = RolloutRows(num_steps, envs.num_envs, {})
    rows.start(*envs.reset())
    for _ in range(num_rollouts):
        for _ in range(num_steps):
            action = rng.integers(0, envs.action_space.n, envs.num_envs)
            rows.insert(ActingStep(action, action, {}, {}), envs.step(action))
        rollout = rows.take(copy=True)
        for storage in storages:
            storage.insert_data_slice([rollout])
    envs.close()


def assert_equal_stacks(single, whole, min_share):
    """Assert that observations and next observations of all sampleable rows are equal in both storages."""
    assert single.ring.num_bytes < whole.ring.num_bytes / 2
    rows = np.flatnonzero(single.ring.columns["drawable"])
    assert len(rows) >= min_share * np.count_nonzero(whole.ring.columns["drawable"])
    links = [storage.ring.columns["link"] for storage in (single, whole)]
    for ours, theirs in ((rows, rows), [link[rows] for link in links]):
        np.testing.assert_array_equal(single.ring.take(ours)["obs"], whole.ring.take(theirs)["obs"])
    # Only the storage of whole observations keeps the number of an extra observation that the next rollout replaces.
    np.testing.assert_array_equal(*[np.maximum(link, -1) for link in links])


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_stacked_frames_of_the_wrapper_are_restored(autoreset, build_replay):
    envs = VecEnv.create_factory(Pictures, vec_env_size=3, frame_stack=4, autoreset=autoreset)(seed=1)
    single, whole = build_replay(ReplayBuffer, 200), build_replay(ReplayBuffer, 200, stacked_frames=1)
    play_into([single, whole], envs, num_rollouts=12, num_steps=10)
    assert_equal_stacks(single, whole, min_share=0.9)


def test_stacked_frames_of_atari_games_are_restored(build_replay):
    pytest.importorskip("ale_py")
    envs = atari_factory("ALE/Breakout-v5", 2, env_kwargs={"max_num_frames_per_episode": 600})(seed=1)
    single, whole = build_replay(ReplayBuffer, 500), build_replay(ReplayBuffer, 500, stacked_frames=1)
    play_into([single, whole], envs, num_rollouts=16, num_steps=25)
    columns = single.ring.columns
    assert columns["terminated"].any()
    assert columns["truncated"].any()
    assert_equal_stacks(single, whole, min_share=0.95)
    assert single.num_bytes <= 1.15 * 500 * 84 * 84
