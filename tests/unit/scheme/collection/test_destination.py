"""Check the queue of a collector thread without a gradient worker: its limit, its largest fill, and how it closes."""

from __future__ import annotations

import threading

import pytest

from pytorchrl.runtime import ThreadRuntime
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.collection.destination import QUEUE_SIZE, RolloutQueue
from pytorchrl.scheme.counters import WorkerCounters


@pytest.fixture(params=[ThreadRuntime, SimulatedRuntime])
def runtime(request):
    runtime = request.param()
    yield runtime
    runtime.close()


class Putter(threading.Thread):
    """A thread that puts `count` entries into a destination."""

    def __init__(self, destination, count):
        super().__init__(name="putter", daemon=True)
        self.destination, self.count, self.num_put = destination, count, 0

    def run(self):
        for _ in range(self.count):
            self.destination.put([])
            self.num_put += 1


def fill(runtime, extra):
    """Return a closing event, a destination that is full, and a thread that waits to put `extra` more entries."""
    closing = runtime.make_event()
    destination = RolloutQueue(runtime, closing)
    putter = Putter(destination, QUEUE_SIZE + extra)
    runtime.start_thread(putter)
    assert not runtime.join_thread(putter, 0.5)  # the thread waits
    assert (putter.num_put, destination.queue.qsize()) == (QUEUE_SIZE, QUEUE_SIZE)
    return closing, destination, putter


def test_a_full_queue_makes_the_thread_wait_until_there_is_room(runtime):
    _, destination, putter = fill(runtime, 3)
    for _ in range(3):
        assert destination.queue.get(timeout=5.0) == []
        assert destination.invariant()
    assert runtime.join_thread(putter, 5.0)
    counters = WorkerCounters()
    destination.count(counters)
    assert counters == WorkerCounters(queued_batches=QUEUE_SIZE, queue_peak=QUEUE_SIZE)


def test_closing_ends_the_wait_for_room(runtime):
    closing, destination, putter = fill(runtime, 3)
    closing.set()
    assert runtime.join_thread(putter, 5.0)
    assert destination.queue.qsize() == QUEUE_SIZE  # the entries that did not fit were discarded


def test_a_drain_makes_room(runtime):
    _, destination, putter = fill(runtime, 1)
    destination.begin_drain()
    assert runtime.join_thread(putter, 5.0)
    destination.end_drain(0.0)
    assert destination.queue.empty()
    assert destination.peak == QUEUE_SIZE
