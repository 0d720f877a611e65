"""Tests of tasks on a virtual clock: their order, the time, deadlocks, and how tasks end."""

from __future__ import annotations

import math
import threading
import time

import pytest

from pytorchrl.errors import CallOrderError, DeadlockError
from pytorchrl.runtime.simulation import Ended, Simulation, Signal, Task


@pytest.fixture
def make_simulation():
    """Return a function that makes schedules; all their tasks are ended after the test."""
    made = []

    def make(seed=0):
        made.append(Simulation(seed))
        return made[-1]
    yield make
    for simulation in made:
        simulation.end_all()
        assert len(simulation.tasks) == 1


def spawn(simulation, body, name="task"):
    task, thread = Task(name, None), threading.Thread(name=name, daemon=True)
    simulation.start(task, thread, body)
    return task


def run_to_the_end(simulation, tasks):
    for task in tasks:
        assert simulation.join(task, math.inf)


def test_the_clock_advances_with_sleeps_and_the_earliest_task_runs_first(make_simulation):
    simulation, seen = make_simulation(), []

    def sleeper(name, *naps):
        def body():
            for nap in naps:
                simulation.sleep(nap)
                seen.append((name, simulation.now))
        return body

    run_to_the_end(simulation, [spawn(simulation, sleeper("a", 3.0, 1.0)), spawn(simulation, sleeper("b", 1.0, 2.5))])
    assert seen == [("b", 1.0), ("a", 3.0), ("b", 3.5), ("a", 4.0)]
    assert simulation.now == 4.0


def test_ties_are_broken_by_the_seed_alone(make_simulation):
    def order(seed):
        simulation, seen = make_simulation(seed), []
        run_to_the_end(simulation, [spawn(simulation, lambda i=i: seen.append(i)) for i in range(6)])
        return tuple(seen)

    assert order(3) == order(3)
    orders = {order(seed) for seed in range(40)}
    assert len(orders) > 30
    assert {first for first, *_ in orders} == set(range(6))  # each task may be first


def test_only_one_task_runs_at_a_time(make_simulation):
    simulation, inside = make_simulation(), []

    def body():
        for _ in range(20):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(1e-4)  # releases Python's lock, so another task that could run would run now
            inside.pop()
            simulation.sleep(0.0)

    run_to_the_end(simulation, [spawn(simulation, body) for _ in range(5)])


def test_a_waiting_task_is_woken_only_by_its_signal(make_simulation):
    simulation, signal, other, box = make_simulation(), Signal(), Signal(), []
    woken = []

    def consumer():
        assert simulation.wait_until(lambda: bool(box), [signal], 10.0, "something")
        woken.append(simulation.now)

    def producer():
        simulation.sleep(1.0)
        simulation.notify(other)
        simulation.sleep(1.0)
        box.append(1)
        simulation.notify(signal)

    run_to_the_end(simulation, [spawn(simulation, consumer), spawn(simulation, producer)])
    assert woken == [2.0]


def test_an_unmet_wait_ends_at_its_deadline(make_simulation):
    simulation = make_simulation()
    spawn(simulation, lambda: simulation.sleep(5.0))
    assert not simulation.wait_until(lambda: False, [Signal()], 2.0, "nothing")
    assert simulation.now == 2.0
    assert not simulation.wait_until(lambda: False, [Signal()], 0.0, "nothing")
    assert simulation.now == 2.0


def test_later_calls_a_function_at_its_time(make_simulation):
    simulation, seen = make_simulation(), []
    simulation.later(1.0, lambda: seen.append(simulation.now))
    simulation.sleep(0.5)
    assert seen == []
    simulation.sleep(1.0)
    assert seen == [1.0]


def test_a_deadlock_is_reported_immediately_with_the_waits_of_tasks(make_simulation):
    simulation = make_simulation()
    spawn(simulation, lambda: simulation.wait_until(lambda: False, [Signal()], math.inf, "Godot"), "Vladimir")
    with pytest.raises(DeadlockError, match="Vladimir waits for Godot"):
        simulation.wait_until(lambda: False, [Signal()], math.inf, "Estragon")


def test_tasks_that_only_poll_are_a_deadlock_too(make_simulation):
    """Check that tasks count as deadlocked if they repeat a wait that always times out."""
    simulation = make_simulation()

    def poll():
        while True:
            simulation.wait_until(lambda: False, [Signal()], 0.1, "Godot")

    spawn(simulation, poll, "Vladimir")
    with pytest.raises(DeadlockError, match="Vladimir waits for Godot"):
        simulation.wait_until(lambda: False, [Signal()], 1e6, "Godot too")
    assert simulation.now < 10.0


def test_polling_while_others_work_is_not_a_deadlock(make_simulation):
    simulation = make_simulation()
    worker = spawn(simulation, lambda: simulation.sleep(1000.0))
    while not worker.finished:
        simulation.wait_until(lambda: False, [Signal()], 0.1, "the worker")
    assert simulation.now == pytest.approx(1000.0, abs=0.2)


def test_an_ended_task_unwinds_where_it_waits(make_simulation):
    simulation, unwound = make_simulation(), []

    def body():
        try:
            simulation.sleep(math.inf)
        finally:
            unwound.append(simulation.now)
            with pytest.raises(Ended):  # an ended task cannot wait again
                simulation.sleep(1.0)

    task = spawn(simulation, body)
    simulation.sleep(2.0)
    simulation.end(task)
    assert simulation.join(task, 1.0)
    assert unwound == [2.0]
    assert not task.thread.is_alive()


def test_a_task_that_is_ended_before_it_starts_never_runs(make_simulation):
    simulation, ran = make_simulation(), []
    task = spawn(simulation, lambda: ran.append(1))
    simulation.end(task)
    assert simulation.join(task, 1.0)
    assert ran == []


def test_a_foreign_thread_is_refused(make_simulation):
    simulation, errors = make_simulation(), []

    def foreign():
        try:
            simulation.sleep(1.0)
        except CallOrderError as error:
            errors.append(str(error))

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert "start threads with Runtime.start_thread" in errors[0]
    run_to_the_end(simulation, [spawn(simulation, foreign)])  # as Runtime.start_thread does
    assert len(errors) == 1


def test_events_are_counted_digested_and_checked(make_simulation):
    def digest(names):
        simulation = make_simulation()
        for name in names:
            simulation.record(name)
        assert simulation.num_events == len(names)
        assert [line.split(": ")[1] for line in simulation.last_events] == names
        return simulation.digest

    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(["b", "a"])
    simulation, seen = make_simulation(), []
    simulation.after_event = lambda: seen.append(simulation.num_events)
    simulation.record("x")
    assert seen == [1]


INTERRUPTED = """
import signal, threading
from pytorchrl.runtime.simulation import Simulation, Task

signal.signal(signal.SIGINT, signal.default_int_handler)
for seed in range(50):
    simulation = Simulation(seed)

    def body():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sum(range(1_000_000))  # long enough for the driver to learn of it while this task runs
        while True:
            simulation.sleep(0.001)

    simulation.start(Task("task", None), threading.Thread(daemon=True), body)
    try:
        while True:
            simulation.sleep(0.1)
    except KeyboardInterrupt:
        assert simulation.current is simulation.tasks[0]
    simulation.end_all()
    assert threading.active_count() == 1
"""


def test_an_interrupt_reaches_the_driver_while_another_task_runs(run_forked):
    """Check 50 times that only the driver runs after an interrupt (Ctrl-C) that arrives while another task runs."""
    result = run_forked("-c", INTERRUPTED, timeout=100)
    assert result.returncode == 0, result.stderr
