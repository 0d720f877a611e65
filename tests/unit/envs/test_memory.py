"""Tests of the recall task: observations, rewards and errors."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl import VecEnv
from pytorchrl.envs.memory import Recall
from pytorchrl.errors import ConfigError


@pytest.mark.parametrize(("num_cues", "delay"), [(4, 8), (2, 1), (3, 5)])
def test_the_cue_is_shown_once_and_rewarded_when_repeated_at_the_end(num_cues, delay):
    env = Recall(num_cues, delay)
    cues = set()
    for episode in range(40):
        obs, _ = env.reset(seed=episode)
        cue = int(obs.argmax())
        cues.add(cue)
        assert obs.tolist() == np.eye(num_cues + 1)[cue].tolist()
        is_right = episode % 2 == 0
        for t in range(1, delay + 2):
            action = cue if is_right or t <= delay else (cue + 1) % num_cues
            obs, reward, terminated, truncated, _ = env.step(action)
            assert reward == float(is_right and t == delay + 1)
            assert (terminated, truncated) == (t == delay + 1, False)
            assert obs.tolist() == [0.0] * num_cues + [float(t == delay)]
    assert cues == set(range(num_cues))


def test_the_id_is_registered_without_an_import():
    factory = VecEnv.create_factory("pytorchrl/Recall-v0", {"num_cues": 3}, 2)
    assert factory.observation_space["obs"].shape == (4,)
    assert factory.action_space.n == 3


@pytest.mark.parametrize("options", [{"num_cues": 1}, {"delay": 0}])
def test_tasks_with_one_cue_or_no_delay_are_refused(options):
    with pytest.raises(ConfigError, match="num_cues must be >= 2 and delay >= 1"):
        Recall(**options)
