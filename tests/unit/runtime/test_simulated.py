"""Tests of simulated workers: which workers end together, and when a worker that is starting receives signals."""

from __future__ import annotations

import pytest

from pytorchrl.runtime.simulated import SimulatedRuntime


class Parent:
    """A worker that starts another worker."""

    def __init__(self, runtime, generations):
        self.child = runtime.start_actor(Parent, {"runtime": runtime, "generations": generations - 1},
                                         name=f"child {generations}",
                                         resources={}) if generations else None

    def ready(self):
        return True


class SignalRecorder:
    """A worker that records the signals it receives, in order."""

    def __init__(self):
        self.words = []

    def record(self, word):
        self.words.append(word)

    def recorded(self):
        return list(self.words)


@pytest.fixture
def runtime():
    runtime = SimulatedRuntime(SimulatedRuntime.Options(costs={"start": 1.0, "message": 0.1}))
    yield runtime
    runtime.close()


def test_workers_end_with_the_worker_that_started_them(runtime):
    others = runtime.start_actor(Parent, {"runtime": runtime, "generations": 1}, name="other", resources={})
    handle = runtime.start_actor(Parent, {"runtime": runtime, "generations": 2}, name="parent", resources={})
    runtime.sleep(10.0)
    assert sorted(runtime.running) == ["child 1", "child 1", "child 2", "other", "parent"]
    assert runtime.kill(handle)
    assert sorted(runtime.running) == ["child 1", "other"]
    assert runtime.outcome(others.submit(Parent.ready), 5.0).unwrap()


def test_signals_to_a_starting_worker_are_delivered_once_it_is_built(runtime):
    handle = runtime.start_actor(SignalRecorder, {}, name="recorder", resources={})
    signalled = []
    # The worker takes a second to start; each signal arrives before the next one is sent.
    for word in ("first", "second"):
        signalled.append(runtime.signal(handle, "record", (word,), {}))
        runtime.sleep(0.2)
    assert all(not runtime.wait([future], 0.0) for future in signalled)
    assert runtime.outcome(handle.submit(SignalRecorder.recorded), 5.0).unwrap() == ["first", "second"]
    assert len(runtime.wait(signalled, 0.0)) == 2


def test_the_largest_number_of_calls_is_recorded(runtime):
    handle = runtime.start_actor(SignalRecorder, {}, name="recorder", resources={})
    for number in (3, 2):
        futures = [handle.submit(SignalRecorder.recorded) for _ in range(number)]
        runtime.sleep(2.0)  # all calls arrive while the worker starts or waits
        assert runtime.wait(futures, 0.0) == futures
    assert handle.native.peak == 3
