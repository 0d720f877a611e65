"""Test central updates: which messages of the local gradient worker contain statistics."""

from __future__ import annotations

import pytest

from pytorchrl import PPO


@pytest.fixture
def record(make_scheme):
    """Return a function that makes updates, and returns the scheme and the messages of its gradient workers."""
    def run(num_updates, **settings):
        scheme, messages = make_scheme(**settings), []
        statistics = scheme.update_worker.statistics
        receive = statistics.receive
        statistics.receive = lambda message: (messages.append(message), receive(message))
        while scheme.version < num_updates:
            scheme.step()
        return scheme, messages
    return run


def test_a_local_worker_sends_statistics_with_the_first_and_last_gradient_from_data(record):
    scheme, messages = record(12, algo=PPO.create_factory(num_epochs=3, num_mini_batch=2),
                              env_kwargs={"episode_length": 4})
    assert [message.counters is not None for message in messages] == [True, False, False, False, False, True] * 2
    assert [bool(message.episodes) for message in messages] == [message.sequence % 6 == 1 for message in messages]
    assert sum(message.times.get("grad", (0, 0.0))[0] for message in messages) == 12
    metrics = scheme.metrics()
    assert metrics["backward_passes"] == metrics["grads_received"] == 12
    assert metrics["rollouts"] == 2


def test_a_local_worker_sends_statistics_with_a_gradient_that_ends_the_passes(record):
    _, messages = record(
        6, algo=PPO.create_factory(num_epochs=4, num_mini_batch=2, lr=0.1, target_kl=1e-6))
    ends = [bool(message.info["skip_remaining"]) for message in messages]
    starts = [True, *ends[:-1]]
    assert 0 < sum(ends) < len(ends)
    assert [message.counters is not None for message in messages] == [
        start or end or message.last for start, end, message in zip(starts, ends, messages, strict=True)]


def test_remote_workers_send_statistics_with_each_gradient(record):
    _, messages = record(8, num_grad_workers=2)
    assert len(messages) == 16
    assert all(message.counters is not None for message in messages)
