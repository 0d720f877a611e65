"""Tests of a worker tree that is composed by hand, on Ray."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC, PARALLEL, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme import CWorkerSet, GWorkerSet

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_one_remote_worker_at_each_level_counts_every_step(shared_ray, stop, stop_in_balance):
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    collection = CWorkerSet.create_factory(
        1, PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        GAEBuffer.create_factory(8), envs)
    gradients = GWorkerSet.create_factory(1, collection, col_execution=PARALLEL, col_communication=ASYNC)
    scheme = Scheme.from_factory(gradients, grad_execution=PARALLEL, runtime="ray", seed=1)
    stop.append(scheme)
    for _ in range(3):
        scheme.step()
    assert scheme.metrics()["workers"] == 2
    assert scheme.ledger()["consumed_unique"] > 0
    assert stop_in_balance(scheme)["collected"] > 0
