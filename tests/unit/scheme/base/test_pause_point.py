"""Tests of a thread that is paused and resumed on the virtual clock."""

from __future__ import annotations

import threading

import pytest

from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.base.pause_point import PausePoint


class Loop(threading.Thread):
    """A thread that counts its rounds, each of which takes one second of virtual time."""

    def __init__(self, runtime):
        super().__init__(daemon=True)
        self.runtime, self.point, self.rounds, self.is_over = runtime, PausePoint(runtime), 0, False

    def run(self):
        while not self.is_over:
            self.point.pause_if_requested(lambda: self.is_over)
            self.runtime.sleep(1.0)
            self.rounds += 1


def check(point):
    assert point._is_requested or not point._is_paused


@pytest.fixture
def loop():
    runtime = SimulatedRuntime()
    made = Loop(runtime)
    runtime.simulation.after_event = lambda: check(made.point)
    runtime.start_thread(made)
    yield made
    made.is_over = True
    assert runtime.join_thread(made, 5.0)
    runtime.close()


def test_a_paused_thread_does_nothing_until_it_resumes(loop):
    loop.runtime.sleep(3.5)
    assert loop.point.request(loop.is_alive, 2.0)
    paused_at = loop.rounds
    loop.runtime.sleep(10.0)
    assert loop.rounds == paused_at == 4
    loop.point.resume()
    loop.runtime.sleep(5.0)
    assert loop.rounds > paused_at


def test_an_unmet_pause_request_stays_pending(loop):
    loop.runtime.sleep(0.5)
    assert not loop.point.request(loop.is_alive, 0.2)
    loop.runtime.sleep(5.0)
    assert loop.rounds == 1


def test_a_thread_that_has_ended_counts_as_paused(loop):
    assert loop.point.request(lambda: False, 1.0)


def test_a_paused_thread_can_end(loop):
    assert loop.point.request(loop.is_alive, 2.0)
    loop.is_over = True
    assert loop.runtime.join_thread(loop, 2.5)
