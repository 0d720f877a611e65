"""Tests of named architectures and of several policies on real Ray workers, some of which are killed."""

from __future__ import annotations

import pytest

from pytorchrl import (
    DQN,
    IMPALA,
    PPO,
    R2D2,
    GAEBuffer,
    MultiAgentVecEnv,
    OnPolicyActor,
    PERBuffer,
    QActor,
    Scheme,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
    multi_agent,
)
from pytorchrl.envs.testing import ChangingAgents, MatchingGame

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

FREE = {"num_cpus": 0}


def _check(scheme):
    ledger = scheme.ledger()
    places = sum(ledger[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert ledger["collected"] == places + sum(ledger["dropped"].values())
    return ledger


@pytest.fixture
def run(shared_ray):
    """Return a function that trains a scheme, stops it, and returns its metrics and its final ledger."""
    schemes = []

    def run_(scheme, updates, until=lambda metrics: True):
        schemes.append(scheme)
        while scheme.version < updates or not until(scheme.metrics()):
            scheme.step()
            _check(scheme)
        metrics = scheme.metrics()
        final = scheme.stop()
        assert final["in_flight"] == final["queued"] == 0
        assert final["collected"] == final["consumed_unique"] + final["resident"] + final["evicted"] + sum(
            final["dropped"].values())
        return metrics, final
    yield run_
    for scheme in schemes:
        scheme.stop()


def apex(**settings):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    return Scheme.apex(
        DQN.create_factory(start_steps=100, mini_batch_size=32, epsilon_per_worker=True),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,)),
        PERBuffer.create_factory(2000, rollout_size=16, n_step=3, weight_norm="buffer"), envs, seed=1,
        num_replay_workers=2,
        col_worker_resources=FREE, **settings)


@pytest.mark.thorough
def test_apex_counts_every_step(run):
    """Check the ledger and the weight sync of Ape-X.

    On a busy machine, 60 updates may be made before the first weight sync is due, so the run continues until weights
    have been sent three times.
    """
    metrics, final = run(apex(), 60, until=lambda metrics: metrics["weight_pushes"] > 2)
    assert final["resident"] > 100
    assert final["consumed"] >= metrics["updates"] * 32


@pytest.mark.thorough
def test_apex_continues_after_a_shard_and_a_collector_are_killed(run):
    _, final = run(apex(faults="kill shard.1 @ sample 20; kill col.2 @ step 200", max_replay_ratio=1.0), 60,
                   until=lambda metrics: metrics["workers_restarted"])
    assert final["dropped"]["worker_lost"] > 0


@pytest.mark.parametrize("faults", [
    pytest.param(None, marks=pytest.mark.thorough), "kill shard.1 @ sample 10; kill col.2 @ step 200"])
def test_r2d2_counts_every_step_when_workers_are_killed(run, faults):
    envs = VecEnv.create_factory("pytorchrl/Recall-v0", {"delay": 5}, 2)
    scheme = Scheme.r2d2(
        R2D2.create_factory(start_steps=100, mini_batch_size=8), QActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(8,), recurrent_net="lstm", recurrent_size=8,
            dueling=True),
        SequenceBuffer.create_factory(4000, rollout_size=16, length=4, burn_in=2, period=2, n_step=2,
                                      weight_norm="buffer"), envs, seed=1,
        num_replay_workers=2, max_replay_ratio=2.0, faults=faults, col_worker_resources=FREE)
    metrics, final = run(scheme, 20, until=lambda metrics: faults is None or metrics["workers_restarted"] > 1)
    assert final["resident"] > 0
    assert metrics["updates"] * 8 < final["consumed"] <= metrics["updates"] * 8 * 4 + 1000
    if faults is not None:
        assert final["dropped"]["worker_lost"] > 0


@pytest.mark.thorough
def test_impala_counts_every_step(run):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    scheme = Scheme.impala(
        IMPALA.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                              hidden_sizes=(16,)),
        VTraceBuffer.create_factory(16), envs, seed=1, train_batch_size=100, col_worker_resources=FREE)
    _, final = run(scheme, 30)
    assert final["consumed"] >= 30 * 100


@pytest.mark.thorough
def test_impala_with_shards_counts_every_step_when_workers_are_killed(run):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    scheme = Scheme.apex(
        IMPALA.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space,
                                                              hidden_sizes=(16,)),
        VTraceBuffer.create_factory(16), envs, size=1000, train_batch_size=100, max_replay_ratio=2.0,
        seed=1,
        num_replay_workers=2, faults="kill shard.1 @ sample 10; kill col.2 @ step 200", col_worker_resources=FREE)
    metrics, final = run(scheme, 40, until=lambda metrics: metrics["workers_restarted"])
    assert final["consumed"] >= 40 * 100
    assert 0 < final["resident"] <= 1000
    assert final["dropped"]["worker_lost"] > 0
    assert metrics["policy_lag"]["mean"] > metrics["policy_lag_replay_mean"] > 0.0


@pytest.mark.parametrize("settings", [
    pytest.param({"num_col_workers": 2}, marks=pytest.mark.thorough),
    pytest.param({"num_grad_workers": 2, "distribute_gradients": True}, marks=pytest.mark.thorough),
    {"num_grad_workers": 2, "grad_communication": "asynchronous", "aggregate": 2}])
def test_several_policies_train_across_processes(run, settings):
    """Check that each policy sees every step of its agents: 12 and 14 agent steps per rollout of 12 env steps."""
    envs = MultiAgentVecEnv.create_factory(
        ChangingAgents, vec_env_size=2, policy_of={"agent_0": "early", "agent_1": "shared", "agent_2": "shared"})
    agent = multi_agent(envs, PPO.create_factory(num_epochs=1, num_mini_batch=2), OnPolicyActor.create_factory,
                        GAEBuffer.create_factory(6))
    metrics, final = run(Scheme(*agent, envs, seed=1, **settings), 6)
    assert metrics["agent_steps/early"] == 12 * metrics["rollouts"] > 0
    assert metrics["agent_steps/shared"] == 14 * metrics["rollouts"]
    assert final["consumed_unique"] > 0


@pytest.mark.thorough
def test_several_policies_fill_remote_shards(run):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, vec_env_size=2, policy_of=lambda agent: agent)
    agent = multi_agent(envs, DQN.create_factory(start_steps=32, mini_batch_size=8), QActor.create_factory,
                        PERBuffer.create_factory(200, rollout_size=8))
    metrics, final = run(Scheme.apex(*agent, envs, seed=1, num_replay_workers=2, col_worker_resources=FREE), 10)
    assert metrics["agent_steps/agent_0"] == metrics["agent_steps/agent_1"] > 0
    assert final["resident"] > 0
