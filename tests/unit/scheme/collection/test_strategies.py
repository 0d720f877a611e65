"""Tests of when a collection strategy requests rollouts, and when it ends a synchronous round early."""

from __future__ import annotations

import itertools
import threading
import types
from collections import Counter

import pytest

from pytorchrl import ASYNC, GAEBuffer
from pytorchrl.envs.testing import SleepEnv
from pytorchrl.errors import CollectionError, WorkerDiedError
from pytorchrl.runtime import Handle, Journal, Outcome, ThreadRuntime
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader


class FirstIsSlow:
    """A function that makes environments; only the first one after the probe is slow."""

    def __init__(self, step_s):
        self._step_s, self._made, self._lock = step_s, itertools.count(-1), threading.Lock()

    def __call__(self):
        with self._lock:
            number = next(self._made)
        return SleepEnv(step_s=self._step_s if number == 0 else 0.0)


def _rounds(make_scheme, one_batch, **settings):
    """Run three rounds of 3 workers, one of which is slow: each of its 40 steps takes 20 ms.

    Returns:
        The lengths of the rollouts of each round, and the number of preempted rollouts.
    """
    rounds = []

    class Watched(GAEBuffer):
        def insert_data_slice(self, rollouts):
            rounds.append(sorted(rollout.num_steps for rollout in rollouts))
            super().insert_data_slice(rollouts)
    scheme = make_scheme(FirstIsSlow(0.02), num_envs=1, size=40, storage=Watched, algo=one_batch, num_col_workers=3,
                         **settings)
    for _ in range(3):
        scheme.step()
    metrics, ledger = scheme.metrics(), scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] == sum(map(sum, rounds))  # preempted rollouts are used too
    return rounds, metrics["rollouts_preempted"]


def test_col_fraction_workers_ends_rounds_early(make_scheme, one_batch):
    full, preempted = _rounds(make_scheme, one_batch)
    assert full == [[40, 40, 40]] * 3
    assert preempted == 0
    short, preempted = _rounds(make_scheme, one_batch, col_fraction_workers=0.6, fraction_samples=0.1)
    assert all(lengths[1:] == [40, 40] and 4 <= lengths[0] < 40 for lengths in short)
    assert preempted == 3


def test_preempted_workers_collect_at_least_fraction_samples(make_scheme, one_batch):
    few, _ = _rounds(make_scheme, one_batch, col_fraction_workers=0.6, fraction_samples=0.1)
    many, _ = _rounds(make_scheme, one_batch, col_fraction_workers=0.6, fraction_samples=0.75)
    assert all(30 <= lengths[0] < 40 for lengths in many)
    assert min(lengths[0] for lengths in few) < 30


class InstantRuntime(ThreadRuntime):
    """A runtime that only records calls and signals; the test sets which calls are done at each wait."""

    def __init__(self):
        super().__init__()
        self.calls, self.signals, self.done = [], [], []
        self.asked = []  # (worker, method, arguments) of each call

    def submit(self, handle, method, args, kwargs):
        future = _FakeFuture(handle.name)
        self.calls.append((handle.name, method, future))
        self.asked.append((handle.name, method, args))
        return future

    def signal(self, handle, method, args, kwargs):
        self.signals.append((handle.name, method, args))

    def wait(self, futures, timeout_s):
        done = self.done.pop(0)
        return [future for future in futures if future.worker in done]

    def outcome(self, future, timeout_s):
        return Outcome(future.worker, Rollout(None, RolloutHeader(
            num_env_steps=1, size=1, collected_steps=1, weights_version=0, worker=int(future.worker), sequence=1)))


class _FakeFuture:
    def __init__(self, worker):
        self.worker = worker


def _fake_workers(number):
    runtime = InstantRuntime()
    return runtime, [Handle(runtime, str(index), None) for index in range(number)]


def _supervisor(workers, runtime):
    return Supervisor(workers, lambda place: None, runtime, Supervisor.Options(on_worker_failure="raise"))


class _FakeWeights:
    """A weight broadcast that never sends weights; it records in `steps` each check of whether weights are due."""

    def __init__(self, steps):
        storage = types.SimpleNamespace(rollout_size=6)
        self.local_worker = types.SimpleNamespace(journal=Journal(), storage=storage, num_envs=1)
        self.watch, self.num_rollouts_since, self._steps = Stopwatch(lambda: 0.0), 0, steps

    def attach_due(self, index=None):
        self._steps.append("refresh")

    def forget(self, index):
        pass

    def take(self, index):
        return None

    def delivered(self, index, num_steps):
        pass


def _collaborators(workers, runtime, steps):
    ledger = Ledger()
    return workers, runtime, _supervisor(workers, runtime), ledger, _FakeWeights(steps)


def _barrier(workers, runtime, **options):
    # By default, half of the workers are enough, and half of a rollout is three steps.
    options = Barrier.Options(**{"col_fraction_workers": 0.5, "fraction_samples": 0.5, **options})
    return Barrier(*_collaborators(workers, runtime, []), options, 60.0)


def test_workers_that_finish_simultaneously_also_end_a_round():
    """Check that worker 1 is preempted when three workers finish at once, although two would be enough."""
    runtime, workers = _fake_workers(4)
    runtime.done = [["0", "2", "3"], [], ["1"]]
    rounds = []
    _barrier(workers, runtime).step(rounds.append)
    assert {(name, method, args) for name, method, args in runtime.signals} == {("1", "preempt", (1, 3))}
    assert [[rollout.header.worker for rollout in item] for item in rounds] == [[0, 1, 2, 3]]


def test_no_worker_is_preempted_before_enough_have_finished():
    runtime, workers = _fake_workers(4)
    runtime.done = [["0"], ["1", "2", "3"]]
    _barrier(workers, runtime).step(lambda item: None)
    assert runtime.signals == []


@pytest.mark.parametrize(("fraction", "steps"), [(0.05, 1), (0.4, 2), (0.6, 4), (1.0, 6)])
def test_fraction_samples_is_rounded_to_at_least_one_step(fraction, steps):
    """Check the number of steps that a preempted worker must collect, of a rollout of six steps."""
    runtime, workers = _fake_workers(4)
    runtime.done = [["0", "2"], [], ["1", "3"]]
    _barrier(workers, runtime, fraction_samples=fraction).step(lambda item: None)
    assert {(name, args) for name, _, args in runtime.signals} == {("1", (1, steps)), ("3", (1, steps))}


def test_a_fraction_of_workers_that_is_a_whole_number_is_not_rounded_up():
    """Check that seven of 25 workers are enough, although 0.28 * 25 exceeds 7 in floating-point numbers."""
    runtime, workers = _fake_workers(25)
    names = list(map(str, range(25)))
    runtime.done = [names[:6], [names[6]], [], names[7:]]
    _barrier(workers, runtime, col_fraction_workers=0.28).step(lambda item: None)
    assert {name for name, *_ in runtime.signals} == set(names[7:])


class OneByOne(InstantRuntime):
    """An `InstantRuntime` in which each entry of `done` is one answer, and each worker in `cut` is preempted once."""

    def __init__(self):
        super().__init__()
        self.cut, self.time = set(), 0.0

    def now(self):
        self.time += 1.0
        return self.time

    def wait(self, futures, timeout_s):
        left = Counter(self.done.pop(0) if self.done else [])
        found = []
        for future in futures:
            if left[future.worker]:
                left[future.worker] -= 1
                found.append(future)
        return found

    def outcome(self, future, timeout_s):
        is_cut = future.worker in self.cut
        self.cut.discard(future.worker)
        return Outcome(future.worker, Rollout(None, RolloutHeader(
            num_env_steps=1, size=1, collected_steps=1, weights_version=0, worker=int(future.worker), sequence=1,
            num_steps=2 if is_cut else 6, preempted=is_cut)))


@pytest.mark.parametrize("end", ["drain", "finish"])
def test_a_drain_delivers_each_rollout_of_partial_rounds_once(end):
    """Check three rounds that were started in advance: one is delivered, and one has arrived in part."""
    runtime = OneByOne()
    workers = [Handle(runtime, str(index), None) for index in range(2)]
    strategy = _barrier(workers, runtime)
    ledger, delivered = strategy._ledger, []
    strategy.request_ahead(36)
    runtime.done = [["0", "0"], ["1"]]
    assert len(strategy.collect()) == 2
    assert ledger.snapshot().collected == 2
    if end == "finish":
        runtime.get_all = lambda futures, timeout_s: [runtime.outcome(future, timeout_s) for future in futures]
        strategy.finish(10.0)
        assert (ledger.snapshot().collected, strategy.num_in_flight()) == (6, 0)
        return
    runtime.done = [["1"], ["0"], ["1"]]
    strategy.drain(delivered.extend, 1000.0)
    assert sorted(rollout.header.worker for rollout in delivered) == [0, 0, 1, 1]
    assert ledger.snapshot().collected == 6
    strategy.drain(delivered.extend, 1000.0)
    assert (len(delivered), ledger.snapshot().collected) == (4, 6)
    before = len(runtime.calls)
    runtime.done = [["0", "1"]]
    assert [rollout.header.worker for rollout in strategy.collect()] == [0, 1]
    assert len(runtime.calls) == before + 2  # a new round has begun


@pytest.mark.parametrize("end", ["drain", "finish"])
def test_a_drain_delivers_the_rest_of_a_preempted_rollout(end):
    """Check a round that is not completed: worker 1 has delivered only the rest of its previous rollout."""
    runtime = OneByOne()
    workers = [Handle(runtime, str(index), None) for index in range(2)]
    strategy = _barrier(workers, runtime, on_straggler="finish")
    runtime.cut, runtime.done = {"1"}, [["0", "1"]]
    assert len(strategy.collect()) == 2
    runtime.done = [["1"]]
    runtime.time = 0.0
    with pytest.raises(CollectionError, match=r"no rollout from 0, 1 within 60\.0 s"):
        strategy.collect()
    delivered = []
    if end == "finish":
        runtime.get_all = lambda futures, timeout_s: [runtime.outcome(future, timeout_s) for future in futures]
        strategy.finish(10.0)
        assert strategy._ledger.snapshot().collected == 5
        return
    runtime.cut, runtime.done = {"0"}, [["0"], ["1"]]
    strategy.drain(delivered.extend, 1000.0)
    assert sorted(rollout.header.worker for rollout in delivered) == [0, 1, 1]
    assert strategy._ledger.snapshot().collected == 5
    strategy.drain(delivered.extend, 1000.0)
    assert len(delivered) == 3
    runtime.calls.clear()
    runtime.done = [["0", "1"]]
    assert len(strategy.collect()) == 2
    assert [args[1] for _, _, args in runtime.asked[-2:]] == [None, None]  # whole rollouts


def test_steps_that_are_owed_before_a_drain_are_not_collected_after_it():
    runtime = OneByOne()
    strategy = _barrier([Handle(runtime, str(index), None) for index in range(2)], runtime, on_straggler="finish")
    runtime.cut, runtime.done = {"1"}, [["0", "1"]]
    strategy.collect()
    strategy.drain(lambda item: None, 1000.0)
    runtime.done = [["0", "1"]]
    strategy.collect()
    assert [(name, args[1]) for name, _, args in runtime.asked[2:]] == [("0", None), ("1", None)]


def test_asynchronous_collection_starts_again_only_after_a_drain():
    runtime = OneByOne()
    workers, delivered = [Handle(runtime, str(index), None) for index in range(2)], []
    strategy = OnArrival(*_collaborators(workers, runtime, []), OnArrival.Options(col_in_flight=2))
    runtime.done = [["0"]]
    strategy.step(delivered.extend)
    assert (len(runtime.calls), len(delivered)) == (5, 1)
    strategy.stop_requests()
    runtime.done = [["1"]]
    strategy.step(delivered.extend)
    assert (len(runtime.calls), len(delivered)) == (5, 2)
    runtime.done = [["0"], ["0", "1"]]
    strategy.drain(delivered.extend, 1000.0)
    assert (len(runtime.calls), len(delivered), strategy.num_in_flight()) == (5, 5, 0)
    strategy.step(delivered.extend)
    assert (len(runtime.calls), len(delivered), strategy.num_in_flight()) == (9, 5, 4)


def test_no_round_is_requested_before_an_announced_drain():
    runtime, workers = _fake_workers(2)
    strategy = _barrier(workers, runtime)
    strategy.stop_requests()
    strategy.request_ahead(24)
    assert runtime.calls == []


class Losing(OneByOne):
    """A runtime in which an entry "x1" of `done` is the loss of worker 1."""

    def now(self):
        self.time += 0.01
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def kill(self, handle, timeout_s=0.0):
        pass

    def wait(self, futures, timeout_s):
        self.lost = [name[1:] for name in (self.done[0] if self.done else []) if name.startswith("x")]
        first = {future.worker: future for future in reversed(futures)}
        return [first[name] for name in self.lost] + super().wait(futures, timeout_s)

    def outcome(self, future, timeout_s):
        if future.worker in self.lost:
            self.lost.remove(future.worker)
            return Outcome(future.worker, None, WorkerDiedError("gone"))
        return super().outcome(future, timeout_s)


@pytest.fixture
def losing():
    """Return a function that makes a runtime and a synchronous strategy whose workers can be lost."""
    def make(number, policy="restart", **options):
        runtime = Losing()
        workers = [Handle(runtime, str(index), None) for index in range(number)]
        parts = list(_collaborators(workers, runtime, []))
        parts[2] = Supervisor(workers, lambda place: None, runtime, Supervisor.Options(on_worker_failure=policy))
        options = {"col_fraction_workers": 0.5, "fraction_samples": 0.5, **options}
        return runtime, Barrier(*parts, Barrier.Options(**options), 60.0)
    return make


def test_a_replacement_collects_what_is_missing_from_rounds_requested_ahead(losing):
    """Check three rounds that were started in advance; worker 1 is lost after one rollout, and once more later."""
    runtime, strategy = losing(2)
    strategy.request_ahead(36)
    runtime.done = [["1"], ["x1"], ["0"], *[[]] * 200]
    runtime.done += [["1"]]
    first = strategy.collect()
    runtime.done = [["1"], ["x1"], ["0", "0"], *[[]] * 200, ["1"], ["1"]]
    rounds = [first, strategy.collect(), strategy.collect()]
    assert [[rollout.header.worker for rollout in item] for item in rounds] == [[0, 1]] * 3
    # Six requests at the start. The first replacement had to collect two rollouts, and the second replacement one.
    assert [name for name, *_ in runtime.calls].count("0") == 3
    assert [name for name, *_ in runtime.calls].count("1") == 3 + 2 + 1
    assert strategy.delivered_by_lost == 2
    assert strategy.num_in_flight() == 0
    assert strategy.take_send_s() == 0.0  # the learner did not wait for these rounds
    runtime.done = [["0", "1"]]
    strategy.collect()
    assert len(runtime.calls) == 9 + 2
    assert strategy.take_send_s() > 0.0


@pytest.mark.parametrize(("policy", "preempted"), [("restart", set()), ("ignore", {"2", "3"})])
def test_a_lost_worker_counts_among_those_that_must_finish_only_if_it_is_replaced(losing, policy, preempted):
    """Check five workers of which one is lost: half of five is three workers, and half of four is two."""
    runtime, strategy = losing(5, policy)
    runtime.done = [["x4"], ["0"], ["1"], [], ["2", "3"], *[[]] * 200, ["4"]]
    found, wait = [], runtime.wait

    def watched(futures, timeout_s):
        found.append({name for name, *_ in runtime.signals})
        return wait(futures, timeout_s)
    runtime.wait = watched
    assert len(strategy.collect()) == (5 if policy == "restart" else 4)
    assert found[3] == preempted  # after the answers of workers 0 and 1


def test_steps_that_are_missing_from_a_preempted_rollout_are_owed_once():
    def header(num_steps, *, preempted):
        return RolloutHeader(num_env_steps=2 * num_steps, size=2 * num_steps, collected_steps=0, weights_version=0,
                             worker=1, sequence=1, num_steps=num_steps, preempted=preempted)
    owed = OwedSteps(10, is_kept=True)
    assert not owed.receive(1, header(10, preempted=False))
    assert owed.of(1) is None
    assert not owed.receive(1, header(4, preempted=True))
    assert (owed.of(1), owed.of(2)) == (6, None)
    assert owed.receive(1, header(5, preempted=True))  # only an interrupted worker shortens this rollout
    assert owed.of(1) is None
    for worker in range(4):
        owed.receive(worker, header(worker + 1, preempted=True))
    owed.cancel(2)
    assert [owed.of(worker) for worker in range(4)] == [9, 8, None, None]
    owed.cancel()
    assert [owed.of(worker) for worker in range(4)] == [None] * 4
    short = OwedSteps(10, is_kept=False)
    short.receive(1, header(4, preempted=True))
    assert short.of(1) is None


@pytest.mark.parametrize(("num_steps", "num_rounds"), [(1, 1), (11, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_rounds_requested_ahead_cover_the_steps(num_steps, num_rounds):
    """Check that enough rounds for `num_steps` steps are requested; a round has two rollouts of six steps."""
    runtime, workers = _fake_workers(2)
    _barrier(workers, runtime).request_ahead(num_steps)
    assert [name for name, *_ in runtime.calls] == ["0", "1"] * num_rounds


def test_each_worker_has_at_most_one_request_for_each_round():
    runtime, workers = _fake_workers(2)
    strategy = _barrier(workers, runtime)
    strategy.request_ahead(24)  # two rounds
    assert strategy.invariant()
    strategy._request(0)
    assert not strategy.invariant()


@pytest.mark.parametrize("col_in_flight", [1, 3])
def test_each_worker_has_col_in_flight_requests(col_in_flight):
    runtime, workers = _fake_workers(2)
    runtime.done = [["0"]]
    steps = []
    strategy = OnArrival(*_collaborators(workers, runtime, steps), OnArrival.Options(col_in_flight=col_in_flight))
    strategy.step(lambda item: steps.append("item"))
    assert strategy.invariant()
    # Every request of worker 0 was answered, and followed by a new request.
    assert [name for name, *_ in runtime.calls].count("1") == col_in_flight
    assert [name for name, *_ in runtime.calls].count("0") == 2 * col_in_flight
    # Weights are refreshed before the first requests, and later after each delivery, before the next request.
    assert steps[-2 * col_in_flight:] == ["item", "refresh"] * col_in_flight
    assert set(steps[:-2 * col_in_flight]) == {"refresh"}
    strategy._request(0)
    assert not strategy.invariant()


@pytest.mark.parametrize("col_in_flight", [1, 3])
def test_col_in_flight_of_a_scheme(make_scheme, monkeypatch, col_in_flight):
    outstanding, most = {}, []
    submit = ThreadRuntime.submit

    def watch(self, handle, method, args, kwargs):
        future = submit(self, handle, method, args, kwargs)
        if method == "collect":
            calls = outstanding.setdefault(handle.name, [])
            calls[:] = [call for call in calls if not call.native.done()] + [future]
            most.append(len(calls))
        return future
    monkeypatch.setattr(ThreadRuntime, "submit", watch)
    scheme = make_scheme(
        SleepEnv, {"step_s": 0.002}, num_col_workers=2, col_communication=ASYNC, col_in_flight=col_in_flight)
    for _ in range(8):
        scheme.step()
    assert max(most) == col_in_flight
