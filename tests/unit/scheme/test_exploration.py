"""Run small schemes on many schedules with random delays and faults, and check invariants after every event.

A failure message names the seed of its schedule. `explore` with only that seed repeats the schedule, event by event.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

from pytorchrl import ASYNC, SYNC, Scheme
from pytorchrl.agent.options import Factory
from pytorchrl.agent.synthetic import SyntheticReplay, SyntheticStorage, synthetic_agent
from pytorchrl.errors import InjectedFault, NonFiniteUpdateError
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.gradients.g_worker import CollectorThread, GWorker
from pytorchrl.scheme.gradients.sample_queue import SampleQueue
from pytorchrl.scheme.collection.strategies import OnArrival
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates

# Number of schedules of the thorough tests, enough to find each planted bug. Tests marked `chaos` run more schedules.
NUM_SCHEDULES = 200
# The schedules of the default run; the last five have decentralized gradients, as has number 46.
USUAL = (*range(60), 80, 81, 91, 99, 103)
EXPECTED = {"raise": InjectedFault, "nan": NonFiniteUpdateError}


class BrokenError(AssertionError):
    """Raised if an invariant is violated."""


def check_that(condition, message, *details):
    if not condition:
        raise BrokenError(f"{message} {' '.join(map(str, details))}".rstrip())


class Watch:
    """A checker of the invariants of a running scheme, called after every event."""

    def __init__(self, scheme):
        self.scheme, self.settings = scheme, scheme.settings
        self.learned, self.version, self.chains, self.broken = Counter(), 0, {}, None
        self.root = scheme.start(10**6)
        self.simulation = scheme.runtime.simulation
        statistics = self.root.statistics
        self._receive, statistics.receive = statistics.receive, self.receive
        if self.is_chain:
            self.watch_chains()
        self.simulation.after_event = self.look
        for worker in self.grad_workers():
            if isinstance(worker.collector.strategy, OnArrival):
                self.watch_requests(worker)

    def watch_requests(self, worker):
        strategy, interval = worker.collector.strategy, self.settings["broadcast_interval"]
        right = strategy._request

        def request(index):
            lag = worker.actor_version - worker.collector.weight_versions()[index]
            self.note(lag < interval or self.settings["max_weight_sync_delay"], "a rollout was requested with weights",
                      lag, "updates old, interval", interval)
            right(index)
        strategy._request = request

    def look(self):
        """Check the state after an event, in any thread, and store the first error, which `check` raises later."""
        if self.broken is None:
            try:
                self.check_state()
            except Exception as error:  # noqa: BLE001 - `check` raises it in the thread of the test
                self.broken = error

    def check_state(self):
        snapshot = self.root.statistics.tree_ledger.total()
        check_that(snapshot.imbalance == 0, "the ledger does not balance:", snapshot)
        counts = self.root.statistics.counters
        check_that(counts.grads_received == counts.grads_applied + counts.grads_dropped + counts.grads_empty
                   + counts.grads_held, "gradients are lost:", counts)
        check_that(self.scheme.version >= self.version, "the version decreased", self.version, self.scheme.version)
        self.version = self.scheme.version
        names = [actor.name for actor in self.scheme.runtime._actors]
        check_that(len(names) == len(set(names)), "two live workers have the same name", names)
        grad_workers = list(self.grad_workers())
        for worker in grad_workers:
            if worker.storage.provides.is_kept:
                resident, kept = worker.ledger.snapshot().resident, worker.storage.counters["resident"]
                check_that(resident == kept, "resident steps in the ledger differ from those in replay:", resident,
                           "instead of", kept)
        for worker in self.workers(grad_workers):
            count = worker.algo.count.item()
            check_that(abs(count - worker.version) < 1e-6, "weights do not match their version:", worker.version, count)
            check_that(worker.invariant(), "a snapshot is newer than the weights", worker.version)
        if self.settings["distribute_gradients"]:
            self.check_ranks()
        for worker in grad_workers:
            check_that(worker.collector.strategy.invariant(), "a worker has more requests than allowed")
            check_that(worker.collector._destination.invariant(), "there are", worker.inqueue.qsize(),
                       "items in the queue, or too many requests to shards")

    def check_ranks(self):
        """Check that the version of each rank that has not ended equals that of the scheme, or is one higher."""
        ranks = [self.root.remote_workers[index].native.worker for index in self.root.strategy.ranks]
        versions = [worker.actor_version for worker in ranks if worker is not None]
        check_that(all(0 <= version - self.version <= 1 for version in versions), "ranks have versions", versions,
                   "after update", self.version)

    def grad_workers(self):
        yield self.root.local_worker
        for handle in self.root.remote_workers:
            if handle.native.worker is not None:
                yield handle.native.worker

    def workers(self, grad_workers):
        """Yield all existing collection workers, including local workers that only provide parameters."""
        for worker in grad_workers:
            yield worker.local_worker
            for handle in worker.remote_workers:
                if handle.native.worker is not None:
                    yield handle.native.worker

    def receive(self, gradients):
        if self.is_chain:
            expected = self.chains[gradients.worker]
            self.note(gradients.weights_version == expected,
                      "a gradient worker continued with the wrong weights:",
                      gradients.weights_version, "instead of", expected)
        self._receive(gradients)

    def watch_chains(self):
        right = self.root.strategy._weights_for

        def weights_for(index):
            self.chains[index + 1] = self.root.local_worker.actor_version
            return right(index)
        self.root.strategy._weights_for = weights_for

    @property
    def is_chain(self):
        return self.settings["num_grad_workers"] > 1 and self.settings["grad_communication"] == "asynchronous"

    def note(self, condition, *what):
        if not condition and self.broken is None:
            self.broken = BrokenError(" ".join(map(str, what)))

    def learn(self, numbers):
        """Count the given steps as received by a learner, and check that no step was received too often."""
        self.learned.update(numbers)
        too_often = [number for number in numbers if self.learned[number] > self.settings["num_passes"]]
        self.note(not too_often or self.settings["replay_slots"], "learned too often from steps", too_often[:3])

    def check_chains(self):
        """Check that every gradient worker is computing, has a gradient ready, or is being replaced."""
        if self.is_chain and self.root.strategy.error is None:  # a worker that failed is idle
            self.note(self.root.strategy.invariant(), "a gradient worker is idle or has two requests")

    def check(self):
        if self.broken is not None:
            raise self.broken


def random_queue_settings(rng):
    """Return random settings of the data path between the sample queue and the learner."""
    settings = {"queue_policy": rng.choice(("block", "drop_oldest", "drop_newest")),
                "num_passes": rng.choice((1, 2, 3)),
                "minibatch_buffer_size": rng.choice((1, 2, 3)), "buffer": rng.choice(("ring", "ring", "circular")),
                "train_batch_size": rng.choice((None, 6, 8)), "max_policy_lag": rng.choice((None, 1, 8)),
                "broadcast_interval": 1}
    if settings["max_policy_lag"] is not None and settings["buffer"] == "ring" and rng.random() < 0.5:
        settings["on_policy_lag"] = "wait"
    else:
        settings["max_weight_sync_delay"] = rng.choice((None, 5))
    if rng.random() < 0.3:
        settings |= {"replay_proportion": rng.choice((0.5, 2.0)), "replay_slots": 5}
    return settings


def lost_ranks(rng, num_ranks):
    """Return faults that kill some ranks, at the same or different times, but never all ranks."""
    lost = rng.sample(range(1, num_ranks + 1), rng.randint(1, num_ranks - 1))
    return "; ".join(f"kill grad.{rank} @ {rng.choice(('grad', 'update'))} {rng.randint(1, 6)}" for rank in lost)


def scenario(seed, faulty=True):  # noqa: C901 - a sequence of independent choices
    """Return the settings, agent and fault of a small random scheme, all determined by the seed."""
    rng = random.Random(f"scenario {seed}")
    col, grad = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 3))
    col_async, grad_async = rng.choice((SYNC, ASYNC)), rng.choice((SYNC, ASYNC))
    settings = {"num_col_workers": col, "num_grad_workers": grad, "col_communication": col_async,
                "grad_communication": grad_async}
    if col_async is ASYNC:
        settings |= {"col_in_flight": rng.choice((1, 2, 3)), "queue_size": rng.choice((1, 2, 5)),
                     "broadcast_interval": rng.choice((1, 1, 3))}
    elif col > 1 and rng.random() < 0.3:
        settings |= {"col_fraction_workers": 0.5, "fraction_samples": 0.5, "on_straggler": ("cut", "finish")[seed % 2]}
    if grad > 1 and grad_async is SYNC and rng.random() < 0.2:
        settings["distribute_gradients"] = True
    if grad > 1 and grad_async is ASYNC and rng.random() < 0.5:
        settings |= {"aggregate": rng.randint(1, grad), "max_grad_lag": rng.choice((0, 1)),
                     "lag_policy": rng.choice(("apply", "drop")), "updates_per_step": rng.choice((1, 1, 4)),
                     "on_worker_failure": rng.choice(("restart", "ignore"))}
    settings["costs"] = {operation: ("exponential", 10 ** rng.uniform(-4, -1)) for operation in
                         ("message", "step", "grad", "update")}
    action = rng.choice(("none", "delay", "stall", "raise", "kill", "kill", "hang", "nan")) if faulty else "none"
    where = f"col.{rng.randint(1, col)}" if col > 1 else "col.0" if grad == 1 else "grad.1"
    if action in ("kill", "hang") and col == grad == 1:
        action = "raise"
    # Stalls are excluded, because blocked threads would poll very often until a stall ends.
    if col_async is ASYNC and action != "stall" and rng.random() < 0.5:
        settings |= random_queue_settings(rng)
    if action == "hang":
        settings["worker_timeout_s"] = 3.0
    if action in ("raise", "kill", "hang"):
        settings["faults"] = f"{action} {where} @ {'grad' if 'grad' in where else 'step'} {rng.randint(1, 12)}"
    elif action == "nan":
        settings["faults"] = f"nan grad.* p={rng.choice((0.2, 1.0))}"
    elif action in ("delay", "stall"):  # a stall is longer than the timeout of stop()
        settings["faults"] = f"delay {where} {0.2 if action == 'delay' else 30}s p=0.2"
    if "distribute_gradients" in settings and action == "kill" and rng.random() < 0.8:
        settings |= {"faults": lost_ranks(rng, grad), "on_worker_failure": rng.choice(("restart", "ignore"))}
    agent = {"size": rng.choice((2, 4)), "num_epochs": rng.choice((1, 2)), "num_mini_batch": rng.choice((1, 2))}
    if rng.random() < 0.25:
        agent |= {"capacity": rng.choice((6, 1000)), "learning_starts": rng.choice((0, 10))}
        for name in ("minibatch_buffer_size", "num_passes", "ramp", "buffer", "replay_proportion", "replay_slots"):
            settings.pop(name, None)
    return settings, agent, action


def run(seed, updates=5, faulty=True):
    """Run one schedule, and return the digest of its events.

    Raises:
        BrokenError: If an invariant is violated; the message contains the seed and the last events.
    """
    settings, agent, action = scenario(seed, faulty)
    watch = None

    class WatchedStorage(SyntheticReplay if "capacity" in agent else SyntheticStorage):
        def insert_data_slice(self, rollouts):
            super().insert_data_slice(rollouts)
            for numbers in self.inserted[-len(rollouts):]:
                watch.learn(numbers.tolist())

    algo, actor, storage, envs = synthetic_agent(**agent)
    scheme = Scheme(algo, actor, Factory(WatchedStorage, storage.options), envs, seed=1, runtime="simulated",
                    schedule_seed=seed, **settings)
    try:
        try:
            watch = Watch(scheme)
            while scheme.version < updates:
                scheme.step()
                watch.check_chains()
                watch.check()
        except EXPECTED.get(action, ()):
            pass
        finally:
            simulation, runtime = scheme.runtime.simulation, scheme.runtime
            closing, left = runtime.close, []
            runtime.close = lambda: (left.extend(set(runtime.running) - {a.name for a in runtime._actors}), closing())
            final = scheme.stop()
        watch.check()
        check_end(final, left, runtime, watch, action)
    except BaseException as error:
        events = "\n  ".join(list(simulation.last_events)[-12:])
        raise BrokenError(
            f"seed {seed}: {type(error).__name__}: {error}\nwith {settings}, {agent}\n  {events}") from error
    return simulation.digest


def check_end(final, left, runtime, watch, action):
    check_that(not left, "a thread still runs after stop():", left)
    check_that(not runtime.running, "tasks still run after stop():", runtime.running)
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    check_that(final["collected"] == places + sum(final["dropped"].values()), "the final ledger does not balance:",
               final)
    check_that(final["in_flight"] == final["queued"] == 0, "steps are in flight or queued after stop():", final)
    used = final["consumed_unique"] + final["resident"] + final["evicted"]
    check_that(used <= len(watch.learned), "more steps consumed or in replay than learners received:", final)
    if action not in ("kill", "hang", "stall"):
        check_that(final["dropped"]["worker_lost"] == 0, "steps were lost, but no worker was:", final)


def explore(seeds, **options):
    """Run many schedules, and return the set of their digests."""
    return {run(seed, **options) for seed in seeds}


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [
    USUAL, pytest.param(range(NUM_SCHEDULES), marks=pytest.mark.thorough)], ids=["usual", "all"])
def test_invariants_hold_with_delays_and_faults(schedules):
    # Central synchronous collection with central gradients (2 of 16 patterns) has one thread, hence only one schedule.
    assert len(explore(schedules)) > len(schedules) * 14 / 16
    assert threading.active_count() < 20  # no schedule leaves threads running


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_invariants_hold_for_ten_thousand_schedules():
    assert len(explore(range(NUM_SCHEDULES, NUM_SCHEDULES + 10_000))) > 9_800


@pytest.mark.parametrize("seed", range(0, 50, 7))
def test_a_seed_reproduces_its_run(seed):
    assert run(seed) == run(seed)


# Planted bugs: the tests check that exploration finds each bug, and that the seed reproduces the failure.


def weights_to_the_wrong_worker(monkeypatch):
    def request(self, index, skip):
        weights = self._weights_for(index)
        if weights is not None:
            self._workers[(index + 1) % len(self._workers)].submit(GWorker.set_weights, weights)
        future = self._workers[index].submit(GWorker.collect_and_grad, None, skip_remaining=skip)
        self.in_flight.add(index, future)
    monkeypatch.setattr(AsynchronousUpdates, "_request", request)


def broadcast_after_resubmission(monkeypatch):
    def step(self, deliver):
        if not self._is_started:
            right(self, deliver)
            return
        for index, rollout in self._poll():
            self._deliver([rollout], deliver)
            self._request(index)
            self._weights.attach_due(index)
    right = OnArrival.step
    monkeypatch.setattr(OnArrival, "step", step)


def a_rollout_counted_twice(monkeypatch):
    right = SampleQueue.put

    def put(self, rollouts):
        right(self, rollouts)
        if self.queue.qsize() == 2:  # only some schedules queue two train batches
            right(self, rollouts)
    monkeypatch.setattr(SampleQueue, "put", put)


def a_missed_wake_up(monkeypatch):
    """Plant a bug: if the gradients of two workers are ready at once, only one of the workers gets a new request."""
    right = AsynchronousUpdates._request

    def request(self, index, skip):
        if not self._ready:
            right(self, index, skip)
    monkeypatch.setattr(AsynchronousUpdates, "_request", request)


def a_request_too_many(monkeypatch):
    def step(self, deliver):
        right(self, deliver)
        if len(self._in_flight) > 1:
            self._request(0)
    right = OnArrival.step
    monkeypatch.setattr(OnArrival, "step", step)


def a_queue_without_a_bound(monkeypatch):
    right = SampleQueue._put

    def put(self, batch):
        self.queue.maxsize = 0
        right(self, batch)
    monkeypatch.setattr(SampleQueue, "_put", put)


def a_snapshot_of_newer_weights(monkeypatch):
    right = CWorker.get_weights

    def get_weights(self):
        snapshot = self._snapshot = replace(right(self), version=self.version + 1)
        return snapshot
    monkeypatch.setattr(CWorker, "get_weights", get_weights)


def a_stop_that_leaves_a_thread(monkeypatch):
    right = CollectorThread.interrupt

    def interrupt(self):
        if self.queue.qsize() < self.queue.maxsize:
            right(self)
    monkeypatch.setattr(CollectorThread, "interrupt", interrupt)


BUGS = {
    weights_to_the_wrong_worker: (0, "continued with the wrong weights"),
    broadcast_after_resubmission: (32, "requested with weights"),
    a_rollout_counted_twice: (81, "learned too often|ledger does not balance"),
    a_missed_wake_up: (121, "a gradient worker is idle"),
    a_request_too_many: (15, "more requests than allowed"),
    a_queue_without_a_bound: (15, "items in the queue"),
    a_snapshot_of_newer_weights: (0, "a snapshot is newer than the weights"),
    a_stop_that_leaves_a_thread: (17, "waits for the end of CollectorThread|steps were lost, but no worker was"),
}
"""Planted bug -> the first seed whose schedule shows it, and what the error says."""


@pytest.mark.parametrize("is_thorough", [False, pytest.param(True, marks=pytest.mark.thorough)],
                         ids=["from a stored seed", "from the first seed"])
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_and_reproduced_from_its_seed(monkeypatch, bug, is_thorough):
    bug(monkeypatch)
    first, says = BUGS[bug]
    with pytest.raises(BrokenError, match=says) as caught:
        explore(range(NUM_SCHEDULES) if is_thorough else range(first, first + 10), faulty=False)
    found = caught.value
    seed = int(str(found).split(":")[0].removeprefix("seed "))
    with pytest.raises(BrokenError) as again:
        run(seed, faulty=False)
    assert str(again.value) == str(found)  # the same error after the same events
