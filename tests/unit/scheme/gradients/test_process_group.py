"""Gradient workers that average their gradients among themselves."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.scheme.updates.statistics import Statistics


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
    # The ranks' own data differ, so equal parameters come from averaging.
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
