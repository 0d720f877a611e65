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


def test_a_released_recording_records_nothing_more():
    journal = Recording()
    with journal.writing():
        journal.note("answer", 1)
    journal.release()
    journal.note("answer", 2)
    with journal.writing():
        pass
    assert journal.take() == Section([("answer", 1)], [0])


def run_tasks(simulation, **bodies):
    """Run functions as tasks of a simulation, and return whether all of them have ended after 100 s."""
    tasks = [Task(name, None) for name in bodies]
    for task, body in zip(tasks, bodies.values(), strict=True):
        simulation.start(task, threading.Thread(daemon=True), body)
    return all(simulation.join(task, 100.0) for task in tasks)


@pytest.mark.parametrize("turns", [[0, 2], [1]])
def test_a_replay_that_is_stopped_before_the_end_of_its_record_enforces_nothing_more(simulation, turns):
    """Check a thread that waits to write: it continues as soon as the rest of the record is discarded."""
    journal, times = Replaying("GWorker 1", Section([("answer", 1), ("answer", 2)], turns), simulation), []

    def learn():
        for _ in range(3):
            with journal.writing():
                times.append(simulation.now)

    def stop():
        simulation.sleep(5.0)
        assert journal.upcoming() == ("answer", 1)
        journal.release()
    assert run_tasks(simulation, learn=learn, stop=stop)
    assert times == ([0.0] if turns[0] == 0 else []) + [5.0] * (3 - (turns[0] == 0))
    assert (journal.upcoming(), journal.upcoming_of("answer", 2)) == (None, None)
    journal.note("answer", 99)
    with journal.reading():
        pass


def test_a_thread_that_waits_for_its_turn_gets_the_error_of_the_collector_thread(simulation):
    journal, found = Replaying("GWorker 1", Section([("answer", 1)], [1]), simulation), []

    def learn():
        try:
            with journal.writing():
                found.append("written")
        except KeyError as error:
            found.append(error)

    def fail():
        simulation.sleep(5.0)
        journal.fail(failure)
    failure = KeyError("collector")
    assert run_tasks(simulation, learn=learn, fail=fail)
    assert found == [failure]
    with journal.reading():  # its turn has come, so the failure does not matter
        found.append("read")
    assert found == [failure, "read"]


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
