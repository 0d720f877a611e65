"""Tests of the sample queue and its buffers: the order of train batches is compared with tables worked out by hand."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pytorchrl import ASYNC
from pytorchrl.envs.testing import SleepEnv
from pytorchrl.errors import ConfigError, LearnerStarvedError
from pytorchrl.runtime import Journal, ThreadRuntime
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.options.collection import SampleQueueOptions
from pytorchrl.scheme.gradients.sample_queue import CircularBuffer, RingBuffer, SampleQueue
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader

STEPS = 4


def make_rollout(number, num_steps=50):
    return Rollout(None, RolloutHeader(num_env_steps=num_steps, size=num_steps, collected_steps=0,
                                       weights_version=number, worker=1, sequence=number))


def make_batch(number, num_steps=50):
    return TrainBatch([QueuedRollout(make_rollout(number, num_steps), number)])


class Endless:
    """A queue that provides `num_batches` train batches, or any number of them by default."""

    def __init__(self, num_batches=None):
        self.batches = itertools.islice(map(make_batch, itertools.count()), num_batches)

    def get(self):
        return next(self.batches, None)


def emitted(buffer, count):
    """Return the versions of the next `count` train batches as text; a star marks the last use of a train batch."""
    return " ".join(f"{batch.version}{'*' * is_last}" for batch, is_last in (buffer.get() for _ in range(count)))


@pytest.mark.parametrize(("size", "passes", "ramp", "items"), [
    (1, 4, False, "0 0 0 0* 1 1 1 1* 2"),
    (3, 2, False, "0 1 2 0* 1* 2* 3 4 5 3* 4* 5*"),
    (3, 4, False, "0 1 2 0 1 2 0 1 2 0* 1* 2* 3 4 5"),
    (2, 3, True, "0* 1 2 1* 2 3 2* 3 4 3* 4 5 4*"),
    (3, 4, True, "0* 1 2 3 1* 2 3 4 2* 3 4 5 3* 4 5 6 4* 5 6 7"),
    (4, 2, True, "0* 1 2 3 4 1* 2* 3* 4* 5 6 7 8 5*"),
])
def test_the_order_of_train_batches(size, passes, ramp, items):
    buffer = RingBuffer(Endless().get, size, passes, 1 if ramp else passes)
    assert emitted(buffer, len(items.split())) == items


def test_new_train_batches_are_evenly_spaced_after_the_ramp():
    buffer = RingBuffer(Endless().get, 3, 4, 1)
    first_uses = [number for number in range(100) if buffer.get()[0].uses == 1]
    assert set(map(int.__sub__, first_uses[4:], first_uses[3:])) == {4}


def test_other_slots_are_used_if_the_queue_is_empty():
    source = []
    buffer = RingBuffer(lambda: source.pop() if source else None, 2, 3, 3)
    source.append(make_batch(0))
    assert emitted(buffer, 2) == "0 0"
    source.append(make_batch(1))
    assert emitted(buffer, 4) == "1 0* 1 1*"
    with pytest.raises(queue.Empty):
        buffer.get()


@pytest.mark.parametrize(("size", "ramp", "updates"), [(1, False, 40), (3, True, 34)])
def test_uses_of_ten_train_batches(size, ramp, updates):
    buffer = RingBuffer(Endless(10).get, size, 4, 1 if ramp else 4)
    used = [buffer.get()[0] for _ in range(updates)]
    assert len(set(used)) == 10
    with pytest.raises(queue.Empty):
        buffer.get()


def test_an_empty_queue_is_polled_once_for_each_slot():
    asked = []
    with pytest.raises(queue.Empty):
        RingBuffer(lambda: asked.append(None), 3, 1, 1).get()
    assert len(asked) == 3


def test_a_discarded_train_batch_is_not_used_again():
    buffer = RingBuffer(Endless().get, 2, 3, 3)
    item, _ = buffer.get()
    assert (buffer.discard(item), buffer.discard(item), buffer.uses_left) == (2, 0, 0)
    assert emitted(buffer, 6) == "1 2 1 2 1* 2*"
    circular = CircularBuffer(2, 3, 1)
    circular.add(item)
    assert (circular.get()[0], circular.discard(item), circular.discard(item)) == (item, 2, 0)
    with pytest.raises(queue.Empty):
        circular.get()


def test_a_circular_buffer_samples_uniformly_without_repeats_in_a_row():
    buffer, drawn = CircularBuffer(4, 10_000, 5), []
    items = [make_batch(number) for number in range(4)]
    for item in items:
        assert buffer.add(item) is None
    drawn = [buffer.get()[0] for _ in range(6000)]
    assert all(a is not b for a, b in itertools.pairwise(drawn))
    pairs = {(a, b): 0 for a in items for b in items if a is not b}
    for pair in itertools.pairwise(drawn):
        pairs[pair] += 1
    assert min(pairs.values()) > 400  # expected: 500 of each pair, with a standard deviation of 21
    again = CircularBuffer(4, 10_000, 5)
    for item in items:
        again.add(item)
    assert [again.get()[0] for _ in range(6000)] == drawn


def test_a_circular_buffer_uses_up_or_replaces_train_batches():
    buffer = CircularBuffer(2, 2, 1)
    first, second, third = make_batch(0), make_batch(1), make_batch(2)
    assert buffer.add(first) is None
    assert buffer.get() == (first, False)
    assert buffer.add(second) is None
    assert buffer.add(third) == (first, 1)  # evicts the oldest train batch, with one use left
    assert buffer.uses_left == 4
    uses = [buffer.get() for _ in range(4)]
    assert [item for item, released in uses if released] == [uses[2][0], uses[3][0]]
    assert {item.uses for item in (second, third)} == {2}
    with pytest.raises(queue.Empty):
        buffer.get()


@pytest.fixture
def make():
    """Return a function that makes a worker with a version, and its sample queue with one train batch of version 0."""
    def make_(**settings):
        worker = SimpleNamespace(
            version=0, journal=Journal(), num_envs=1, algo=SimpleNamespace(num_epochs=1, num_mini_batch=1),
            storage=SimpleNamespace(generator=torch.Generator(), options=SimpleNamespace(size=STEPS)))
        ledger = Ledger()
        samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(**settings))
        ledger.collect(STEPS)
        samples.put([make_rollout(0, STEPS)])
        return worker, samples
    return make_


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_max_policy_lag_limits_the_first_use_of_a_train_batch(make, version):
    worker, samples = make(max_policy_lag=2)
    worker.version = version
    if version <= 2:
        assert samples.take(0.0).version == 0
    else:
        with pytest.raises(queue.Empty):
            samples.take(0.0)
    assert samples.num_dropped == int(version > 2)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_max_policy_lag_limits_later_uses_of_a_train_batch(make, version):
    worker, samples = make(max_policy_lag=2, num_passes=3)
    assert samples.take(0.0).uses == 1
    worker.version = version
    if version <= 2:
        assert samples.take(0.0).uses == 2
        assert samples.passes_cancelled == 0
    else:
        with pytest.raises(queue.Empty):
            samples.take(0.0)
        assert samples.passes_cancelled == 2


@pytest.mark.parametrize(("settings", "message"), [
    ({"replay_slots": 4}, "replay_proportion=0.0 and replay_slots=4 go together"),
    ({"buffer": "circular", "ramp": True}, "ramp=True is for buffer='ring'"),
    ({"on_policy_lag": "wait"}, "on_policy_lag='wait' needs max_policy_lag, got None"),
    ({"on_policy_lag": "wait", "max_policy_lag": 2, "buffer": "circular"}, "counts future uses"),
    ({"queue_policy": "drop_all"}, "queue_policy must be one of"),
    ({"queue_size": 0}, "queue_size must be .*1 or None, got 0"),
])
def test_contradictory_options_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SampleQueueOptions(**settings)


@pytest.mark.parametrize(("policy", "kept"), [("drop_oldest", [1, 2]), ("drop_newest", [0, 1])])
def test_a_full_queue_drops_train_batches_and_counts_their_steps(make, policy, kept):
    worker, samples = make(queue_size=2, queue_policy=policy)
    ledger = Ledger()
    samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(queue_size=2,
                                                                                                  queue_policy=policy))
    ledger.collect(3 * STEPS)
    for number in range(3):
        samples.put([make_rollout(number, STEPS)])
    counters = WorkerCounters()
    samples.count(counters)
    assert counters == WorkerCounters(queued_batches=2, dropped_train_batches=1, queue_peak=2)
    assert ledger.snapshot().dropped == {"queue_full": STEPS}
    assert ledger.snapshot().queued == 2 * STEPS
    assert [samples.take(0.0).version for _ in range(2)] == kept
    assert samples.take_levels() == (1, 0)


def test_requests_consider_the_updates_before_a_rollout_is_used(make):
    """Check requests with two epochs of three minibatches, so that each use of a train batch makes six updates."""
    worker, _ = make()
    worker.algo = SimpleNamespace(num_epochs=2, num_mini_batch=3)
    ledger = Ledger()
    samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(
        max_policy_lag=12, on_policy_lag="wait", num_passes=2))
    # With 0, 1 or 2 rollouts in flight, a new rollout would be first used after 0, 12 or 24 updates.
    assert [samples.may_request(number) for number in range(3)] == [True, True, False]
    ledger.collect(STEPS)
    samples.put([make_rollout(0, STEPS)])
    assert [samples.may_request(number) for number in range(2)] == [True, False]
    assert samples.take(0.0).uses == 1
    assert samples.may_request(0)  # used after 12 updates: 6 in the current use, 6 in the next
    worker.version = 4
    assert samples.may_request(0)
    assert not samples.may_request(1)


def test_requests_in_wait_mode_consider_the_updates_already_made(make):
    """Check a learner that makes six updates with each train batch, while a new rollout is used after the current one.

    The numbers of remaining updates are compared with the largest allowed lag.
    """
    worker, _ = make()
    worker.algo, worker.version = SimpleNamespace(num_epochs=2, num_mini_batch=3), 2
    remaining = []

    def allowed(samples):
        """Return the least lag with which a rollout may be requested now."""
        found = []
        for lag in range(1, 20):
            samples._options = SampleQueueOptions(max_policy_lag=lag, on_policy_lag="wait", queue_size=9)
            found.append(samples.may_request(0))
        return found.index(True) + 1
    ledger = Ledger()
    samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(
        max_policy_lag=99, on_policy_lag="wait", queue_size=9))
    ledger.collect(2 * STEPS)
    samples.put([make_rollout(2, STEPS)])
    samples.take(0.0)
    for worker.version in (2, 3, 7, 8, 11):
        remaining.append(allowed(samples))
    assert remaining == [6, 5, 1, 1, 1]
    samples.put([make_rollout(2, STEPS)])
    assert allowed(samples) == 6  # the train batch in the queue
    worker.version = 8
    samples._options = SampleQueueOptions(max_policy_lag=99, on_policy_lag="wait", queue_size=9)
    samples.take(0.0)
    assert allowed(samples) == 6
    worker.version = 10
    assert allowed(samples) == 4
    options = {"max_policy_lag": 99, "on_policy_lag": "wait", "queue_size": 9, "num_passes": 3}
    samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(**options))
    ledger.collect(STEPS)
    samples.put([make_rollout(2, STEPS)])
    assert allowed(samples) == 6  # the options of `allowed` have one pass
    samples._options = SampleQueueOptions(**options)
    samples.take(0.0)
    assert allowed(samples) == 18  # six updates in the current use, and twelve in the other two


@pytest.mark.parametrize("end", ["wait", "clear"])
def test_a_learner_that_had_to_wait_lifts_the_limit_of_the_queue(make, end):
    """Check requests with a queue of one train batch, if at most three requests may be in flight."""
    worker, _ = make()
    ledger = Ledger()
    samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(queue_size=1), None,
                          lambda: 3)
    ledger.collect(9 * STEPS)

    def may_request():
        return [samples.may_request(number) for number in range(4)]
    assert may_request() == [True, True, True, False]  # the learner is waiting
    samples.put([make_rollout(0, STEPS)])
    assert may_request() == [True, True, True, False]  # it has not taken the train batch yet
    samples.take(0.0)
    assert may_request() == [True, True, True, False]  # it had to wait for the train batch that it uses
    samples.put([make_rollout(1, STEPS)])
    samples.take(0.0)
    assert may_request() == [True, False, False, False]  # the next train batch was already there
    samples.put([make_rollout(2, STEPS)])
    assert may_request() == [False] * 4
    if end == "wait":
        samples.take(0.0)
        with pytest.raises(queue.Empty):
            samples.take(0.0)
    else:
        samples.clear()
    assert may_request() == [True, True, True, False]


def test_incomplete_train_batches_and_old_rollouts_count_as_requested_shares(make):
    """Check requests of quarters of a train batch: with old rollouts, a new rollout fills half of a train batch."""
    worker, _ = make()
    for proportion, expected in ((0.0, 4), (1.0, 2)):
        ledger = Ledger()
        options = SampleQueueOptions(queue_size=1, **(
            {"replay_proportion": proportion, "replay_slots": 4} if proportion else {}))
        samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), options, 4 * STEPS, lambda: 0)
        assert [samples.may_request(number) for number in range(5)] == [number < expected for number in range(5)]
        ledger.collect(9 * STEPS)
        samples.put([make_rollout(0, STEPS)])
        share = 1  # quarters that have arrived
        assert [samples.may_request(number) for number in range(5)] == [
            share + number * (4 // expected) < 4 for number in range(5)]
        samples.clear()  # also discards the incomplete train batch
        for number in range(3):
            samples.put([make_rollout(number, STEPS)])
        assert not samples.is_ready


def test_clearing_cancels_all_uses_and_leaves_the_steps_queued(make):
    _, samples = make(num_passes=3, queue_size=4)
    samples.take(0.0)
    samples.put([make_rollout(1, STEPS)])
    samples.clear()
    assert not samples.is_ready
    assert (samples.num_dropped, samples.passes_cancelled) == (1, 2)
    with pytest.raises(queue.Empty):
        samples.take(0.0)


def test_the_oldest_version_is_used_first_if_requests_wait(make):
    worker, _ = make()
    ledger = Ledger()
    samples = SampleQueue(worker, ThreadRuntime(), ledger, threading.Event(), SampleQueueOptions(
        max_policy_lag=100, on_policy_lag="wait", queue_size=4))
    worker.version = 9
    ledger.collect(3 * STEPS)
    for version in (5, 3, 4):
        samples.put([make_rollout(version, STEPS)])
    assert [samples.take(0.0).version for _ in range(3)] == [3, 4, 5]


@pytest.mark.parametrize("queue_size", [1, 4])
def test_a_full_queue_blocks_collection(make_scheme, one_batch, recorder, queue_size):
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, algo=one_batch, num_envs=1, size=8,
                         num_col_workers=2, col_communication=ASYNC, col_in_flight=1, queue_size=queue_size)
    by_probe = len(recorder.made)
    scheme.step()
    number, deadline = -1, time.monotonic() + 10
    while number != len(recorder.made) and time.monotonic() < deadline:
        number = len(recorder.made)
        time.sleep(0.3)
    rollouts = (number - by_probe) / 8
    # One rollout is in use, and `queue_size` are queued. Because the learner had to wait for its rollout, the collector
    # thread may have one more, and each worker may have finished one.
    assert queue_size + 1 <= rollouts <= 1 + queue_size + 1 + 2


def test_queue_timeout_s(make_scheme):
    scheme = make_scheme(SleepEnv, {"step_s": 0.1}, num_envs=1, size=20, num_col_workers=2, col_communication=ASYNC,
                         queue_timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(LearnerStarvedError, match=r"0.3 s.*queue_timeout_s"):
        scheme.step()
    assert time.monotonic() - start < 1.5
