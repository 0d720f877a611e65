import csv
import itertools
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.agent.data import Episode
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.statistics import EpisodeStatistics, Monitor
from pytorchrl.envs.testing import CountingEnv, ScriptedEnv
from pytorchrl.errors import ConfigError


def play(env, num_steps, num_actions=2):
    env.reset()
    actions = np.random.default_rng(0).integers(0, num_actions, (num_steps, env.num_envs))
    steps = [env.step(action) for action in actions]
    env.close()
    return steps


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_returns_sum_all_rewards_and_lengths_count_all_steps(autoreset):
    steps = play(VecEnv.create_factory(CountingEnv, {"episode_length": 3}, 2, autoreset=autoreset)(seed=0), 12)
    episodes = [episode for step in steps for episode in step.episodes]
    of_first = [(e.env_return, e.length) for e in episodes if e.env_index == 0]
    assert of_first[:3] == [(1 + 2 + 3, 3), (4 + 5 + 6, 3), (7 + 8 + 9, 3)]
    assert {e.env_index for e in episodes} == {0, 1}
    assert all(e.terminated for e in episodes)
    assert all(b.time_s >= a.time_s >= 0 for a, b in itertools.pairwise(episodes))


@pytest.mark.parametrize(("num_envs", "num_steps"), [(2, 600), (1000, 150), (70_000, 5)])
def test_returns_of_long_episodes_sum_all_rewards(num_envs, num_steps):
    statistics = EpisodeStatistics(num_envs)
    rewards = np.random.default_rng(0).normal(size=(num_steps, num_envs))
    for reward in rewards:
        statistics.add(reward)
    one, other = np.arange(num_envs) == 0, np.arange(num_envs) == 1
    first, = statistics.finish(one, one, lambda index: {})
    statistics.add(rewards[0])
    second, = statistics.finish(other, one, lambda index: {})
    assert first.env_return == pytest.approx(rewards[:, 0].sum())
    assert second.env_return == pytest.approx(rewards[:, 1].sum() + rewards[0, 1])


def test_many_environments_need_no_memory_for_many_steps():
    tracemalloc.start()
    statistics = EpisodeStatistics(50_000)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert statistics._rewards.shape == (1, 50_000)
    assert size < 10 * 50_000 * 8


def test_statistics_of_a_native_vector_match_its_rows():
    steps = play(VecEnv.create_factory("CartPole-v1", vec_env_size=3)(seed=0), 150)
    episodes = [episode for step in steps for episode in step.episodes]
    running = np.zeros(3, int)
    expected = []
    for step in steps:
        running += step.valid
        for e in np.flatnonzero(step.terminated | step.truncated):
            expected.append((running[e], float(running[e]), e))
            running[e] = 0
    assert len(expected) > 5
    assert [(e.length, e.env_return, e.env_index) for e in episodes] == expected


@pytest.mark.parametrize(("transform", "seen"), [
    (None, [3.0, -0.5, 0.0]), ("sign", [1.0, -1.0, 0.0]), ("clip", [1.0, -0.5, 0.0]), (0.1, [0.3, -0.05, 0.0]),
])
def test_only_learners_see_transformed_rewards(transform, seen):
    factory = VecEnv.create_factory(
        ScriptedEnv, {"rewards": (3.0, -0.5, 0.0), "terminations": (2,)}, reward_transform=transform)
    steps = play(factory(seed=0), 3)
    np.testing.assert_allclose([s.reward[0] for s in steps], seen, rtol=1e-6)
    assert all(s.reward.dtype == np.float32 for s in steps)
    assert steps[-1].episodes[0].env_return == 2.5
    tested = play(factory(seed=0, mode="test"), 3)
    assert [s.reward[0] for s in tested] == [3.0, -0.5, 0.0]


def test_monitor_file_has_one_row_per_episode_and_is_only_appended_to(tmp_path):
    (tmp_path / "other.txt").write_text("kept")
    factory = VecEnv.create_factory(
        CountingEnv, {"episode_length": 4, "truncate": True}, 2, log_dir=str(tmp_path), info_keywords=("lacking",))
    path = tmp_path / "monitor_train_GWorker_1_CWorker_2.csv"
    assert not path.exists(), "the probe must not write a file"
    play(factory(seed=0, index_grad_worker=1, index_col_worker=2), 9)
    rows = read(path)
    assert list(rows[0]) == ["r", "l", "t", "env", "ended", "lacking"]
    assert float(rows[0]["t"]) >= 0
    assert [(row["r"], row["l"], row["env"], row["ended"]) for row in rows] == [
        ("10.0", "4", "0", "truncated"), ("10.0", "4", "1", "truncated"),
        ("26.0", "4", "0", "truncated"), ("26.0", "4", "1", "truncated")]
    play(factory(seed=0, index_grad_worker=1, index_col_worker=2), 4)
    assert len(read(path)) == 6
    assert path.read_text().count("ended") == 1
    assert (tmp_path / "other.txt").read_text() == "kept"
    play(factory(seed=0, mode="test"), 4)
    assert len(read(tmp_path / "monitor_test_GWorker_0_CWorker_0.csv")) == 2


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_monitor_keywords_are_read_from_the_last_step(tmp_path, autoreset):
    factory = VecEnv.create_factory(
        CountingEnv, {"episode_length": 3}, 1, log_dir=str(tmp_path), info_keywords=("num_done",), autoreset=autoreset,
        wrappers=(WithInfo,))
    play(factory(seed=0), 8)
    assert [row["num_done"] for row in read(tmp_path / "monitor_train_GWorker_0_CWorker_0.csv")] == ["3", "6"]


def test_monitor_continues_a_file_whose_writer_was_killed_at_any_byte(tmp_path):
    """Check that environments start after a kill during the header or a row, and that all complete rows are kept."""
    env = VecEnv.create_factory(CountingEnv, {"episode_length": 3}, 1, log_dir=str(tmp_path))(seed=0)
    play(env, 6)
    path = tmp_path / "monitor_train_GWorker_0_CWorker_0.csv"
    whole = path.read_bytes()
    header, *rows = whole.splitlines(keepends=True)
    assert len(rows) == 2
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        monitor = Monitor(path)
        monitor.write(Episode(1.5, 3, 0.25, 0, True), {})
        monitor.close()
        complete = whole[:whole.rfind(b"\n", 0, end) + 1] or header
        assert path.read_bytes() == complete + b"1.5,3,0.25,0,terminated\n"


def test_monitor_refuses_a_file_with_other_columns(tmp_path):
    VecEnv.create_factory(CountingEnv, log_dir=str(tmp_path))(seed=0).close()
    other = VecEnv.create_factory(CountingEnv, log_dir=str(tmp_path), info_keywords=("x",))
    with pytest.raises(ConfigError, match="has columns"):
        other(seed=0)


def test_reset_discards_running_episodes_and_invalid_rows_do_not_count():
    statistics = EpisodeStatistics(2, now=iter([10.0, 12.5]).__next__)
    statistics.add(np.array([7.0, 7.0]))
    statistics.reset()
    statistics.add(np.array([1, 2], np.int32))
    statistics.add(np.array([1, np.nan]), np.array([True, False]))
    episodes = statistics.finish(np.array([True, True]), np.array([False, True]), lambda _: {})
    assert [e[:5] for e in episodes] == [(2.0, 2, 2.5, 0, False), (2.0, 1, 2.5, 1, True)]


class WithInfo(gym.Wrapper):
    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        *rest, info = self.env.step(action)
        return *rest, info | {"num_done": self.num_steps}


def test_a_cut_episode_does_not_add_to_the_next_one():
    statistics = EpisodeStatistics(2, now=iter([10.0, 12.5]).__next__)
    statistics.add(np.array([7.0, 7.0]))
    statistics.discard(np.array([True, False]))
    statistics.add(np.array([1.0, 2.0]))
    episodes = statistics.finish(np.array([True, True]), np.array([True, True]), lambda _: {})
    assert [e[:2] for e in episodes] == [(1.0, 1), (9.0, 2)]
