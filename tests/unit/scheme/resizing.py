"""Settings with remote collection workers, an account of all their steps, and schemes, for tests of resizes."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pytorchrl import ASYNC, SYNC, Scheme
from pytorchrl.agent.synthetic import SyntheticEnvs, SyntheticStorage, synthetic_agent
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.gradients.worker_stats import WorkerStats

NUMBERS = (8, 3)
REMOTE = {
    f"{'async' if col is ASYNC else 'sync'}, {grads} {'async' if grad is ASYNC else 'sync'}":
        {"col_communication": col, "num_grad_workers": grads, "grad_communication": grad}
    for col in (SYNC, ASYNC) for grads in (1, 2) for grad in (SYNC, ASYNC)}
CASES = {
    **{name: settings | ({"queue_size": 2} if settings["col_communication"] is ASYNC else {})
       for name, settings in REMOTE.items()},
    "on demand": {"col_communication": ASYNC, "max_policy_lag": 8, "on_policy_lag": "wait"},
    "train batches": {"col_communication": ASYNC, "train_batch_size": 20, "num_passes": 2, "minibatch_buffer_size": 2},
    "oldest dropped": {"col_communication": ASYNC, "queue_size": 1, "queue_policy": "drop_oldest"},
    "delayed weights": {"col_communication": ASYNC, "queue_size": 2, "max_weight_sync_delay": 10},
    "central inference": {"col_communication": ASYNC, "inference": "central", "queue_size": 2},
    "central inference, one by one": {"col_communication": ASYNC, "inference": "central", "inference_batch": 1,
                                      "queue_size": 2},
    "rounds": {"train_batch_size": 40},
    "preemption": {"col_fraction_workers": 0.5},
    "finished stragglers": {"col_fraction_workers": 0.5, "on_straggler": "finish"},
    "ranks": {"num_grad_workers": 2, "distribute_gradients": True},
    "rapid": {"num_grad_workers": 2, "distribute_gradients": True, "col_communication": ASYNC, "queue_size": 2},
    "shards": {"col_communication": ASYNC, "grad_communication": ASYNC, "num_replay_workers": 2, "train_batch_size": 8},
    "shards, central inference": {"col_communication": ASYNC, "num_replay_workers": 2, "train_batch_size": 8,
                                  "inference": "central"},
}


class Account:
    """An account of all env steps and weights that does not use the ledger, versions or messages.

    Attributes:
        made: Numbers of all steps that environments have taken.
        used: Numbers of all steps that learners have received.
        lags: The number of updates between the weights that collected a rollout and those at its first use, for each
            rollout, counted in the parameters themselves (each update adds 1).
    """

    def __init__(self, monkeypatch):
        self.made, self.used, self.lags = [], [], []
        acted, learners = {}, []
        step, insert, collect, add = (SyntheticEnvs.step, SyntheticStorage.insert_data_slice, CWorker.collect,
                                      WorkerStats.add_rollout)

        def stepping(envs, action):
            result = step(envs, action)
            self.made.extend(result.reward.tolist())
            return result

        def inserting(storage, rollouts):
            for rollout in rollouts:
                self.used.extend(np.asarray(rollout.reward).reshape(-1).tolist())
            insert(storage, rollouts)

        @functools.wraps(collect)
        def collecting(worker, weights=None, num_steps=None):
            rollout = collect(worker, weights, num_steps)
            header = rollout.header
            acted[header.worker, header.incarnation, header.sequence, worker.index_parent] = int(worker.algo.count)
            return rollout

        def adding(stats, header, version_queued, version_used):
            for parent, learner in enumerate(learners):
                key = (header.worker, header.incarnation, header.sequence, parent)
                if key in acted and stats is learner.stats:
                    self.lags.append(int(learner.algo.count) - acted[key])
            add(stats, header, version_queued, version_used)

        self.learners = learners
        monkeypatch.setattr(SyntheticEnvs, "step", stepping)
        monkeypatch.setattr(SyntheticStorage, "insert_data_slice", inserting)
        monkeypatch.setattr(CWorker, "collect", collecting)
        monkeypatch.setattr(WorkerStats, "add_rollout", adding)

    def collectors(self, start):
        """Return the indices of the collection workers that have taken the steps from `made[start]` on."""
        return {number >> 40 & 0xFFF for number in self.made[start:]}

    def watch(self, scheme):
        """Observe the learners of a scheme."""
        root = scheme.update_worker
        self.learners[:] = [root.local_worker, *(handle.native.worker for handle in root.remote_workers)]


@pytest.fixture(name="account")
def account_fixture(monkeypatch):
    """Return an `Account`."""
    return Account(monkeypatch)


@pytest.fixture(name="make")
def make_fixture():
    """Return a function that makes simulated schemes of the synthetic agent; all are stopped after the test."""
    schemes = []

    def make_(size=4, **settings):
        capacity = 400 if "num_replay_workers" in settings else None
        agent = synthetic_agent(size=size, num_epochs=1 if capacity else 2, num_mini_batch=2, capacity=capacity)
        schemes.append(Scheme(*agent, **{"seed": 1, "runtime": "simulated", "num_col_workers": 2} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def num_workers(scheme):
    """Return the number of collection workers of each gradient worker."""
    root = scheme.update_worker
    grad_workers = [handle.native.worker for handle in root.remote_workers] or [root.local_worker]
    return [len(worker.remote_workers) for worker in grad_workers]
