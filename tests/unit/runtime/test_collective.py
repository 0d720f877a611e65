"""Test sums over GPUs; a group of gloo or a made-up group takes the place of NCCL, and CPU tensors those of GPUs."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from pytorchrl.errors import RankLostError
from pytorchrl.runtime import collective
from pytorchrl.runtime.collective import (
    GlooCollective,
    NcclCollective,
    identity_of,
    join_ranks,
    make_nccl,
    propose_address,
    suits_nccl,
)
from pytorchrl.scheme.gradients.process_group import GradientGroup

CPU = torch.device("cpu")


@pytest.mark.parametrize(("gpus", "expected"), [
    (["a", "b"], True), (["a", "b", "c"], True), (["a", "a"], False), (["a", "b", "a"], False), (["a"], False),
    ([], False),
])
def test_nccl_is_for_several_ranks_with_a_gpu_each(gpus, expected):
    assert suits_nccl(gpus) is expected


def test_only_gpus_have_an_identity(monkeypatch):
    asked = []
    monkeypatch.setattr("torch.cuda.get_device_properties",
                        lambda device: asked.append(device) or SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert identity_of(torch.device("cuda:1")) == "GPU-1"
    assert asked == [torch.device("cuda:1")]
    assert identity_of(CPU) == ""
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert identity_of(torch.device("cuda:1")) == ""


@pytest.fixture
def in_ranks(monkeypatch):
    """Return a function that calls `body(collective, rank)` in threads, whose ranks have these GPUs."""
    own = threading.local()
    monkeypatch.setattr(collective, "identity_of", lambda device: own.gpu)
    monkeypatch.setattr(collective, "make_nccl", lambda store, rank, size, generation: ProcessGroupGloo(
        PrefixStore(f"gpus {generation}", store), rank, size, timedelta(seconds=20)))

    def run(gpus, body, **options):
        (address, port), found = propose_address(is_local=True), {}

        def rank_of(rank):
            own.gpu = gpus[rank]
            group = join_ranks(address, port, rank, len(gpus), 20.0, **options)
            try:
                found[rank] = body(group, rank)
            finally:
                barrier.wait(20)
                group.close()
        barrier = threading.Barrier(len(gpus))
        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(len(gpus))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [found[rank] for rank in range(len(gpus))]
    return run


@pytest.mark.parametrize(("gpus", "options", "kind"), [
    (["a", "b"], {}, NcclCollective), (["a", "a"], {}, GlooCollective), (["a", ""], {}, GlooCollective),
    (["", ""], {}, GlooCollective), (["a", "b"], {"in_order": True}, GlooCollective),
])
def test_all_ranks_choose_the_same_backend(in_ranks, gpus, options, kind):
    assert in_ranks(gpus, lambda group, rank: type(group), **options) == [kind] * len(gpus)


def test_gradients_are_averaged_and_gathered_with_nccl(in_ranks):
    def body(group, rank):
        assert isinstance(group, NcclCollective)
        ranks = GradientGroup(group)
        mean, absent = ranks.mean([torch.full((3,), float(rank)), None], [rank + 1, 0], [3, 2], votes=rank == 1)
        return mean.tolist(), absent, ranks.num_votes, ranks.gather_objects(rank * "x")
    expected = [(0 * 1 + 1 * 2 + 2 * 3) / 6] * 3, None, 1, ["", "x", "xx"]
    for mean, *others in in_ranks(["a", "b", "c"], body):
        assert mean == pytest.approx(expected[0])
        assert tuple(others) == expected[1:]


def test_errors_and_timeouts_of_nccl_do_not_end_the_process(monkeypatch):
    """Check how the group of NCCL is made, which a torch without CUDA lacks."""
    made = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            made.append((rank, size, options._timeout, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))
    monkeypatch.setattr("torch.distributed.distributed_c10d.ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")  # the variable is removed after the test
    make_nccl(HashStore(), 1, 2, 3)
    [(rank, size, timeout, handling)] = made
    assert (rank, size, handling) == (1, 2, "0")
    assert timeout > timedelta(days=1)


class Stuck:
    """An NCCL group in which a sum never completes; it is also the handle of that sum."""

    def __init__(self, error=None):
        self.error, self.num_aborted, self.is_started = error, 0, threading.Event()

    def allreduce(self, tensors):
        self.is_started.set()
        if self.error is not None:
            raise self.error
        return self

    def is_completed(self):
        return False

    def abort(self):
        self.num_aborted += 1


@pytest.fixture
def alone():
    """Return a function that makes a rank that is alone in a group, with an NCCL group of its own."""
    groups = []

    def make(nccl, timeout_s):
        address, port = propose_address(is_local=True)
        groups.append(NcclCollective(GlooCollective(address, port, 0, 1, 20.0), nccl, CPU, timeout_s))
        return groups[-1]
    yield make
    for group in groups:
        group.close()


def test_a_sum_that_does_not_end_is_aborted(alone):
    nccl = Stuck()
    group = alone(nccl, 0.01)
    with pytest.raises(RankLostError, match=r"not complete after 0\.01 s"):
        group.sum(torch.ones(2))
    assert nccl.num_aborted == 1
    with pytest.raises(RankLostError, match="left the group"):
        group.sum(torch.ones(2))
    group.close()
    assert nccl.num_aborted == 1


def test_another_thread_ends_a_sum(alone):
    nccl = Stuck()
    group = alone(nccl, 10.0)
    leaver = threading.Thread(target=lambda: nccl.is_started.wait(20) and group.close())
    leaver.start()
    with pytest.raises(RankLostError, match="this rank has left the group"):
        group.sum(torch.ones(2))
    leaver.join(20)
    assert nccl.num_aborted == 1


def test_an_error_of_nccl_is_reported(alone):
    nccl = Stuck(RuntimeError("NCCL error in: somewhere\nmore"))
    with pytest.raises(RankLostError, match=r"aborted: NCCL error in: somewhere$"):
        alone(nccl, 1.0).sum(torch.ones(2))
    assert nccl.num_aborted == 1


class Unconnected(Stuck):
    """An NCCL group whose ranks never connect, so that the call that starts the first sum does not return."""

    def __init__(self):
        super().__init__()
        self.is_released = threading.Event()

    def allreduce(self, tensors):
        self.is_started.set()
        self.is_released.wait(60)
        return self

    def abort(self):
        super().abort()
        self.is_released.set()


@pytest.mark.parametrize(("nccl", "message"), [
    (Unconnected, r"could not be connected: the GPUs are not connected after 0\.05 s$"),
    (Stuck, r"could not be connected: (it is not complete|the GPUs are not connected) after 0\.05 s$"),
    (lambda: Stuck(RuntimeError("NCCL error in: somewhere\nmore")), "connected: NCCL error in: somewhere$"),
])
def test_connecting_the_gpus_has_a_deadline(alone, nccl, message):
    """Check it with a stand-in for NCCL, also that the rank leaves both groups and that no thread is left."""
    before = set(threading.enumerate())
    stuck = nccl()
    group = alone(stuck, 0.05 if stuck.error is None else 60.0)
    with pytest.raises(RankLostError, match=message):
        group.connect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert stuck.num_aborted == 1
    with pytest.raises(RankLostError, match="left the group"):
        group.sum(torch.ones(2))
    with pytest.raises(RankLostError, match="left the group"):
        group.gather(torch.ones(2))
    group.close()
    assert stuck.num_aborted == 1


def test_ranks_that_join_with_nccl_are_connected(in_ranks, monkeypatch):
    connect, connected = NcclCollective.connect, []

    def watched(group):
        connect(group)
        connected.append(group)
    monkeypatch.setattr(NcclCollective, "connect", watched)
    assert all(in_ranks(["a", "b"], lambda group, rank: group in connected))


def test_a_lost_rank_is_noticed_before_nccl_is_used(alone):
    nccl = Stuck()
    group = alone(nccl, 10.0)
    group._gloo.close()
    with pytest.raises(RankLostError):
        group.sum(torch.ones(2))
    assert not nccl.is_started.is_set()
