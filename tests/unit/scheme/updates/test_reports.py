"""Check when statistics of the local gradient worker arrive, which are requested instead of sent with each gradient."""

from __future__ import annotations

import threading

import pytest

from pytorchrl import DQN, QActor, ReplayBuffer, Scheme, VecEnv


@pytest.fixture
def scheme():
    envs = VecEnv.create_factory("CartPole-v1")
    scheme = Scheme(
        DQN.create_factory(start_steps=8, mini_batch_size=8, update_every=4),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        ReplayBuffer.create_factory(1000, rollout_size=4), envs, seed=1)
    yield scheme
    scheme.stop()


def in_thread(function):
    """Return the result of a function that another thread calls."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_statistics_are_exact_after_each_update(scheme):
    episode_steps = 0
    for number in range(1, 60):
        scheme.step()
        metrics = scheme.metrics()
        assert metrics["backward_passes"] == metrics["updates"] == number
        assert metrics["rollouts"] * 4 == scheme.env_steps
        episode_steps += sum(episode.length for episode in scheme.episodes())
        assert scheme.env_steps - 60 < episode_steps <= scheme.env_steps


def test_statistics_are_complete_after_a_stop(scheme):
    for _ in range(7):
        scheme.step()
    scheme.stop()
    assert in_thread(scheme.metrics)["backward_passes"] == scheme.metrics()["backward_passes"] == 7


def test_another_thread_reads_the_latest_report(scheme):
    for _ in range(7):
        scheme.step()
    assert in_thread(scheme.metrics)["backward_passes"] == 0
    assert scheme.metrics()["backward_passes"] == 7
    scheme.step()
    assert in_thread(scheme.metrics)["backward_passes"] == 7


def test_reports_are_requested_regularly(scheme):
    for _ in range(149):
        scheme.step()
    assert in_thread(scheme.metrics)["backward_passes"] >= 100
    assert len(in_thread(scheme.episodes)) > 3


def test_gradients_from_a_separate_thread_contain_reports():
    envs = VecEnv.create_factory("CartPole-v1")
    scheme = Scheme(
        DQN.create_factory(start_steps=8, mini_batch_size=8, update_every=4),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        ReplayBuffer.create_factory(1000, rollout_size=4), envs, seed=1, grad_communication="asynchronous")
    scheme.step()
    assert scheme.metrics()["backward_passes"] >= 1
    scheme.stop()
