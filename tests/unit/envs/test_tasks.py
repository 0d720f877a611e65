"""Test the token tasks: rewards of right and wrong answers, prompts, and the lengths of texts to copy."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.envs.tasks import Addition, Copy, SortDigits
from pytorchrl.errors import ConfigError


def prompts_of(task, count):
    rng = np.random.default_rng(0)
    return [list(task.prompt(rng)) for _ in range(count)]


@pytest.mark.parametrize(("task", "prompt", "answer", "reward"), [
    (SortDigits(3), [5, 0, 2, 10], [0, 2, 5], 2.0), (SortDigits(3), [5, 0, 2, 10], [0, 5, 2], 1 / 3),
    (SortDigits(3), [5, 0, 2, 10], [9, 9, 9], 0.0), (SortDigits(3), [1, 1, 0, 10], [0, 1, 1], 2.0),
    (Addition(2), [1, 7, 10, 0, 5, 11], [2, 2, 0], 2.0), (Addition(2), [9, 9, 10, 0, 1, 11], [0, 0, 1], 2.0),
    (Addition(2), [9, 9, 10, 0, 1, 11], [1, 0, 0], 1 / 3), (Addition(1), [4, 10, 4, 11], [8, 0], 2.0),
    (Copy(), [3, 1, 11], [3, 1, 10], 2.0), (Copy(), [3, 1, 11], [3, 1, 1, 10], 0.5), (Copy(), [3, 1, 11], [10], 0.0),
    (Copy(), [3, 1, 11], [3, 10], 1 / 3),
])
def test_rewards(task, prompt, answer, reward):
    assert task.reward(prompt, answer) == pytest.approx(reward)


@pytest.mark.parametrize("task", [SortDigits(4), Addition(3), Copy(6)])
def test_prompts_fit_the_task(task):
    for prompt in prompts_of(task, 200):
        assert 1 <= len(prompt) <= task.max_prompt
        assert all(0 <= token < task.num_tokens for token in prompt)
    assert len({tuple(prompt) for prompt in prompts_of(task, 50)}) > 20


def test_lengths_of_texts_have_the_stated_distribution():
    for longest, tail in ((20, 1.0), (20, 2.0), (5, 0.5)):
        lengths = np.array([len(prompt) - 1 for prompt in prompts_of(Copy(longest, tail), 4000)])
        for length in range(1, longest + 1):
            assert (lengths >= length).mean() == pytest.approx(length ** -tail, abs=0.03)
        assert lengths.max() <= longest


def test_wrong_sizes_are_refused():
    for make in (lambda: SortDigits(0), lambda: Addition(0), lambda: Copy(0)):
        with pytest.raises(ConfigError, match="must be >"):
            make()
    with pytest.raises(ConfigError, match=r"tail must be at least 0\.1, got 0\.05"):
        Copy(tail=0.05)
    assert max(len(prompt) for prompt in prompts_of(Copy(4, 0.1), 4000)) == 5
