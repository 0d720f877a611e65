"""Check requests to shards: their number, the shards that receive them, and the number of trained steps.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pytorchrl.errors import WorkerLostError
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.sampler import Sampler
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from tests.unit.scheme.replay.numbered import SIZE, rollout, start_shards

BATCH = 4


class Side:
    """Shards with some rollouts each, and a sampler that requests batches from them."""

    def __init__(self, number=2, rollouts=3, costs=None, **options):
        self.runtime, workers = start_shards(number, costs=costs)
        self.handles = workers.remote_workers()
        self.states = ShardStates(number, self.runtime.make_event(), self.runtime.make_event())
        for index, handle in enumerate(self.handles):
            for count in range(rollouts):
                answer = handle.submit(RWorker.add, rollout(10 * index + count), 0)
                self.states.update(index, 0, self.runtime.get(answer, 5.0))
        self.asked = []
        self.sampler = Sampler(self.handles, self.runtime, self.states, **{
            "batch_size": BATCH, "num_passes": 1, "max_requests": 4, "may_request": self.may_request,
            "timeout_s": 5.0, "seed": 0} | options)

    def may_request(self, added, requested):
        self.asked.append((added, requested))
        return True

    def take(self):
        while (batch := self.sampler.poll({})) is None:
            pass
        return batch


@pytest.fixture
def make():
    """Return a function that starts shards with rollouts, and a sampler for them."""
    sides = []

    def make_(**options):
        sides.append(Side(**options))
        return sides[-1]
    yield make_
    for side in sides:
        side.runtime.close()


def test_nothing_is_requested_from_empty_shards(make):
    side = make(rollouts=0)
    assert side.sampler.poll({}) is None
    assert side.sampler.num_requested == 0
    assert side.asked == []


@pytest.mark.parametrize("max_requests", [1, 5])
def test_max_requests_batches_are_requested_ahead(make, max_requests):
    side = make(max_requests=max_requests)
    side.states.added = 7
    side.take()
    assert side.sampler.num_requested == max_requests - 1
    assert side.sampler.invariant()
    assert side.asked[:max_requests] == [(7, number) for number in range(max_requests)]


def test_batches_are_requested_only_if_allowed(make):
    side = make(may_request=lambda added, requested: requested < 2)
    side.take()
    assert side.sampler.num_requested == 1


def test_batches_arrive_in_the_order_of_their_requests(make):
    """Check that batches of a fast shard wait for earlier requests to a slow shard."""
    side = make(costs={"sample@GWorker 0/RWorker 1": 0.2, "sample@GWorker 0/RWorker 2": 0.01}, max_requests=12)
    submit, requested = side.runtime.submit, []

    def watch(handle, *arguments):
        requested.append(int(handle.name[-1]) - 1)
        return submit(handle, *arguments)
    side.runtime.submit = watch
    found = [int(side.take().action[0]) // (10 * SIZE) for _ in range(10)]
    assert set(found) == {0, 1}
    assert found == requested[:10]


def test_requests_carry_the_smallest_sampling_weight_of_all_shards(make):
    side, carried = make(number=3, max_requests=2), []
    submit = side.runtime.submit

    def watch(handle, method, args, kwargs):
        carried.append(args[1])
        return submit(handle, method, args, kwargs)
    side.runtime.submit = watch

    def smallest_of(*states):
        for index, (mass, smallest) in enumerate(states):
            side.states.update(index, 0, ShardState(100 + len(carried), mass=mass, smallest=smallest))
        side.sampler._request({})
        side.sampler.forget_requests()
        return set(carried[-2:])
    assert smallest_of((0.25, 0.125), (9.0, 3.0), (8.0, 0.5)) == {0.125}
    assert smallest_of((9.0, 4.0), (1.0, 0.75), (8.0, 2.0)) == {0.75}
    side.states.suspend(1, 0, WorkerLostError("gone"))  # a lost shard has no items
    assert smallest_of((9.0, 4.0), (1.0, 0.25), (8.0, 2.0)) == {2.0}


def test_batches_are_copies_of_arrays_that_may_be_read_only(make, monkeypatch):
    """Check that tensors of a batch share no memory with the message, which may lie in read-only shared memory."""
    sample, sent = RWorker.sample, []

    def read_only(worker, *args):
        found = sample(worker, *args)
        sent.append(found.batch.action)
        found.batch.action.flags.writeable = False
        return found
    monkeypatch.setattr(RWorker, "sample", functools.wraps(sample)(read_only))
    batch = make(max_requests=1).take()
    before = sent[0].copy()
    batch.action.add_(1)
    assert np.array_equal(sent[0], before)


def test_shards_are_sampled_in_proportion_to_their_mass(make):
    side = make(max_requests=400)
    for index, mass in enumerate((1.0, 3.0)):
        side.states.update(index, 0, ShardState(answers=100, mass=mass, smallest=1.0))
    side.sampler.poll({})
    shards = side.sampler.forget_requests()
    assert len(shards) >= 399
    assert 265 <= shards.count(1) <= 335  # 300 on average, with a standard deviation of 9
    assert side.sampler.num_requested == 0


@pytest.mark.parametrize("num_passes", [1, 3])
def test_each_pass_over_a_batch_counts_as_trained(make, num_passes):
    side = make(num_passes=num_passes)
    for number in range(1, 4):
        assert side.take().num_samples == BATCH
        assert side.states.trained == BATCH * num_passes * number


def test_a_drain_cancels_unused_requests(make):
    side = make(max_requests=5, num_passes=2)
    side.take()
    assert side.sampler.drain(side.runtime.now() + 60.0) == 4
    assert side.states.trained == 2 * BATCH
    assert side.sampler.num_requested == 0


def test_a_drain_ends_at_its_deadline(make):
    side = make(costs={"sample": 100.0}, max_requests=5)
    assert side.sampler.poll({}) is None
    assert side.sampler.drain(side.runtime.now() + 1.0) == 0
    assert side.sampler.num_requested == 5
    assert len(side.sampler.forget_requests()) == 5


def test_queue_levels_are_returned_once(make):
    side = make(max_requests=3)
    side.take()
    side.runtime.sleep(1.0)  # the other two batches arrive
    side.take()
    assert side.sampler.num_waiting == 1
    assert side.sampler.num_pending == 1
    levels = side.sampler.take_levels()
    assert len(levels) == 2
    assert levels[-1] == 1
    assert side.sampler.take_levels() == ()


def test_td_errors_reach_the_shard_of_the_batch(make):
    side = make()
    batch = side.take()
    shard = int(batch.action[0]) // (10 * SIZE)
    side.sampler.update_priorities(batch.ids, np.full(BATCH, 2.5))
    while side.sampler.send_priorities():
        side.runtime.sleep(0.1)
    told = [handle.native.worker._storage.recorded_errors for handle in side.handles]
    assert told[1 - shard] == []
    ((ids, errors),) = told[shard]
    assert ids.tolist() == batch.ids.tolist()
    assert errors.tolist() == [2.5] * BATCH
    assert errors.dtype == np.float32


def test_td_errors_for_a_replaced_shard_are_discarded(make):
    side = make(number=1)
    batch = side.take()
    side.states.reset(0)
    side.sampler.update_priorities(batch.ids, np.zeros(BATCH))
    assert not side.sampler.send_priorities()
    assert side.handles[0].native.worker._storage.recorded_errors == []


def test_td_errors_that_wait_for_a_lost_shard_do_not_reach_its_replacement(make):
    side = make(number=1, costs={"priorities": 1.0})
    batch = side.take()
    side.sampler.update_priorities(batch.ids, np.zeros(BATCH))
    side.sampler.update_priorities(batch.ids, np.ones(BATCH))  # waits until the shard has confirmed the first message
    side.states.reset(0)
    while side.sampler.send_priorities():
        side.runtime.sleep(0.1)
    side.runtime.sleep(5.0)
    assert [errors.tolist() for _, errors in side.handles[0].native.worker._storage.recorded_errors] == [[0.0] * BATCH]


def test_a_hung_shard_is_suspended_and_reported(make):
    side = make(number=1, costs={"sample": 100.0}, timeout_s=2.0)
    for _ in range(40):
        assert side.sampler.poll({}) is None
    index, error = side.states.take_lost()
    assert (index, type(error)) == (0, WorkerLostError)
    assert side.states.take_lost() is None  # several requests were lost, but only one shard
    assert "RWorker 1 hangs: no batch for 2.0 s" in str(error)
    assert side.states.current[0].mass == 0.0


def test_the_peak_is_the_largest_number_of_batches_that_waited(make):
    side = make(max_requests=4)
    assert side.sampler.peak == 0
    side.sampler._request({})
    side.runtime.sleep(1.0)  # all batches arrive
    for _ in range(3):
        side.take()
    assert side.sampler.peak == 4
    side.sampler._requests.extend(side.sampler._requests)
    assert not side.sampler.invariant()
