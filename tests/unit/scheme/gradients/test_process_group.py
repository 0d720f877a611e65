"""Tests of ranks, which average gradients among themselves: single exchanges and whole schemes."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch

from pytorchrl.errors import RankLostError
from pytorchrl.runtime import ThreadRuntime
from pytorchrl.runtime.collective import propose_address
from pytorchrl.scheme.gradients.process_group import GradientGroup, Meeting, ProcessGroup
from pytorchrl.scheme.updates.statistics import Statistics


def in_threads(size, body):
    """Call `body(rank, place)` in `size` threads whose ranks have joined the same group.

    Returns:
        The results in the order of the ranks; the result of a call that fails is its `RankLostError`.
    """
    runtime, found = ThreadRuntime(), queue.Queue()
    ranks = [ProcessGroup() for _ in range(size)]
    address, port = propose_address(is_local=True)

    def run(place):
        try:
            ranks[place].join(runtime, Meeting(1, address, port, size, 20.0), place)
            found.put((place, body(ranks[place], place)))
        except RankLostError as error:
            found.put((place, error))
    threads = [threading.Thread(target=run, args=(place,)) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [value for _, value in sorted((found.get_nowait() for _ in range(size)), key=lambda pair: pair[0])]


def test_values_of_any_size_are_gathered():
    told = in_threads(3, lambda rank, place: rank._group.gather_objects([{"x": np.full(place * 100, place)}] * place))
    for values in told:
        assert [len(value) for value in values] == [0, 1, 2]
        assert [part["x"].tolist() for part in values[2]] == [[2] * 200] * 2


def test_all_ranks_are_released_when_one_leaves():
    """Check that both the rank that leaves and the ranks that wait for it get an error."""
    def body(rank, place):
        if place == 3:
            rank.leave(1)
        return rank.mean([torch.ones(4)], [1], [4], shares=False)
    assert all(isinstance(value, RankLostError) for value in in_threads(4, body))


def test_a_signal_ends_a_wait():
    """Check that `leave` interrupts an exchange that waits in another thread.

    The other rank may complete one exchange, with data that the first rank sent before it left. Its second exchange
    fails.
    """
    def body(rank, place):
        if place == 0:
            threading.Timer(0.2, rank.leave, [1]).start()
            return rank.mean([torch.ones(4)], [1], [4], shares=False)
        left.wait(60)
        rank.mean([torch.ones(4)], [1], [4], shares=False)
        return rank.mean([torch.ones(4)], [1], [4], shares=False)
    left = threading.Event()
    threading.Timer(1.0, left.set).start()
    assert all(isinstance(value, RankLostError) for value in in_threads(2, body))


class Alone:
    """A process group with one rank."""

    size, device = 1, torch.device("cpu")

    def __init__(self):
        self.closed = False

    def sum(self, tensor):
        return tensor

    def gather(self, tensor):
        return [tensor]

    def close(self):
        self.closed = True


def test_leaving_affects_only_the_given_generation_of_ranks(monkeypatch):
    groups = []
    monkeypatch.setattr(ThreadRuntime, "join_ranks", lambda self, *args: groups.append(Alone()) or groups[-1])
    rank = ProcessGroup()
    rank.join(ThreadRuntime(), Meeting(2, "", 0, 1, 1.0), 0)
    rank.leave(1)  # generation 1 is over, so generation 2 continues
    assert not groups[0].closed
    rank.leave(3)  # ends generation 2 now, and generation 3 as soon as this rank joins it
    assert groups[0].closed
    rank.join(ThreadRuntime(), Meeting(3, "", 0, 1, 1.0), 0)
    assert groups[1].closed
    rank.join(ThreadRuntime(), Meeting(4, "", 0, 1, 1.0), 0)
    assert not groups[2].closed
    rank.leave()
    assert groups[2].closed


def test_moments_are_shared_once_even_if_the_exchange_fails(monkeypatch):
    monkeypatch.setattr(ThreadRuntime, "join_ranks", lambda self, *args: Alone())
    rank = ProcessGroup()
    rank.join(ThreadRuntime(), Meeting(1, "", 0, 1, 1.0), 0)
    rank.store([{"x": (1, 2.0, 3.0)}])
    rank.mean([torch.ones(1)], [1], [1], shares=False)
    assert rank.shared(False) == ()  # no rank announced that it shares moments
    rank.mean([torch.ones(1)], [1], [1], shares=True)
    with monkeypatch.context() as patch:
        patch.setattr(GradientGroup, "gather_objects",
                      lambda self, value: (_ for _ in ()).throw(RankLostError("broken")))
        with pytest.raises(RankLostError):
            rank.shared(True)
    assert rank.share() == ()


def test_a_late_signal_does_not_revoke_a_later_one(monkeypatch):
    groups = []
    monkeypatch.setattr(ThreadRuntime, "join_ranks", lambda self, *args: groups.append(Alone()) or groups[-1])
    rank = ProcessGroup()
    rank.leave(3)
    rank.leave(1)
    rank.join(ThreadRuntime(), Meeting(3, "", 0, 1, 1.0), 0)
    assert groups[0].closed


def test_all_moments_are_shared_once_and_only_if_a_rank_voted(monkeypatch):
    gathered = []

    class Counted(Alone):
        def gather(self, tensor):
            gathered.append(tensor)
            return [tensor]
    monkeypatch.setattr(ThreadRuntime, "join_ranks", lambda self, *args: Counted())
    rank, one, other, third = ProcessGroup(), {"x": (1, 2.0, 3.0)}, {"x": (4, 5.0, 6.0)}, {"x": (7, 8.0, 9.0)}
    rank.join(ThreadRuntime(), Meeting(1, "", 0, 1, 1.0), 0)

    def vote(*, shares):
        rank.mean([torch.ones(1)], [1], [1], shares=shares)
    assert (rank.has_unshared([]), rank.has_unshared([one])) == (False, True)
    rank.store([one])
    rank.store([other])
    assert rank.has_unshared([])
    vote(shares=True)
    vote(shares=False)
    assert rank.shared(True) == ()  # no rank voted in the latest exchange
    assert gathered == []
    vote(shares=True)
    assert rank.shared(False) == ()  # takes part in the exchange, because another rank voted
    assert gathered
    assert rank.shared(True) == (one, other)
    assert (rank.share(), rank.has_unshared([])) == ((), False)
    rank.store([third])
    rank.discard()
    assert (rank.share(), rank.has_unshared([])) == ((), False)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_distribute_gradients_keeps_all_ranks_equal(make_scheme, num_workers):
    scheme = make_scheme(num_grad_workers=num_workers, distribute_gradients=True)
    initial = scheme.acting_state()["all"]
    seen = [initial]
    for version in range(1, 8):
        scheme.step()
        ranks = [handle.native.worker for handle in scheme.update_worker.remote_workers]
        vectors = [rank.algo.acting_state()["all"] for rank in ranks]
        assert [rank.actor_version for rank in ranks] == [version] * num_workers
        assert all(torch.equal(vectors[0], vector) for vector in vectors[1:])
        assert not torch.equal(vectors[0], seen[-1])
        assert torch.equal(scheme.acting_state()["all"], vectors[0])
        seen.append(vectors[0])
    # The ranks collected different data, so their parameters are equal only because gradients are averaged.
    rewards = [rank.storage._rollouts[0].obs["obs"] for rank in ranks]
    assert not torch.equal(rewards[0], rewards[1])
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] + ledger["dropped"]["shutdown"]


def test_distributed_gradients_never_reach_the_server(make_scheme, monkeypatch):
    received = []
    receive = Statistics.receive
    monkeypatch.setattr(Statistics, "receive", lambda self, gradients: (
        received.append(gradients.vectors), receive(self, gradients))[1])
    make_scheme(num_grad_workers=2, distribute_gradients=True).step()
    assert received == [None, None]
