"""Tests of workers and shards that are lost before or during a checkpoint."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pytorchrl import A2C, ASYNC, GAEBuffer, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import WorkerDiedError
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.replay.r_worker import RWorker
from tests.unit.scheme.checkpointed import AGENTS, differences, go_on, on_policy, through_a_file


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
    for _ in range(10):
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


TWO = {"num_grad_workers": 2, "runtime": "simulated", "seed": 1}


@pytest.mark.parametrize("distribute_gradients", [False, True])
def test_a_run_with_a_replaced_gradient_worker_resumes_bit_for_bit(distribute_gradients):
    """Check a gradient worker that collects itself; its replacement has other seeds than the first worker."""
    agent = on_policy(A2C.create_factory(), GAEBuffer.create_factory(8))
    settings = {**TWO, "distribute_gradients": distribute_gradients}
    scheme = Scheme(*agent, **settings, faults="kill grad.2 @ grad 4")
    scheme.start(2000)
    go_on(scheme, 9)
    resumed = Scheme(*agent, **settings)
    resumed.resume(through_a_file(scheme.checkpoint()))
    resumed.start(2000)
    np.testing.assert_equal(go_on(resumed, 5), go_on(scheme, 5))
    assert [name for name in differences(scheme.checkpoint(), resumed.checkpoint()) if "faults" not in name] == []
    assert scheme.stop()["dropped"] == resumed.stop()["dropped"]


def test_replacements_after_resuming_do_not_repeat_earlier_environments(monkeypatch):
    """Check the seeds of the environments of a gradient worker that is replaced before and after a checkpoint."""
    seeds = []
    build = VecEnv.__init__

    def note(env, options, **place):
        build(env, options, **place)
        if place.get("mode") == "train":
            seeds.append(tuple(env.seeds))
    monkeypatch.setattr(VecEnv, "__init__", note)
    agent = on_policy(A2C.create_factory(), GAEBuffer.create_factory(8))
    scheme = Scheme(*agent, **TWO, faults="kill grad.2 @ grad 4")
    scheme.start(2000)
    go_on(scheme, 9)
    checkpoint = through_a_file(scheme.checkpoint())
    scheme.stop()
    num_before = len(seeds)
    resumed = Scheme(*agent, **TWO, faults="kill grad.2 @ grad 4")
    resumed.resume(checkpoint)
    resumed.start(2000)
    num_built = len(seeds)
    go_on(resumed, 9)
    resumed.stop()
    replacement = seeds[num_built:]
    assert len(replacement) == 1
    assert not set(replacement) & set(seeds[:num_before])
