"""Tests of draining, and of stragglers among ranks, with real Ray workers."""

from __future__ import annotations

import pytest

from pytorchrl import A2C, ASYNC, DQN, OnPolicyActor, PERBuffer, QActor, Scheme, VanillaOnPolicyBuffer, VecEnv
from pytorchrl.envs.testing import SleepEnv

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FREE = {"num_cpus": 0}


def drain(scheme):
    ledger = scheme.drain(60.0)
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert ledger["collected"] == ledger[
        "consumed_unique"] + ledger["resident"] + ledger["evicted"] + sum(ledger["dropped"].values())
    return ledger


@pytest.mark.parametrize("name", ["apex", pytest.param("a3c", marks=pytest.mark.thorough)])
def test_a_scheme_continues_after_draining(stop, name):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    if name == "apex":
        scheme = Scheme.apex(
            DQN.create_factory(start_steps=100, mini_batch_size=32, epsilon_per_worker=True),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,)),
            PERBuffer.create_factory(2000, rollout_size=16, n_step=3), envs, seed=1, num_replay_workers=2,
            col_worker_resources=FREE)
        assert scheme.settings["initial_priority"] == "worker"
    else:
        scheme = Scheme(
            A2C.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                               hidden_sizes=(16,)),
            VanillaOnPolicyBuffer.create_factory(16), envs, seed=1, num_grad_workers=2, grad_communication=ASYNC,
            col_communication=ASYNC, grad_worker_resources=FREE)
    stop.append(scheme)
    for _ in range(2):
        for _ in range(20):
            scheme.step()
        ledger, version = drain(scheme), scheme.version
        assert drain(scheme) == ledger
        assert scheme.version == version
    while scheme.version == version:  # the first call may report updates that were made earlier
        scheme.step()
    final = scheme.stop()
    assert final["in_flight"] == final["queued"] == 0


def test_a_slow_rank_is_preempted(stop):
    """Check that a rank whose steps take twenty times as long is preempted once the two other ranks finish."""
    envs = VecEnv.create_factory(SleepEnv, {"step_s": 0.005}, 1)
    scheme = Scheme.ddppo(
        A2C.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                           hidden_sizes=(16,)),
        VanillaOnPolicyBuffer.create_factory(12), envs, seed=1, num_grad_workers=3, grad_worker_resources=FREE,
        faults="delay col.3.0 0.1s")
    stop.append(scheme)
    for _ in range(3):
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["rollouts_preempted"] >= 2
    assert metrics["grads_applied"] == 9
    drain(scheme)
