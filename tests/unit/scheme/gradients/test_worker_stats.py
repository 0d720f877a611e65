"""Tests of the statistics of a gradient worker, compared with sums over random rollouts."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import Episode
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.worker_stats import WorkerStats, timed
from pytorchrl.scheme.transport.encoder import Compression, Encoder, Sent, Traffic
from pytorchrl.scheme.transport.messages import RolloutHeader
from tests.conftest import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


def random_header(rng, restarts):
    """Return the header of a random header."""
    worker, incarnation = rng.randint(1, 3), rng.randint(0, 1)
    restarts[worker, incarnation] += rng.randint(0, 2)
    raw = rng.randint(1, 1000)
    return RolloutHeader(
        num_env_steps=rng.randint(1, 50), size=50, collected_steps=0, weights_version=rng.randint(0, 9),
        worker=worker, sequence=1, incarnation=incarnation, preempted=rng.random() < 0.5,
        episodes=tuple(Episode(1.0, rng.randint(1, 9), 0.0, 0, True) for _ in range(rng.randint(0, 3))),
        moments={"obs": (1, 0.0, 0.0)} if rng.random() < 0.5 else {}, agent_steps={"hunter": rng.randint(0, 9)},
        timings={"environment": rng.random(), "store": rng.random()}, envs_restarted=restarts[worker, incarnation],
        sent=Sent(raw=raw, sent=raw // 2), traffic={"weights": Traffic(decodes=1, decode_s=0.25)})


class Component:
    """A collector or a source of batches, without counts of its own."""

    def __init__(self, send_s=0.0, weights_traffic=None):
        self._send_s, self.weights_traffic = send_s, weights_traffic or Traffic()

    def take_send_s(self):
        return self._send_s

    def take_levels(self):
        return (3, 2)

    def count(self, counters):
        pass

    def take_times(self):
        return {}


def take(stats, collector=None, source=None):
    return stats.take(collector or Component(), source or Component(), ())


@pytest.mark.parametrize("seed", range(5))
def test_counters_are_sums_over_the_rollouts_in_use(clock, seed):
    rng, restarts = random.Random(seed), Counter()
    headers, stats = [random_header(rng, restarts) for _ in range(30)], WorkerStats(clock)
    for header in headers[:20]:
        stats.add_rollout(header, 10, 12)
    take(stats)
    stats.add_draw(headers[20:], np.zeros((0, 2), np.int64), 12)
    counters = take(stats).counters
    cut, full = ([header for header in headers if header.preempted is is_cut] for is_cut in (True, False))

    def episode_steps(rollouts):
        return sum(episode.length for header in rollouts for episode in header.episodes)
    assert counters.copy() == WorkerCounters(
        rollouts=30, collected_in_use=sum(header.num_env_steps for header in headers),
        preempted=len(cut), preempted_steps=sum(header.num_env_steps for header in cut),
        preempted_by_worker=Counter(header.worker for header in cut),
        env_steps_by_worker=sum((Counter({header.worker: header.num_env_steps}) for header in headers), Counter()),
        preempted_episodes=sum(len(header.episodes) for header in cut), preempted_episode_steps=episode_steps(cut),
        full_episodes=sum(len(header.episodes) for header in full), full_episode_steps=episode_steps(full),
        envs_restarted=sum(restarts[key] for key in {(header.worker, header.incarnation) for header in headers}),
        agent_steps=Counter({"hunter": sum(header.agent_steps["hunter"] for header in headers)}),
        bytes_raw=sum(header.sent.raw for header in headers),
        bytes_sent=sum(header.sent.sent for header in headers))


@pytest.mark.parametrize("seed", range(3))
def test_a_message_covers_rollouts_used_since_the_last_message(clock, seed):
    rng, stats = random.Random(seed), WorkerStats(clock)
    for _ in range(3):
        headers = [random_header(rng, Counter()) for _ in range(rng.randint(0, 5))]
        for header in headers:
            stats.add_rollout(header, 10, 12)
        report = take(stats, Component(send_s=0.5))
        assert report.lags == tuple(
            (header.worker, 10 - header.weights_version, 12 - header.weights_version) for header in headers)
        assert report.episodes == tuple(episode for header in headers for episode in header.episodes)
        assert stats.take_moments() == tuple(header.moments for header in headers if header.moments)
        collection = report.timings["collection"]
        assert collection.pop("send") == 0.5
        assert sum(collection.values()) == pytest.approx(sum(header.collect_s for header in headers))
        count, seconds = report.times.get("collect", (0, 0.0))
        assert (count, seconds) == (len(headers), pytest.approx(sum(header.collect_s for header in headers)))


def test_episodes_are_taken_once(clock):
    stats, rng = WorkerStats(clock), random.Random(0)
    headers = [random_header(rng, Counter()) for _ in range(9)]
    for header in headers:
        stats.add_rollout(header, 9, 9)
    episodes = [episode for header in headers for episode in header.episodes]
    assert (stats.take_episodes(), stats.take_episodes()) == (episodes, [])
    assert take(stats).episodes == ()


def test_lags_of_samples_are_per_train_batch(clock):
    stats = WorkerStats(clock)
    stats.add_draw([], np.array([[3, 5], [4, 4]]), 9)
    stats.add_draw([], np.array([[9, 9]]), 9)
    first, second = take(stats).drawn_lags
    assert first.tolist() == [[2, 6], [0, 5]]
    assert second.tolist() == [[0, 0]]
    assert take(stats).drawn_lags == ()


def test_traffic_is_summed_by_kind(clock):
    stats, rng = WorkerStats(clock), random.Random(0)
    headers = [random_header(rng, Counter()) for _ in range(4)]
    for header in headers:
        stats.add_rollout(header, 0, 0)
        report = take(stats, Component(weights_traffic=Traffic(messages=7)))
    assert report.traffic["data"].messages == 4
    assert report.traffic["data"].raw == sum(header.sent.raw for header in headers)
    weights = report.traffic["weights"]
    assert (weights.messages, weights.decodes, weights.decode_s) == (7, 4, 1.0)


def test_a_report_has_the_levels_of_the_queue_and_the_statistics_of_shards(clock):
    class Shard:
        def statistics(self):
            return {"size": 7}
    report = WorkerStats(clock).take(Component(), Component(), [Shard(), Shard()])
    assert (report.queue_levels, report.shards) == ((3, 2), ({"size": 7}, {"size": 7}))


def test_times_and_counters_of_parts_are_added(clock):
    class Part(Component):
        def __init__(self, restarts, times):
            super().__init__()
            self.restarts, self.times = restarts, times

        def count(self, counters):
            counters.restarts += self.restarts

        def take_times(self):
            return self.times
    stats = WorkerStats(clock)
    parts = [Part(2, {"draw": (3, 0.5)}), Part(5, {"fetch": (0, 0.0)})]
    first, second = take(stats, *parts), take(stats, *parts)
    assert first.counters.restarts == second.counters.restarts == 7
    assert first.times == {"draw": (3, 0.5)}


def test_methods_are_timed_by_part(clock):
    class Owner:
        stats = WorkerStats(clock)

        @timed("grad")
        def work(self, seconds):
            clock.seconds += seconds
            return seconds
    assert [Owner().work(0.5), Owner().work(0.25)] == [0.5, 0.25]
    report = take(Owner.stats)
    assert report.times == {"grad": (2, 0.75)}
    assert report.timings["gradients"] == {"grad": 0.75}
    assert take(Owner.stats).timings["gradients"] == {}


def test_gradients_are_sent_as_copies_and_counted(clock):
    stats = WorkerStats(clock)
    own, missing = torch.arange(4.0), None
    sent, nothing = stats.pack([own, missing], Encoder(None, clock))
    own += 1.0
    assert sent.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert nothing is None
    packed, _ = stats.pack([own, missing], Encoder(Compression.of("grads", "fp16"), clock))
    assert packed.nbytes == 8
    counters = take(stats).counters
    assert (counters.bytes_raw, counters.bytes_sent) == (32, 24)
