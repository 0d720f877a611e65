"""Tests of tasks on a virtual clock: their order, the time, deadlocks, and how tasks end."""

from __future__ import annotations

import math
import threading
import time

import pytest

from pytorchrl.errors import DeadlockError
from pytorchrl.runtime.schedule import Ended, Schedule, Signal, Task


@pytest.fixture
def make_schedule():
    """Return a function that makes schedules; all their tasks are ended after the test."""
    made = []

    def make(seed=0):
        made.append(Schedule(seed))
        return made[-1]
    yield make
    for schedule in made:
        schedule.end_all()
        assert len(schedule.tasks) == 1


def spawn(schedule, body, name="task"):
    task, thread = Task(name, None), threading.Thread(name=name, daemon=True)
    schedule.start(task, thread, body)
    return task


def run_to_the_end(schedule, tasks):
    for task in tasks:
        assert schedule.join(task, math.inf)


def test_the_clock_advances_with_sleeps_and_the_earliest_task_runs_first(make_schedule):
    schedule, seen = make_schedule(), []

    def sleeper(name, *naps):
        def body():
            for nap in naps:
                schedule.sleep(nap)
                seen.append((name, schedule.now))
        return body

    run_to_the_end(schedule, [spawn(schedule, sleeper("a", 3.0, 1.0)), spawn(schedule, sleeper("b", 1.0, 2.5))])
    assert seen == [("b", 1.0), ("a", 3.0), ("b", 3.5), ("a", 4.0)]
    assert schedule.now == 4.0


def test_ties_are_broken_by_the_seed_alone(make_schedule):
    def order(seed):
        schedule, seen = make_schedule(seed), []
        run_to_the_end(schedule, [spawn(schedule, lambda i=i: seen.append(i)) for i in range(6)])
        return tuple(seen)

    assert order(3) == order(3)
    orders = {order(seed) for seed in range(40)}
    assert len(orders) > 30
    assert {first for first, *_ in orders} == set(range(6))  # each task may be first


def test_only_one_task_runs_at_a_time(make_schedule):
    schedule, inside = make_schedule(), []

    def body():
        for _ in range(20):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(1e-4)  # releases Python's lock, so another task that could run would run now
            inside.pop()
            schedule.sleep(0.0)

    run_to_the_end(schedule, [spawn(schedule, body) for _ in range(5)])


def test_a_waiting_task_is_woken_only_by_its_signal(make_schedule):
    schedule, signal, other, box = make_schedule(), Signal(), Signal(), []
    woken = []

    def consumer():
        assert schedule.wait_until(lambda: bool(box), [signal], 10.0, "something")
        woken.append(schedule.now)

    def producer():
        schedule.sleep(1.0)
        schedule.notify(other)
        schedule.sleep(1.0)
        box.append(1)
        schedule.notify(signal)

    run_to_the_end(schedule, [spawn(schedule, consumer), spawn(schedule, producer)])
    assert woken == [2.0]


def test_an_unmet_wait_ends_at_its_deadline(make_schedule):
    schedule = make_schedule()
    spawn(schedule, lambda: schedule.sleep(5.0))
    assert not schedule.wait_until(lambda: False, [Signal()], 2.0, "nothing")
    assert schedule.now == 2.0
    assert not schedule.wait_until(lambda: False, [Signal()], 0.0, "nothing")
    assert schedule.now == 2.0


def test_later_calls_a_function_at_its_time(make_schedule):
    schedule, seen = make_schedule(), []
    schedule.later(1.0, lambda: seen.append(schedule.now))
    schedule.sleep(0.5)
    assert seen == []
    schedule.sleep(1.0)
    assert seen == [1.0]


def test_a_deadlock_is_reported_immediately_with_the_waits_of_tasks(make_schedule):
    schedule = make_schedule()
    spawn(schedule, lambda: schedule.wait_until(lambda: False, [Signal()], math.inf, "Godot"), "Vladimir")
    with pytest.raises(DeadlockError, match="Vladimir waits for Godot"):
        schedule.wait_until(lambda: False, [Signal()], math.inf, "Estragon")


def test_tasks_that_only_poll_are_a_deadlock_too(make_schedule):
    """Check that tasks count as deadlocked if they repeat a wait that always times out."""
    schedule = make_schedule()

    def poll():
        while True:
            schedule.wait_until(lambda: False, [Signal()], 0.1, "Godot")

    spawn(schedule, poll, "Vladimir")
    with pytest.raises(DeadlockError, match="Vladimir waits for Godot"):
        schedule.wait_until(lambda: False, [Signal()], 1e6, "Godot too")
    assert schedule.now < 10.0


def test_polling_while_others_work_is_not_a_deadlock(make_schedule):
    schedule = make_schedule()
    worker = spawn(schedule, lambda: schedule.sleep(1000.0))
    while not worker.finished:
        schedule.wait_until(lambda: False, [Signal()], 0.1, "the worker")
    assert schedule.now == pytest.approx(1000.0, abs=0.2)


def test_an_ended_task_unwinds_where_it_waits(make_schedule):
    schedule, unwound = make_schedule(), []

    def body():
        try:
            schedule.sleep(math.inf)
        finally:
            unwound.append(schedule.now)
            with pytest.raises(Ended):  # an ended task cannot wait again
                schedule.sleep(1.0)

    task = spawn(schedule, body)
    schedule.sleep(2.0)
    schedule.end(task)
    assert schedule.join(task, 1.0)
    assert unwound == [2.0]
    assert not task.thread.is_alive()


def test_a_task_that_is_ended_before_it_starts_never_runs(make_schedule):
    schedule, ran = make_schedule(), []
    task = spawn(schedule, lambda: ran.append(1))
    schedule.end(task)
    assert schedule.join(task, 1.0)
    assert ran == []


def test_a_foreign_thread_is_refused(make_schedule):
    schedule, errors = make_schedule(), []

    def foreign():
        try:
            schedule.sleep(1.0)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert "start threads with Runtime.start_thread" in errors[0]


def test_events_are_counted_digested_and_checked(make_schedule):
    def digest(names):
        schedule = make_schedule()
        for name in names:
            schedule.record(name)
        assert schedule.num_events == len(names)
        assert [line.split(": ")[1] for line in schedule.last_events] == names
        return schedule.digest

    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(["b", "a"])
    schedule, seen = make_schedule(), []
    schedule.after_event = lambda: seen.append(schedule.num_events)
    schedule.record("x")
    assert seen == [1]


INTERRUPTED = """
import signal, threading
from pytorchrl.runtime.schedule import Schedule, Task

signal.signal(signal.SIGINT, signal.default_int_handler)
for seed in range(50):
    schedule = Schedule(seed)

    def body():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sum(range(1_000_000))  # long enough for the driver to learn of it while this task runs
        while True:
            schedule.sleep(0.001)

    schedule.start(Task("task", None), threading.Thread(daemon=True), body)
    try:
        while True:
            schedule.sleep(0.1)
    except KeyboardInterrupt:
        assert schedule.current is schedule.tasks[0]
    schedule.end_all()
    assert threading.active_count() == 1
"""


def test_an_interrupt_reaches_the_driver_while_another_task_runs(run_forked):
    """Check 50 times that only the driver runs after an interrupt (Ctrl-C) that arrives while another task runs."""
    result = run_forked("-c", INTERRUPTED, timeout=100)
    assert result.returncode == 0, result.stderr
