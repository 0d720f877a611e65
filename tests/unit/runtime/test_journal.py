"""Tests of journals: what is recorded, and what a replay compares."""

from __future__ import annotations

import threading

import pytest

from pytorchrl.errors import ReplayError
from pytorchrl.runtime.journal import Section, Recording, Replaying
from pytorchrl.runtime.simulation import Simulation, Task


@pytest.fixture
def simulation():
    simulation = Simulation(0)
    yield simulation
    simulation.end_all()


def test_a_recording_returns_each_event_once():
    journal = Recording()
    journal.note("answer", 1, 40, 3)
    assert journal.take() == Section([("answer", 1, 40, 3)], [])
    journal.note("update", 2)
    assert journal.take() == Section([("update", 2)], [])


@pytest.mark.parametrize("event", [
    ("ask", 1, 40, 3), ("answer", 2, 40, 3), ("answer", 1, 41, 3), ("answer", 1, 40, 4), ("answer", 1, 40),
    ("answer", 1, 40, 3, 0)])
def test_every_number_of_an_event_is_compared(simulation, event):
    journal = Replaying("GWorker 1", Section([("start", 0), ("answer", 1, 40, 3)], []), simulation)
    journal.note("start", 0)
    with pytest.raises(ReplayError, match="at event 2 of GWorker 1: the record has answer 1 40 3, the replay has "
                                          f"{' '.join(map(str, event))}$"):
        journal.note(*event)


def test_a_replay_accepts_its_events_in_order_and_then_any_event(simulation):
    journal = Replaying("GWorker 1", Section([("answer", 1, 40, 3), ("ask", 2)], []), simulation)
    assert journal.upcoming() == ("answer", 1, 40, 3)
    assert journal.upcoming_of("ask", 2) == ("ask", 2)
    journal.note("answer", 1, 40, 3)
    journal.note("ask", 2)
    assert journal.upcoming() is None
    journal.note("answer", 5, 0)


def test_a_recording_counts_the_reads_before_each_outermost_write():
    journal = Recording()
    for _ in range(2):
        with journal.reading():
            pass
    with journal.writing(), journal.writing():
        pass
    with journal.writing():
        pass
    assert journal.take() == Section([], [2, 0])


def test_a_write_that_is_not_in_the_record_follows_all_recorded_events(simulation):
    journal, order = Replaying("GWorker 1", Section([("answer", 1), ("answer", 2)], [0]), simulation), []

    def learn():
        for number in range(2):
            with journal.writing():
                order.append(f"write {number}")

    def collect():
        for number in (1, 2):
            with journal.reading():
                order.append(f"read {number}")
            simulation.sleep(1.0)
            journal.note("answer", number)
            order.append(f"answer {number}")

    tasks = [Task(body.__name__, None) for body in (learn, collect)]
    for task, body in zip(tasks, (learn, collect), strict=True):
        simulation.start(task, threading.Thread(daemon=True), body)
    assert all(simulation.join(task, 100.0) for task in tasks)
    assert order == ["write 0", "read 1", "answer 1", "read 2", "answer 2", "write 1"]
