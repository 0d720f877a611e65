"""Test `TokenEnv`: compared with one sequence at a time, groups, waiting, ends of answers, and errors of tasks."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.env.tokens import TokenTask
from pytorchrl.envs.tasks import Copy, SortDigits
from pytorchrl.errors import CallOrderError, ConfigError, EnvError, StoppedError


class Count(TokenTask):
    """The prompts are 1, then 2 3, then 1, ...; the token 0 ends an answer; the reward is its length."""

    num_tokens, max_prompt, max_answer, end = 5, 2, 3, 0

    def __init__(self, **changes):
        self.drawn = 0
        for name, value in changes.items():
            setattr(self, name, value)

    def prompt(self, rng):
        self.drawn += 1
        return [1] if self.drawn % 2 else [2, 3]

    def reward(self, prompt, answer):
        assert prompt in ([1], [2, 3])
        return float(len(answer))


def envs_of(task=Count, kwargs=None, size=4, **options):
    return TokenEnv.create_factory(task, kwargs or {}, size, **{"group_size": 2} | options)


def sequences_of(factory, num_steps, choose, **place):
    """Step environments, and return the sequences that ended, in order: (row, start, prompt, answer, reward, flags)."""
    envs = factory(seed=3, **place)
    obs, mask = envs.reset()
    assert mask is None
    tokens, first = obs["obs"], np.ones(envs.num_envs, bool)
    running = [None] * envs.num_envs
    found = []
    for t in range(num_steps):
        action = choose(t, tokens)
        step = envs.step(action)
        for row in range(envs.num_envs):
            if first[row]:
                assert running[row] is None
                running[row] = (t, [int(tokens[row])], [])
            start, seen, answer = running[row]
            if not first[row]:
                seen.append(int(tokens[row]))
            if step.valid[row]:
                answer.append(int(action[row]))
            assert not (step.terminated[row] and step.truncated[row])
            if step.terminated[row] or step.truncated[row]:
                assert step.final_obs["obs"][list(step.final_index).index(row)] == action[row]
                found.append((row, start, seen[:len(seen) - len(answer) + 1], answer, float(step.reward[row]),
                              bool(step.terminated[row])))
                assert seen[len(seen) - len(answer) + 1:] == answer[:-1]
                assert step.first[row]
                running[row] = None
            elif step.first[row]:  # it waits
                assert not step.valid[row]
                running[row] = None
            else:
                assert step.reward[row] == 0
        episodes = sorted((episode.env_index, episode.env_return, episode.length) for episode in step.episodes)
        newest = found[len(found) - len(episodes):]
        ended = sorted((row, reward, len(answer)) for row, _, _, answer, reward, _ in newest)
        assert episodes == ended
        tokens, first = step.obs["obs"].copy(), step.first.copy()
    envs.close()
    return found


def random_tokens(num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return lambda t, tokens: rng.integers(num_tokens, size=len(tokens))


@pytest.mark.parametrize("waits", [True, False])
def test_sequences_are_prompts_with_their_answers(waits):
    found = sequences_of(envs_of(waits=waits), 60, random_tokens(5))
    assert len(found) > 40
    for _, _, _, answer, reward, terminated in found:
        assert reward == len(answer) <= 3
        assert terminated == (answer[-1] == 0)
        assert 0 not in answer[:-1]
        assert terminated or len(answer) == 3
    assert {terminated for *_, terminated in found} == {True, False}
    started = sorted(found, key=lambda sequence: (sequence[1], sequence[0]))  # a row that never ends is missing
    complete = [sequence for sequence in started if sequence[1] < 40]
    prompts = [prompt for _, _, prompt, *_ in complete]
    assert prompts == [[1] if (number // 2) % 2 == 0 else [2, 3] for number in range(len(prompts))]
    starts = {start for _, start, *_ in complete}
    assert waits == all(len([0 for sequence in complete if sequence[1] == start]) == 4 for start in starts)


def test_all_sequences_wait_until_the_last_one_has_ended():
    def choose(t, tokens):  # row 0 ends at once, and the others go on
        return np.array([0, 1, 1, 1])

    found = sequences_of(envs_of(), 8, choose)
    assert [(row, start, len(answer)) for row, start, _, answer, *_ in found] == [
        (0, 0, 1), (1, 0, 3), (2, 0, 3), (3, 0, 3), (0, 4, 1), (1, 4, 3), (2, 4, 3), (3, 4, 3)]


def test_evaluations_have_single_prompts_and_do_not_wait():
    found = sequences_of(envs_of(), 20, random_tokens(5), mode="test")
    started = sorted(found, key=lambda sequence: (sequence[1], sequence[0]))
    assert [prompt for _, _, prompt, *_ in started[:6]] == [[1], [2, 3]] * 3


def test_answers_without_an_end_have_their_full_length():
    found = sequences_of(envs_of(SortDigits, {"num_digits": 2}), 40, random_tokens(11))
    assert all(len(answer) == 2 and terminated for _, _, _, answer, _, terminated in found)


def test_max_episode_steps_cuts_answers():
    found = sequences_of(envs_of(max_episode_steps=2), 40, lambda t, tokens: np.ones(4, np.int64))
    assert all(len(answer) == 2 and not terminated for _, _, _, answer, _, terminated in found)


def test_the_same_seed_draws_the_same_prompts():
    def prompts(**place):
        return [sequence[2] for sequence in sequences_of(envs_of(Copy), 30, random_tokens(12), **place)]

    assert prompts() == prompts()
    assert len({tuple(map(tuple, prompts(**place))) for place in (
        {}, {"index_col_worker": 1}, {"incarnation": 1}, {"mode": "test"})}) == 4


def test_options_of_all_environments_apply(tmp_path):
    envs = envs_of(
        reward_transform=0.5, log_dir=tmp_path, wrappers=(shorter,), test_env_kwargs={"max_answer": 2})
    for mode, length, factor in (("train", 2, 0.5), ("test", 1, 1.0)):
        env = envs(seed=1, mode=mode)
        env.reset()
        rewards = [env.step(np.ones(4, np.int64)).reward.max() for _ in range(4)]
        assert max(rewards) == factor * length
        env.close()
    assert {path.name.split("_")[1] for path in tmp_path.iterdir()} == {"train", "test"}


def shorter(task):
    return Count(max_answer=task.max_answer - 1)


def test_reset_discards_the_running_sequences():
    env = envs_of()(seed=1)
    env.reset()
    env.step(np.ones(4, np.int64))
    assert env.reset()[0]["obs"].tolist() in ([1, 1, 2, 2], [2, 2, 1, 1])
    assert env.step(np.ones(4, np.int64)).episodes == []


class Broken(Count):
    """A task whose method `method` returns `value`, or raises it."""

    def prompt(self, rng):
        return self._result("prompt", [1])

    def reward(self, prompt, answer):
        return self._result("reward", 1.0)

    def _result(self, method, normal):
        if method != self.method:
            return normal
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(("method", "value", "message"), [
    ("prompt", [], r"Broken.prompt must return 1 to 2 whole numbers from 0 to 4, got \[\]"),
    ("prompt", [1, 2, 3], r"whole numbers from 0 to 4, got \[1, 2, 3\]"),
    ("prompt", [5], r"from 0 to 4, got \[5\]"),
    ("prompt", [-1], r"from 0 to 4, got \[-1\]"),
    ("prompt", [0.5], r"whole numbers from 0 to 4, got \[0.5\]"),
    ("prompt", ValueError("no data"), "Broken.prompt raised: ValueError: no data"),
    ("reward", float("nan"), r"Broken.reward must return a finite number, got nan for the prompt \[1\] and the answer"),
    ("reward", ValueError("no sum"), "Broken.reward raised: ValueError: no sum"),
])
def test_errors_of_a_task_name_its_method(method, value, message):
    with pytest.raises(EnvError, match=message):
        sequences_of(envs_of(Broken, {"method": method, "value": value}), 10, random_tokens(5))


def test_only_training_needs_whole_groups():
    factory = envs_of(size=6, group_size=6).with_options(vec_env_size=4)
    test = factory(mode="test", seed=1)
    assert test.reset()[0]["obs"].shape == (4,)
    test.close()
    with pytest.raises(ConfigError, match="vec_env_size=4 must be a multiple of group_size=6"):
        factory(seed=1)


def test_answers_without_an_end_token_are_truncated_if_they_could_have_been_longer():
    for longest, is_whole in ((None, True), (3, True), (2, False)):
        factory = envs_of(kwargs={"end": None}, max_episode_steps=longest)
        found = sequences_of(factory, 40, random_tokens(5))
        assert {terminated for *_, terminated in found} == {is_whole}
        assert {len(answer) for _, _, _, answer, *_ in found} == {3 if is_whole else 2}


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="vec_env_size=6 must be a multiple of group_size=4"):
        envs_of(size=6, group_size=4)(seed=1)
    assert envs_of(size=6, group_size=4, waits=False).num_envs == 6
    with pytest.raises(ConfigError, match="env_fn must be a function, got 3"):
        envs_of(3)
    with pytest.raises(EnvError, match=r"Count\.max_answer must be a whole number >= 1, got 0"):
        envs_of(kwargs={"max_answer": 0})
    for end in (5, -1, 0.5):
        with pytest.raises(EnvError, match=rf"Count\.end must be None or a token from 0 to 4, got {end}"):
            envs_of(kwargs={"end": end})
    with pytest.raises(EnvError, match="the task could not be built: TypeError"):
        envs_of(SortDigits, {"digits": 3})
    env = envs_of()(seed=1)
    with pytest.raises(CallOrderError, match="reset"):
        env.step(np.zeros(4, np.int64))
    env.close()
    with pytest.raises(StoppedError, match=r"reset\(\) was called after close\(\)"):
        env.reset()
