"""Tests of checkpoints of schemes with real Ray workers."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import DQN, PPO, GAEBuffer, OnPolicyActor, PERBuffer, QActor, Scheme, VecEnv

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FREE = {"num_cpus": 0}


def go_on(scheme, count):
    for _ in range(count):
        scheme.step()
    return scheme.acting_state()["all"]


@pytest.mark.parametrize("settings", [
    pytest.param({"num_col_workers": 2, "col_worker_resources": FREE}, marks=pytest.mark.thorough),
    {"num_grad_workers": 2, "grad_worker_resources": FREE, "compress_grads_to_send": "topk"},
    pytest.param({"num_grad_workers": 2, "grad_worker_resources": FREE, "distribute_gradients": True},
                 marks=pytest.mark.thorough)])
def test_a_run_of_another_runtime_can_be_resumed_on_ray(stop, settings):
    envs = VecEnv.create_factory("CartPole-v1", None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,),
                                         normalize_obs=True)

    def make(runtime):
        stop.append(Scheme(PPO.create_factory(num_epochs=2, num_mini_batch=2), actor, GAEBuffer.create_factory(8), envs,
                           seed=1,
                           runtime=runtime, **settings))
        return stop[-1]
    straight = make("threads")
    go_on(straight, 8)
    checkpoint = straight.checkpoint()
    resumed = make("ray")
    resumed.resume(checkpoint)
    assert torch.equal(go_on(straight, 8), go_on(resumed, 8))
    assert straight.stop() == resumed.stop()


def test_a_run_on_ray_with_replay_shards_can_be_resumed_with_threads(stop):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)

    def make(runtime):
        stop.append(Scheme.apex(
            DQN.create_factory(start_steps=100, mini_batch_size=32, epsilon_per_worker=True),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,)),
            PERBuffer.create_factory(100_000, rollout_size=16, n_step=3), envs, seed=1, num_replay_workers=2,
            col_worker_resources=FREE, runtime=runtime))
        return stop[-1]
    first, second = make("ray"), make("threads")
    for _ in range(30):
        first.step()
    checkpoint = first.checkpoint()
    ledger = first.stop()
    second.resume(checkpoint)
    second.start()
    before = second.ledger()
    assert before["collected"] <= ledger["collected"]
    assert before["resident"] + before["evicted"] == before["collected"] - sum(before["dropped"].values()) > 0
    # The scheme can learn from its replay data before the first new rollout arrives.
    while second.ledger()["resident"] == before["resident"]:
        second.step()
    final = second.stop()
    assert final[
        "resident"] + final["evicted"] == final["collected"] - sum(final["dropped"].values()) > before["resident"]
