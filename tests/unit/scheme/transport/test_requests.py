"""Check requests to the workers of one set: order, times, errors and losses, and the same order in a replayed run."""

from __future__ import annotations

import pytest

from pytorchrl.errors import ReplayError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Journal
from pytorchrl.runtime.journal import Recording, Replaying
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.requests import Requests


class Sleeper:
    """A worker that sleeps for the given time before it answers."""

    def __init__(self, runtime):
        self._sleep = runtime.sleep

    def answer(self, number, seconds):
        self._sleep(seconds)
        if number < 0:
            raise ValueError(f"number {number}")
        return number


class Side:
    """Three workers, and the requests to them."""

    def __init__(self, journal=None, seconds_of=lambda number: 0.0, costs=None, policy="restart"):
        self.runtime = SimulatedRuntime(SimulatedRuntime.Options(
            costs={"message": 0.0, "start": 0.0} | (costs or {})))
        self.handles = [self.start(index) for index in range(3)]
        self.supervisor = Supervisor(self.handles, self.replace, self.runtime,
                                     Supervisor.Options(on_worker_failure=policy, worker_timeout_s=20.0), 0)
        self.lost, self.replaced = [], []
        self.journal = journal(self.runtime) if journal else Journal()
        self.requests = Requests(self.runtime, self.supervisor, self.journal, seconds_of, lambda number: (number,),
                                 self.lost.append, self.replaced.append)

    def start(self, index):
        return self.runtime.start_actor(Sleeper, {"runtime": self.runtime}, name=f"worker {index + 1}", resources={})

    def replace(self, index):
        self.runtime.kill(self.handles[index])
        self.handles[index] = self.start(index)

    def ask(self, index, number, seconds=0.0):
        self.requests.add(index, self.handles[index].submit(Sleeper.answer, number, seconds))

    def poll(self, timeout_s=60.0):
        found, supervisor = list(self.requests.poll(timeout_s)), self.supervisor
        gone = supervisor.gone
        assert not gone & supervisor._untried
        assert supervisor._due.keys() <= gone
        assert not gone & supervisor._since.keys()
        return found

    def poll_all(self):
        found = []
        while len(self.requests):
            found += self.poll()
        return found


@pytest.fixture
def make():
    """Return a function that starts three workers, and returns them with a `Requests` object, as a `Side`."""
    sides = []

    def make_(**options):
        sides.append(Side(**options))
        return sides[-1]
    yield make_
    for side in sides:
        side.runtime.close()


def test_answers_are_returned_in_order_of_arrival(make):
    side = make()
    for index, seconds in enumerate((3.0, 1.0, 2.0)):
        side.ask(index, 10 + index, seconds)
    assert side.requests.owners() == [0, 1, 2]
    assert side.poll(0.5) == []
    assert side.poll_all() == [(1, 11), (2, 12), (0, 10)]
    assert side.runtime.now() == pytest.approx(3.0)


def test_a_worker_answers_in_the_order_of_its_calls(make):
    side = make()
    for number in range(4):
        side.ask(1, number, 4.0 - number)
    assert side.poll_all() == [(1, number) for number in range(4)]


def test_an_error_of_a_worker_is_raised_and_its_other_calls_continue(make):
    side = make()
    side.ask(0, -5)
    side.ask(1, 7, 1.0)
    with pytest.raises(ValueError, match="number -5"):
        side.poll()
    assert side.poll() == [(1, 7)]
    side.runtime.sleep(1000.0)
    side.ask(2, 8)
    assert side.poll() == [(2, 8)]
    assert side.lost == []  # an error is also an answer, so worker 0 has no open call


def test_calls_of_a_lost_worker_are_discarded_and_it_is_replaced(make):
    side = make()
    for number in range(3):
        side.ask(0, number, 1.0)
    side.ask(1, 5, 2.0)
    side.runtime.kill(side.handles[0])
    assert side.poll_all() == [(1, 5)]
    assert (side.lost, len(side.requests)) == ([0], 0)
    while not side.replaced:
        side.poll(1.0)
    side.ask(0, 9)
    assert side.poll() == [(0, 9)]
    assert side.replaced == [0]


def test_a_worker_without_an_answer_for_too_long_is_lost(make):
    side = make()
    side.ask(0, 1)
    side.ask(1, 2)
    side.poll_all()
    side.ask(0, 1, 1000.0)
    side.ask(1, 2, 5.0)
    assert side.poll() == [(1, 2)]
    while not side.lost:
        assert side.poll(1.0) == []
    assert side.lost == [0]
    assert 20.0 <= side.runtime.now() <= 25.0


def test_a_worker_without_calls_is_not_hung_while_others_work(make):
    side = make()
    for index in (0, 1):
        side.ask(index, index)
    side.poll_all()
    side.ask(0, 3)
    side.ask(1, 4, 15.0)
    assert side.poll() == [(0, 3)]
    assert side.poll() == [(1, 4)]
    side.ask(1, 5, 15.0)
    assert side.poll() == [(1, 5)]
    assert side.poll(0.0) == []
    assert side.lost == []


def test_a_late_answer_of_a_worker_that_was_given_up_is_dropped_and_not_counted(make):
    """Check a hung worker that cannot be killed, such as a thread, and that answers after it was replaced."""
    side = make()
    side.runtime.kill = lambda handle: False
    side.ask(0, 1)
    side.poll_all()
    side.ask(0, 2, 30.0)
    late = next(iter(side.requests._open))
    while not side.replaced:
        assert side.poll(1.0) == []
    assert side.runtime.now() < 30.0
    side.ask(0, 3, 20.0)
    assert side.poll() == [(0, 3)]
    assert side.runtime.outcome(late, 0.0).value == 2  # the late answer has arrived
    assert (side.poll(0.0), len(side.requests)) == ([], 0)
    assert side.supervisor._results == [1, 0, 0]


def test_an_answer_that_waits_to_be_received_is_not_a_hang(make):
    side = make()
    side.ask(0, 1, 1.0)
    side.runtime.sleep(1000.0)
    assert side.poll() == [(0, 1)]
    assert side.lost == []


def test_a_worker_whose_loss_is_already_known_is_lost_once(make):
    side = make()
    side.ask(2, 1, 1.0)
    side.requests.lose(2, WorkerLostError("gone"))
    side.requests.lose(2, WorkerLostError("gone"))
    assert side.lost == [2]
    assert side.poll(0.1) == []


def test_the_loss_of_a_worker_is_raised_if_requested(make):
    side = make(policy="raise")
    side.ask(0, 1, 1.0)
    side.runtime.kill(side.handles[0])
    with pytest.raises(WorkerLostError):
        side.poll_all()


def test_send_seconds_exclude_the_workers_own_time(make):
    """Check the send times if each message takes 0.25 s.

    An answer with a number below 10 does not report the worker's own time.
    """
    side = make(seconds_of=lambda number: 1.0 if number >= 10 else None, costs={"message": 0.25})
    side.ask(0, 10, 1.0)
    side.poll_all()
    assert side.requests.take_send_s() == pytest.approx(0.5)
    assert side.requests.take_send_s() == 0.0
    side.ask(0, 1, 0.5)
    side.poll_all()
    assert side.requests.take_send_s() == 0.0  # this call is counted with the next answer that reports a time
    side.ask(0, 11, 0.5)
    side.poll_all()
    assert side.requests.take_send_s() == pytest.approx(1.0)
    side.ask(0, 1, 0.5)
    side.poll_all()
    side.requests.forget_waits()
    side.ask(0, 12, 1.0)
    side.poll_all()
    assert side.requests.take_send_s() == pytest.approx(0.5)


def test_waits_for_a_lost_worker_do_not_count_as_send_seconds_of_its_replacement(make):
    side = make(seconds_of=lambda number: 1.0 if number >= 10 else None, costs={"message": 0.25})
    side.ask(0, 1, 7.0)
    side.poll_all()
    side.ask(0, 2, 9.0)
    side.runtime.kill(side.handles[0])
    while not side.replaced:
        side.poll(1.0)
    side.ask(0, 10, 1.0)
    side.poll_all()
    assert side.requests.take_send_s() == pytest.approx(0.5)


def test_send_seconds_are_not_negative(make):
    """Check a worker that reports more seconds than its caller has waited, because it began before the call."""
    side = make(seconds_of=lambda number: 1.0 if number == 10 else 5.0, costs={"message": 0.25})
    side.ask(0, 11, 1.0)
    side.poll_all()
    side.ask(0, 10, 1.0)
    side.poll_all()
    assert side.requests.take_send_s() == pytest.approx(0.5)


def test_finished_answers_are_returned_at_the_end_and_calls_discarded(make):
    side = make()
    side.ask(0, 3, 1.0)
    side.ask(1, 4, 100.0)
    first, second = side.requests.finish(5.0)
    assert (first.value, second.value) == (3, None)
    assert len(side.requests) == 0


def train(side, seconds):
    """Send each worker two requests, and return the answers in order; unless a record is replayed, also kill worker 2.
    """
    for index in range(3):
        for call in range(2):
            side.ask(index, 10 * index + call, seconds[index])
    if side.journal.upcoming() is None:
        side.runtime.kill(side.handles[2])
    return side.poll_all()


def test_a_record_determines_the_order_of_answers_and_losses(make):
    first = make(journal=lambda runtime: Recording())
    answers = train(first, (3.0, 2.0, 1.0))
    assert first.lost == [2]
    record = first.journal.take()
    assert [event for event in record.events if event[0] == "answer"] == [
        ("answer", index, number) for index, number in answers]
    again = make(journal=lambda runtime: Replaying("root", record, runtime.simulation))
    assert train(again, (1.0, 3.0, 2.0)) == answers  # the workers' times differ from those of the recorded run
    assert again.lost == [2]


def test_an_answer_that_differs_from_the_record_is_an_error(make):
    first = make(journal=lambda runtime: Recording())
    first.ask(0, 5)
    first.poll_all()
    record = first.journal.take()
    again = make(journal=lambda runtime: Replaying("root", record, runtime.simulation))
    again.ask(0, 6)
    with pytest.raises(ReplayError, match="the record has answer 0 5, the replay has answer 0 6"):
        again.poll_all()
    assert [outcome.value for outcome in again.requests.finish(1.0)] == [6]  # so that its steps can be counted


def test_errors_are_recorded_by_class(make):
    side = make(journal=lambda runtime: Recording())
    side.ask(0, -1)
    with pytest.raises(ValueError, match="number -1"):
        side.poll_all()
    side.ask(1, 1, 1.0)
    side.requests.lose(1, WorkerDiedError("gone"))
    assert side.journal.take().events == [("error", 0, "ValueError"), ("lost", 1)]
