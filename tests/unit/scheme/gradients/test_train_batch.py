"""Tests of which rollouts make up a train batch."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.runtime import Journal
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.strategies import LocalCollection
from pytorchrl.scheme.gradients.batch_source import BatchSource, RoundSource
from pytorchrl.scheme.gradients.process_group import ProcessGroup
from pytorchrl.scheme.gradients.sample_queue import TrainBatchBuilder
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch, TrainBatchSource
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader


def make_rollout(number, num_steps=50, num_resets=0):
    return Rollout(None, RolloutHeader(num_env_steps=num_steps - num_resets, size=num_steps, collected_steps=0,
                                       weights_version=number, worker=1, sequence=number))


def builder_of(size, replay_proportion=0.0, replay_slots=0, seed=0):
    return TrainBatchBuilder(size, replay_proportion, replay_slots, seed)


@pytest.mark.parametrize(("rollout", "expected"), [(50, 500), (60, 540), (512, 512)])
def test_a_train_batch_has_enough_whole_rollouts(rollout, expected):
    batches = builder_of(500)
    items = [item for number in range(60) for item in batches.add([make_rollout(number, rollout)], 3)]
    assert {item.num_steps for item in items} == {expected}
    versions = [part.rollout.header.weights_version for item in items for part in item.rollouts]
    assert versions == list(range(len(versions)))  # each rollout is used once, in order
    assert batches.pending_share == (60 * rollout - len(items) * expected) / 500


def test_reset_steps_do_not_add_rollouts_to_a_train_batch():
    """Check that reset steps count toward the size of a train batch, but are not counted as env steps."""
    items = list(builder_of(100).add([make_rollout(number, num_resets=number) for number in range(6)], 3))
    assert [(item.size, item.num_steps) for item in items] == [(100, 99), (100, 95), (100, 91)]


def test_rollouts_that_arrive_together_are_a_train_batch_by_default():
    (item,) = builder_of(None).add([make_rollout(1), make_rollout(2)], 4)
    assert [(part.rollout.header.weights_version, part.version_queued) for part in item.rollouts] == [(1, 4), (2, 4)]


@pytest.mark.parametrize(("proportion", "kinds"), [(0.5, "NNRNNRNNRNNR"), (2.0, "NRRNRRNRRNRR"), (1.0, "NRNRNRNRNRNR"),
                                                   (0.3, "NNNNRNNNRNNNR")])
def test_old_rollouts_are_mixed_in(proportion, kinds):
    """Check the order of new (N) and old (R) rollouts after the first train batch, which has two new rollouts."""
    batches = builder_of(100, proportion, 4, seed=3)
    parts = [part for number in range(200) for item in batches.add([make_rollout(number)], 0) for part in item.rollouts]
    assert [part.is_old for part in parts[:2]] == [False, False]
    assert "".join("NR"[part.is_old] for part in parts[2:2 + len(kinds)]) == kinds
    newest, drawn, places = -1, set(), set()
    for part in parts:
        number = part.rollout.header.weights_version
        if part.is_old:
            assert newest - 4 <= number < newest  # one of the four rollouts before the newest one
            drawn.add(newest - number)
            places.add((newest % 4, newest - number))
        else:
            assert number == newest + 1
            newest = number
    assert drawn == {1, 2, 3, 4}
    assert len(places) == 16 or proportion < 2.0  # at any time, each of the four rollouts may be drawn


@pytest.mark.parametrize("proportion", ["0.29", "0.58", "0.5", "0.3", "2.5"])
def test_the_number_of_old_rollouts_is_rounded_down_exactly(proportion):
    """Check floor(f k) old rollouts after k new ones, also where f k is inexact, as in 0.58 * 50."""
    batches, num_old = builder_of(1, float(proportion), 4), []
    for number in range(1, 122):
        parts = [part for batch in batches.add([make_rollout(number)], 0) for part in batch.rollouts]
        num_old.append(sum(part.is_old for part in parts) + (num_old or [0])[-1])
    # Mixing starts when a slot is filled, with the second rollout.
    assert num_old == [Fraction(proportion) * k // 1 for k in range(121)]


def test_steps_of_old_rollouts_do_not_count_as_new():
    item = TrainBatch([QueuedRollout(make_rollout(0, 30), 1), QueuedRollout(make_rollout(4, 20), 1, is_old=True)])
    assert (item.num_steps, item.num_new_steps, item.version) == (50, 30, 0)


def mixed(new, old):
    """Return a train batch with one new and one old rollout."""
    return TrainBatch([QueuedRollout(make_rollout(3, new), 1), QueuedRollout(make_rollout(1, old), 1, is_old=True)])


@pytest.mark.parametrize(("new", "old", "sizes", "expected"), [
    (31, 20, [17, 17, 17], [10, 10, 11]), (7, 13, [8, 8, 4], [2, 3, 2]), (10, 0, [6, 4], [6, 4]), (0, 9, [9], [0])])
def test_new_steps_are_divided_among_minibatches(new, old, sizes, expected):
    batch, bounds = mixed(new, old), list(itertools.accumulate(sizes, initial=0))
    batch.uses = 1
    assert [batch.count_new(*pair) for pair in itertools.pairwise(bounds)] == expected
    assert batch.count_new(4, 4) == 0
    batch.uses = 2
    assert batch.count_new(0, sizes[0]) == 0


class Source(TrainBatchSource):
    """A source of given train batches."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def take(self):
        batch = self.batches.pop(0)
        batch.uses += 1
        return batch

    def take_levels(self):
        return ()


@dataclasses.dataclass(frozen=True)
class Part:
    """A minibatch."""

    num_new_samples: int


def source_of(*batches, sizes):
    """Return a source of minibatches, in which each pass over a train batch has minibatches of these sizes."""
    ledger, stats = Ledger(), WorkerStats(lambda: 0.0)
    storage = SimpleNamespace(provides=SimpleNamespace(is_kept=False), insert_from=lambda *_: None,
                              before_gradients=lambda: None)
    algo = SimpleNamespace(advantage_normalization="none", batches=lambda storage: iter(map(Part, sizes.pop(0))),
                           take_moments=dict)
    worker = SimpleNamespace(algo=algo, storage=storage, version=5)
    return BatchSource(worker, Source(*batches), ledger, stats, ProcessGroup(), is_local=True), ledger, stats


def test_minibatches_of_each_train_batch_count_its_own_new_steps():
    """Check two train batches of new and old steps, and a second use of the second one."""
    first, second = mixed(31, 20), mixed(7, 13)
    source, _, stats = source_of(first, second, second, sizes=[[17, 17, 17], [8, 8, 4], [8, 8, 4]])
    found = [source.next().num_new_samples for _ in range(9)]
    assert found == [10, 10, 11, 2, 3, 2, 0, 0, 0]
    assert (stats.counters.rollouts, stats.counters.collected_in_use) == (2, 38)  # new rollouts, at their first use


def test_steps_that_no_gradient_used_are_dropped_once():
    source, ledger, _ = source_of(mixed(31, 20), sizes=[[17, 17, 17]])
    ledger.collect(31)
    ledger.move(31, "in_flight", "queued")
    source.used(source.next().num_new_samples)
    ledger.move(10, "queued", "sent")
    for _ in range(2):
        source.abandon(DropReason.EARLY_STOP)
    assert ledger.snapshot().dropped == {"early_stop": 21}
    assert ledger["queued"] == 0


def column(value):
    """Return a rollout of four steps with this reward."""
    rows = torch.full((4, 1), float(value))
    no = rows > 1e9
    return RolloutData(obs={}, done=torch.zeros(5, 1, dtype=torch.bool), rhs={}, mask=None, action=rows.clone(),
                       reward=rows, terminated=no, truncated=no, valid=~no,
                       final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={})


class Rounds:
    """Rounds of a local worker, which writes each rollout into the same tensors."""

    def __init__(self, rollouts_per_round=1):
        self.data, self.number, self.per_round = column(0), 0, rollouts_per_round

    def collect(self):
        made = []
        for _ in range(self.per_round):
            self.number += 1
            if self.per_round > 1:
                self.data = column(0)
            self.data.reward.fill_(self.number)
            made.append(Rollout(self.data, make_rollout(self.number, 4).header))
        return made


@pytest.mark.parametrize(("goal", "step", "per_round", "sizes"), [
    (None, None, 1, [1, 1]), (10, None, 1, [3, 3]), (4, None, 1, [1, 1]), (10, 6, 1, [4, 4]), (20, None, 2, [6, 6]),
    (17, 9, 2, [8, 8])])
def test_rounds_of_one_train_batch_keep_their_own_data(goal, step, per_round, sizes):
    """Check the data and the order of several rounds, and that a train batch consists of whole microbatches."""
    rounds = Rounds(per_round)
    collector = SimpleNamespace(apply_resizes=lambda: None, rounds=rounds, stopped=False, index_worker=0,
                                local_worker=SimpleNamespace(version=3))
    source = RoundSource(collector, SimpleNamespace(is_ready=False, take_levels=lambda: ()), Ledger(),
                         WorkerStats(lambda: 0.0), goal, step)
    number = 0
    for size in sizes:
        batch = source.take()
        rewards = [queued.rollout.data.reward.unique().tolist() for queued in batch.rollouts]
        versions = [queued.rollout.header.weights_version for queued in batch.rollouts]
        assert versions == list(range(number + 1, number + 1 + size))
        assert rewards == [[float(version)] for version in versions]
        number += size


def test_the_rest_of_a_preempted_rollout_keeps_its_own_data():
    """Check local collection, in which the rest of a preempted rollout precedes the next rollout."""
    rounds, lengths = Rounds(), []

    def collect(num_steps):
        lengths.append(num_steps)
        (rollout,) = rounds.collect()
        return dataclasses.replace(rollout, header=dataclasses.replace(
            rollout.header, num_steps=3 if rounds.number == 1 else 4, preempted=rounds.number == 1))
    worker = SimpleNamespace(journal=Journal(), collect=collect)
    strategy = LocalCollection(worker, Ledger(), Stopwatch(lambda: 0.0), OwedSteps(4, is_kept=True))
    assert len(strategy.collect()) == 1
    found = strategy.collect()
    assert [rollout.data.reward.unique().tolist() for rollout in found] == [[2.0], [3.0]]
    assert lengths == [None, 1, None]
