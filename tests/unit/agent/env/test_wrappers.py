"""Test stacks of images whose channels are the last axis."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.actors.extractors import CNN
from pytorchrl.agent.env import VecEnv


class Pictures(gym.Env):
    """Environment of random images, all written to the same memory; it keeps copies of them."""

    action_space = spaces.Discrete(2)

    def __init__(self, channels, dtype):
        high = 255 if dtype is np.uint8 else 1
        self.observation_space = spaces.Box(0, high, (84, 83, channels), dtype)
        self._memory = np.zeros(self.observation_space.shape, dtype)
        self.images = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        return self._draw(), 0.0, False, False, {}

    def _draw(self):
        self._memory[:] = self.np_random.uniform(0, self.observation_space.high)
        self.images.append(self._memory.copy())
        return self._memory


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("num_frames", [2, 3, 4, 5])
@pytest.mark.parametrize("channels", [1, 3])
def test_stacked_images_have_their_channels_first_and_the_newest_last(channels, num_frames, dtype):
    factory = VecEnv.create_factory(Pictures, {"channels": channels, "dtype": dtype}, frame_stack=num_frames)
    space = factory.observation_space["obs"]
    assert (space.shape, space.dtype) == ((channels * num_frames, 84, 83), dtype)
    actor = OnPolicyActor.create_factory(factory.observation_space, factory.action_space)(device="cpu", seed=1)
    assert type(actor.policy.extractor) is CNN
    envs = factory(seed=0)
    stacks = [envs.reset()[0]["obs"].copy(), *(envs.step(np.zeros(1, np.int64)).obs["obs"].copy() for _ in range(6))]
    images = [image.transpose(2, 0, 1) for image in envs.vector.envs[0].unwrapped.images]
    images = [images[0]] * (num_frames - 1) + images
    for t, stack in enumerate(stacks):
        np.testing.assert_array_equal(stack[0], np.concatenate(images[t:t + num_frames]))
        assert space.contains(stack[0])
