"""Check the update worker."""

from __future__ import annotations

import types

import pytest

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv, linear
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import StoppedError
from pytorchrl.runtime import ThreadRuntime
from pytorchrl.scheme.updates.u_worker import UpdaterThread
from pytorchrl.support.threads import State


@pytest.fixture
def scheme():
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
    scheme = Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1, lr=linear(1.0, 0.0)),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        GAEBuffer.create_factory(4), envs, num_col_workers=2, col_communication="asynchronous", runtime="simulated",
        costs={"grad": 10.0}, queue_size=8, max_policy_lag=1000, seed=1)  # the learner is slow, so rollouts are queued
    yield scheme
    scheme.stop()


def test_schedules_follow_the_steps_that_updates_have_used(scheme):
    worker = scheme.start(target_steps=1000)
    for _ in range(5):
        used = scheme.ledger()["consumed_unique"]
        scheme.step()
        assert worker.local_worker.algo.parameters["lr"] == pytest.approx(1.0 - used / 1000)
    assert scheme.ledger()["collected"] > 2 * scheme.ledger()["consumed_unique"] > 0


def test_a_stopped_update_worker_makes_no_step(scheme):
    worker = scheme.start(1000)
    final = worker.stop()
    assert worker.stop() is final
    with pytest.raises(StoppedError):
        worker.step()


def test_the_updater_thread_knows_its_state():
    strategy = types.SimpleNamespace(step=lambda: None, is_used_up=False)
    updater = UpdaterThread(strategy, ThreadRuntime())
    assert updater.state is State.NEW
    updater.start()
    assert updater.progressed.wait(60)
    assert updater.state is State.RUNNING
    updater.interrupt()
    updater.join(60)
    assert updater.state is State.STOPPED

    def fail():
        raise ValueError("no update")
    strategy.step = fail
    failing = UpdaterThread(strategy, ThreadRuntime())
    failing.start()
    failing.join(60)
    assert failing.state is State.FAILED
    with pytest.raises(ValueError, match="no update"):
        failing.check()
