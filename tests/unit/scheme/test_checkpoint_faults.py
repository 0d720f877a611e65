"""Tests of workers and shards that are lost before or during a checkpoint."""

from __future__ import annotations

import functools

import pytest

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import WorkerDiedError
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.replay.r_worker import RWorker
from tests.unit.scheme.checkpointed import AGENTS, through_a_file


def test_a_checkpoint_without_a_lost_worker_can_be_resumed(check_ledger):
    """Check that the ledger is exact after resuming from a checkpoint that lacks the state of a lost worker."""
    agent = synthetic_agent(size=4)
    settings = {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC,
                "runtime": "simulated", "seed": 1}
    scheme = Scheme(*agent, **settings, faults="kill grad.1 @ grad 3; kill col.2 @ step 9")
    for _ in range(8):
        scheme.step()
    checkpoint = through_a_file(scheme.checkpoint())
    resumed = Scheme(*agent, **settings)
    resumed.resume(checkpoint)
    resumed.start()
    assert check_ledger(resumed) == check_ledger(scheme)
    assert check_ledger(resumed)["dropped"]["worker_lost"] > 0
    for _ in range(8):
        resumed.step()
    again = Scheme(*agent, **settings)  # resume from a checkpoint of the resumed scheme
    again.resume(through_a_file(resumed.checkpoint()))
    again.start()
    assert check_ledger(again) == check_ledger(resumed)
    for one in (resumed, again):
        one.step()
        final = one.stop()
        assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    scheme.stop()


@pytest.mark.parametrize("moment", ["state", "reseed"])
def test_a_worker_may_be_lost_during_a_checkpoint(check_ledger, monkeypatch, moment):
    """Check that a checkpoint contains the state of a lost worker only if it was lost after it sent the state."""
    agent = synthetic_agent(size=4)
    settings = {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC,
                "runtime": "simulated", "seed": 1}
    scheme = Scheme(*agent, **settings)
    for _ in range(8):
        scheme.step()
    original = getattr(GWorker, moment)

    @functools.wraps(original)
    def die(worker, *args):
        if worker.index_worker == 1:
            raise WorkerDiedError("GWorker 1 has died")
        return original(worker, *args)
    monkeypatch.setattr(GWorker, moment, die)
    checkpoint = through_a_file(scheme.checkpoint())
    monkeypatch.undo()
    check_ledger(scheme)
    resumed = Scheme(*agent, **settings)
    resumed.resume(checkpoint)
    resumed.start()
    ledger = check_ledger(resumed)
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert (checkpoint["state"]["workers"][0] is None) == (moment == "state")
    if moment == "state":
        assert ledger == check_ledger(scheme)
    resumed.step()
    final = resumed.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    scheme.stop()


def test_a_shard_may_be_lost_during_a_checkpoint(check_ledger, monkeypatch):
    def make():
        return Scheme.apex(*AGENTS["dqn, prioritised"](), runtime="simulated", seed=1, num_replay_workers=3, size=300,
                           learning_starts=40, max_replay_ratio=2.0, train_batch_size=8)
    scheme, resumed = make(), make()
    for _ in range(20):
        scheme.step()
    original = RWorker.state

    @functools.wraps(original)
    def die(worker):
        if worker.index_worker == 2:
            raise WorkerDiedError("a shard has died")
        return original(worker)
    monkeypatch.setattr(RWorker, "state", die)
    checkpoint = through_a_file(scheme.checkpoint())
    monkeypatch.undo()
    resumed.resume(checkpoint)
    resumed.start()
    ledger = check_ledger(resumed)
    assert ledger["dropped"]["worker_lost"] > 0
    held = resumed.update_worker.local_worker.shards
    assert ledger["resident"] == sum(state.resident for state in held.states) > 0
    for scheme_ in (scheme, resumed):
        scheme_.step()
        final = scheme_.stop()
        assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())
