"""Tests that the recall task in torch equals the one in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.envs.memory import Recall
from pytorchrl.envs.tensors.memory import TorchRecall


@pytest.mark.parametrize("options", [{}, {"num_cues": 3, "delay": 1}, {"num_cues": 5, "delay": 4}])
def test_steps_equal_those_of_the_task_in_numpy(options):
    env, twins = TorchRecall(8, **options), [Recall(**options) for _ in range(8)]
    assert env.single_observation_space == twins[0].observation_space
    assert env.single_action_space == twins[0].action_space
    obs, _ = env.reset(seed=1)
    draws = torch.Generator().manual_seed(1)
    starts, total, num_ends = [True] * 8, 0.0, 0
    for _ in range(60):
        for row, twin in enumerate(twins):
            if starts[row]:
                shown, seed = None, 0
                while shown is None or not np.array_equal(shown, obs[row]):  # draw until the cue is the same
                    shown, seed = twin.reset(seed=seed)[0], seed + 1
        actions = torch.randint(int(env.single_action_space.n), (8,), generator=draws)
        obs, reward, terminated, truncated, extras = env.step(actions)
        for row, twin in enumerate(twins):
            expected = twin.step(np.int64(actions[row]))
            assert (float(reward[row]), bool(terminated[row]), bool(truncated[row])) == expected[1:4]
            np.testing.assert_array_equal(extras["final_obs"][row], expected[0])
        starts, total, num_ends = terminated.tolist(), total + float(reward.sum()), num_ends + int(terminated.sum())
    assert 0 < total < num_ends


def test_all_cues_are_drawn():
    env = TorchRecall(500, num_cues=7)
    assert set(env.reset(seed=1)[0].argmax(dim=1).tolist()) == set(range(7))
