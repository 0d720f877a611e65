"""Check the shards of one gradient worker on the virtual clock: two threads, their requests, the ledger, and lost
shards."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest

from pytorchrl.agent.synthetic import SyntheticReplay, synthetic_agent
from pytorchrl.errors import InjectedFault, LearnerStarvedError, StoppedError
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.options.replay import ROUTINGS
from pytorchrl.scheme.replay.inserter import Router
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.supervision.supervisor import Supervisor
from tests.unit.scheme.replay.numbered import SIZE, rollout
from tests.conftest import seeds


class Collector(threading.Thread):
    """A thread that adds a rollout every `interval_s` seconds."""

    def __init__(self, shards, runtime, ledger, interval_s, num_workers, limit):
        super().__init__(name="Collector", daemon=True)
        self.shards, self.runtime, self.ledger, self.interval_s = shards, runtime, ledger, interval_s
        self.num_workers, self.limit = num_workers, limit
        self.failure, self.stopped, self.number = None, False, 0

    def run(self):
        try:
            while not self.stopped:
                if self.number < self.limit:
                    self.ledger.collect(SIZE)
                    self.shards.add(rollout(self.number, 1 + self.number % self.num_workers), lambda: self.stopped)
                    self.number += 1
                    self.runtime.sleep(self.interval_s)
                self.shards.poll(self.interval_s)
        except BaseException as failure:  # noqa: BLE001 - raised again by get()
            self.failure = failure


class Side:
    """The shards of one gradient worker, and a thread that adds rollouts; the test itself samples batches."""

    def __init__(self, num_replay_workers, capacity, faults, costs, interval_s, num_workers, limit, policy, seed,
                 **options):
        self.runtime = SimulatedRuntime(SimulatedRuntime.Options(schedule_seed=seed, costs=costs, faults=faults))
        algo, actor, storage, _ = synthetic_agent(SIZE, capacity=capacity)
        factory = RWorkerSet.create_factory(num_replay_workers, algo, actor, storage)
        self.workers = factory(0, runtime=self.runtime)
        self.ledger = Ledger()
        own = {name: options.pop(name) for name in ("batch_size", "batch_steps", "num_passes", "timeout_s")
               if name in options}
        self.shards = Shards(
            self.workers, self.ledger, Shards.Options(**options),
            Supervisor.Options(on_worker_failure=policy, worker_timeout_s=5.0),
            **{"batch_size": 16, "num_passes": 1, "timeout_s": 20.0, "seed": seed} | own)
        self.workers.wait_ready()
        self.runtime.simulation.after_event = self.check
        self.collector = Collector(self.shards, self.runtime, self.ledger, interval_s, num_workers, limit)
        self.runtime.start_thread(self.collector)

    def check(self):
        assert self.shards.invariant()

    def get(self):
        batch = self.shards.get(lambda: False, lambda: self.collector.failure, {})
        self.ledger.snapshot().check()
        return batch

    def storages(self):
        return [handle.native.worker._storage for handle in self.workers.remote_workers()]

    def stop(self):
        self.collector.stopped = True
        assert self.runtime.join_thread(self.collector, 5.0)
        shards = [handle.native.worker for handle in self.workers.remote_workers()]
        self.shards.close(5.0)
        self.left = [shard._storage for shard in shards if shard is not None and shard._storage is not None]
        self.ledger.drop_all(DropReason.SHUTDOWN)
        snapshot = self.ledger.snapshot().check()
        assert snapshot.in_flight == 0
        return snapshot


@pytest.fixture
def make():
    """Return a function that starts shards and a collector thread."""
    sides = []

    def make_(num_replay_workers=2, capacity=1000, faults=None, costs=None, interval_s=0.01, num_workers=2, limit=10**6,
              policy="restart", seed=0, **options):
        sides.append(Side(num_replay_workers, capacity, faults, costs, interval_s, num_workers, limit, policy, seed,
                          **options))
        return sides[-1]
    yield make_
    for side in sides:
        side.collector.stopped = True
        side.runtime.close()


def numbers(batch):
    return set(batch.action.tolist())


@pytest.mark.parametrize("num_replay_workers", [1, 2, 3])
def test_added_steps_are_sampled_and_stored_steps_are_resident(make, num_replay_workers):
    side = make(num_replay_workers, capacity=100)
    drawn = set()
    while side.collector.number < 30:
        drawn |= numbers(side.get())
    final = side.stop()
    assert max(drawn) > 100
    kept = [storage.counters["resident"] for storage in side.left]
    assert final.resident == sum(kept) == 100
    assert sorted(kept) == sorted(
        100 // num_replay_workers + (index < 100 % num_replay_workers) for index in range(num_replay_workers))
    assert final.collected == final.resident + final.evicted


def test_sampling_begins_as_soon_as_learning_starts(make):
    side = make(learning_starts=55)
    side.get()
    assert 60 <= sum(state.resident for state in side.shards.states) <= 80


def test_a_sampling_timeout_reports_the_reason(make):
    side = make(learning_starts=100, limit=3)
    with pytest.raises(LearnerStarvedError,
                       match=r"no batch from replay for 20.0 s: 30 env steps were added, learning starts at 100"):
        side.get()


def test_a_replay_that_fills_slowly_is_awaited(make):
    """Check that each new rollout restarts the timeout of 20 s for a batch.

    A rollout takes 2 s, and learning starts after twenty rollouts.
    """
    side = make(learning_starts=200, interval_s=2.0)
    assert side.get() is not None
    assert side.runtime.now() > 30.0


def test_collection_continues_while_nothing_can_be_sampled(make, monkeypatch):
    """Check that `min_replay_ratio` does not stop collection while there is nothing to sample."""
    monkeypatch.setattr(SyntheticReplay, "mass", property(lambda storage: float(len(storage.inserted) >= 5)))
    side = make(num_replay_workers=1, min_replay_ratio=100.0)
    assert side.get() is not None


def test_round_robin_follows_sent_rollouts_and_not_waiting_times(make):
    side = make(num_replay_workers=2, batch_size=32, min_replay_ratio=4.0, interval_s=0.001, capacity=10**5,
                costs={"sample": 0.0301})
    for _ in range(60):
        side.get()
    assert side.collector.number > 20
    side.stop()
    counts = [len(storage.inserted) for storage in side.left]
    assert abs(counts[0] - counts[1]) <= 2


def test_stopping_ends_a_wait(make):
    side = make(limit=0)
    with pytest.raises(StoppedError):
        side.shards.get(lambda: side.runtime.now() > 1.0, lambda: None, {})


def test_requests_in_flight_are_bounded(make):
    side = make(num_replay_workers=2, prefetch=3)
    asked = []
    for _ in range(30):
        side.get()
        side.runtime.sleep(0.1)  # the learner is slow
        asked.append(side.shards.sampler.num_requested)
        assert sum(state.statistics()["sampled"] for state in side.shards.states) == 0
    assert max(asked) <= 6


def test_collection_waits_for_a_slow_shard(make):
    """Check that collection waits for a shard that is slow to add rollouts."""
    side = make(num_replay_workers=1, add_in_flight=2, costs={"add": 1.0}, interval_s=0.001)
    side.runtime.sleep(10.0)
    assert 8 <= side.collector.number <= 13
    assert side.ledger.snapshot().in_flight <= 3 * SIZE


@pytest.mark.parametrize(("routing", "expected"), [
    ("round_robin", [{1, 2, 3}, {1, 2, 3}]), ("by_stream", [{2}, {1, 3}])])
def test_routing(make, routing, expected):
    side = make(num_replay_workers=2, routing=routing, num_workers=3, capacity=10**6)
    while side.collector.number < 60:
        side.get()
    side.stop()
    workers = [{1 + int(step) // SIZE % 3 for part in storage.inserted for step in part} for storage in side.left]
    assert workers == expected


def routes(side):
    """Return {number of a rollout: index of its shard}."""
    return {int(steps[0]) // SIZE: index for index, storage in enumerate(side.left) for steps in storage.inserted}


def test_random_routing_follows_the_seed(make):
    """Check that random routing is uniform, and depends only on the seed."""
    found = []
    for seed in (0, 0, 1):
        side = make(num_replay_workers=3, routing="random", capacity=10**6, seed=seed)
        while side.collector.number < 60:
            side.get()
        side.stop()
        found.append([route for _, route in sorted(routes(side).items())][:40])
    first, again, other = found
    assert first == again != other
    assert len(first) == len(other) == 40
    router = Router("random", 3, 0, load=None)
    chosen = [router.choose(1, [0, 1, 2], [0, 1, 2]) for _ in range(280)]
    assert first == chosen[:40]
    assert all(70 < chosen.count(shard) < 130
               for shard in range(3))  # on average 93 of 280 rollouts, with a standard deviation of 8


@pytest.mark.parametrize(("routing", "is_even"), [("least_loaded", True), ("round_robin", False)])
def test_the_least_loaded_shard_is_chosen(make, routing, is_even):
    """Check that `least_loaded` first fills the empty replacement of a lost shard."""
    side = make(num_replay_workers=2, routing=routing, capacity=10**6, faults="kill shard.1 @ add 5")
    while side.collector.number < 240:
        side.get()
    loads = [state.resident for state in side.shards.states]
    assert (abs(loads[0] - loads[1]) <= 4 * SIZE) == is_even


def test_shards_are_sampled_in_proportion_to_their_mass(make, monkeypatch):
    monkeypatch.setattr(SyntheticReplay, "mass", property(
        lambda storage: 1.0 if storage.inserted and storage.inserted[0][0] == 0 else 3.0))
    side = make(num_replay_workers=2, limit=2, capacity=10**4)
    for _ in range(20):
        side.get()
    seen = [bool(numbers(side.get()) & {0}) for _ in range(400)]
    assert 0.19 < np.mean(seen) < 0.31


def test_collection_waits_for_learning_and_learning_for_collection(make):
    """Check the bounds of the ratio of consumed steps to steps added since learning started.

    With a maximum of 8, each batch of 512 steps requires 64 new steps.
    """
    side = make(num_replay_workers=1, learning_starts=1000, batch_size=512, max_replay_ratio=8.0, interval_s=0.1,
                timeout_s=30.0, capacity=10**5)
    added = []
    for _ in range(3):
        side.get()
        added.append(side.shards.added)
    assert added == [1070, 1130, 1200]  # 1064, 1128 and 1192, rounded up to rollouts of 10 steps

    side = make(num_replay_workers=1, learning_starts=1000, batch_size=512, min_replay_ratio=4.0, interval_s=0.001,
                capacity=10**5)
    side.runtime.sleep(50.0)
    # Collection stops 512 / 4 = 128 steps after learning may start, rounded up to rollouts of 10 steps
    assert side.shards.added + SIZE * side.shards.num_adding == 1130


def test_collection_continues_as_soon_as_learning_has_caught_up(make):
    side = make(num_replay_workers=1, batch_size=SIZE, min_replay_ratio=1.0, max_replay_ratio=1.0, interval_s=0.001,
                capacity=10**5)
    for _ in range(40):
        side.get()
    assert side.shards.added >= 40 * SIZE
    assert side.runtime.now() < 3.0  # a wait of POLL_INTERVAL_S for each of the 40 rollouts would take four seconds


@pytest.mark.parametrize(("batch_steps", "added", "collected"), [
    (None, [1050, 1100, 1150], 1080), (150, [1080, 1130, 1180], 1120)])
def test_bounds_of_the_ratio_count_each_pass_over_a_batch(make, batch_steps, added, collected):
    """Check the bounds with three passes over batches of 100 steps, or of at most 150 steps.

    With a maximum of 6, the first batch requires 3 * 100 / 6 = 50 new steps, or 3 * 150 / 6 = 75 for 150 steps. With a
    minimum of 4, collection stops when 3 * 100 / 4 = 75 or 3 * 150 / 4 = 112.5 steps have been added.
    """
    options = {"num_replay_workers": 1, "learning_starts": 1000, "batch_size": 100, "batch_steps": batch_steps,
               "num_passes": 3, "capacity": 10**5}
    side = make(max_replay_ratio=6.0, interval_s=0.1, timeout_s=30.0, **options)
    found = []
    for _ in range(3):
        side.get()
        found.append(side.shards.added)
    assert found == added

    side = make(min_replay_ratio=4.0, interval_s=0.001, **options)
    side.runtime.sleep(50.0)
    assert side.shards.added + SIZE * side.shards.num_adding == collected
    side.shards.is_draining = True  # during a drain, collection does not wait for learning
    side.runtime.sleep(1.0)
    assert side.shards.added > collected + 100


def test_learning_starts_with_exactly_enough_steps(make):
    side = make(learning_starts=60, limit=6)
    assert side.get() is not None


@pytest.mark.parametrize("num_replay_workers", [1, 2])
def test_shards_receive_the_errors_found_by_learning(make, num_replay_workers):
    side = make(num_replay_workers)
    told = 0
    for _ in range(50):
        batch = side.get()
        ids = np.asarray(batch.action)
        side.shards.update_priorities(ids, ids + 0.5)
        told += len(ids)
        side.runtime.sleep(0.01)
    side.runtime.sleep(1.0)
    side.shards.sampler.send_priorities()
    side.runtime.sleep(1.0)
    heard = [pair for storage in side.storages() for pair in storage.recorded_errors]
    assert sum(len(ids) for ids, _ in heard) == told
    for storage in side.storages():
        for ids, errors in storage.recorded_errors:
            assert set(ids.tolist()) <= set(np.concatenate(storage.inserted).tolist())
            np.testing.assert_allclose(errors, ids + 0.5)


def test_messages_to_a_slow_shard_are_merged(make):
    side = make(1, costs={"priorities": 2.0})
    for _ in range(40):
        batch = side.get()
        side.shards.update_priorities(np.asarray(batch.action), np.asarray(batch.action))
        assert side.runtime.now() < 1000.0
    assert len(side.storages()[0].recorded_errors) < 40


@pytest.mark.parametrize("point", ["add 4", "sample 3", "priorities 2"])
@pytest.mark.parametrize("action", ["kill", "hang"])
def test_a_lost_shard_is_no_longer_sampled_and_its_replacement_is_empty(make, action, point):
    side = make(2, capacity=200, faults=f"{action} shard.1 @ {point}", prefetch=2, interval_s=0.02)
    longest, told_wrong = 0.0, []
    for _ in range(150):
        start = side.runtime.now()
        batch = side.get()
        longest = max(longest, side.runtime.now() - start)
        ids = np.asarray(batch.action)
        side.shards.update_priorities(ids, ids)
        side.runtime.sleep(0.04)
    assert longest <= (2.0 if action == "kill" else 8.0)
    final = side.stop()
    assert final.dropped["worker_lost"] > 0
    assert side.shards.restarts == 1
    for storage in side.left:
        own = set(np.concatenate(storage.inserted).tolist())
        told_wrong += [step for ids, _ in storage.recorded_errors for step in ids.tolist() if step not in own]
    assert not told_wrong
    assert final.resident == sum(storage.counters["resident"] for storage in side.left)


def test_a_shards_error_reaches_the_learner(make):
    side = make(2, faults="raise shard.2 @ add 3")
    batches = (side.get() for _ in range(1000))
    with pytest.raises(InjectedFault, match="injected into GWorker 0/RWorker 2 at add 3"):
        deque(batches, maxlen=0)


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_the_ledger_balances_under_random_schedules(make, seed):
    rng = np.random.default_rng(seed)
    costs = {name: ("exponential", float(10 ** rng.uniform(-4, -1)))
             for name in ("message", "add", "sample", "priorities")}
    fault = rng.choice(["kill shard.* p=0.02", "kill shard.1 @ add 3", "delay shard.* 1s p=0.05", ""])
    side = make(int(rng.integers(1, 4)), capacity=int(rng.choice([40, 1000])), faults=str(fault) or None, costs=costs,
                seed=seed,
                interval_s=float(10 ** rng.uniform(-3, -1)), prefetch=int(rng.integers(1, 4)),
                routing=str(rng.choice(ROUTINGS)), policy="restart")
    for _ in range(60):
        batch = side.get()
        side.shards.update_priorities(np.asarray(batch.action), np.asarray(batch.action))
    side.stop()
