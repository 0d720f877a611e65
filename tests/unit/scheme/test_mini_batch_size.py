"""Tests of `mini_batch_size`: minibatches have this number of steps, regardless of how train batches are collected."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import APPO, ASYNC, PPO, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, VTraceBuffer, multi_agent
from pytorchrl.envs.testing import ChangingAgents
from pytorchrl.errors import ConfigError
from pytorchrl.training.training import make_learner


class Watching(PPO):
    """An algorithm that records the sizes of its batches."""

    sizes: list[int]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes = []

    def batches(self, storage):
        for batch in super().batches(storage):
            self.sizes.append(batch.num_samples)
            yield batch


def learners(scheme):
    """Return the workers that compute gradients."""
    worker = scheme.update_worker
    return [handle.native.worker for handle in worker.remote_workers] or [worker.local_worker]


# A rollout has 2 environments x 8 steps.
@pytest.mark.parametrize(("settings", "expected"), [
    ({}, [8, 8]), ({"num_col_workers": 3}, [8] * 6), ({"num_col_workers": 2, "col_communication": ASYNC}, [8, 8]),
    ({"num_col_workers": 2, "col_communication": ASYNC, "train_batch_size": 40}, [8] * 6),
    ({"num_col_workers": 2, "train_batch_size": 40}, [8] * 8),
    ({"num_col_workers": 2, "train_batch_size": 40, "microbatch_size": 6}, [8] * 8),
    ({"num_col_workers": 2, "train_batch_size": 100, "microbatch_size": 40}, [8] * 16),
    ({"num_grad_workers": 2}, [8, 8]),
    ({"num_grad_workers": 2, "distribute_gradients": True, "num_col_workers": 2}, [8] * 4)],
    ids=str)
def test_batches_have_mini_batch_size_steps(make_scheme, settings, expected):
    scheme = make_scheme(algo=Watching.create_factory(num_epochs=1, mini_batch_size=8), runtime="simulated", **settings)
    for _ in range(2 * len(expected)):
        scheme.step()
    for worker in learners(scheme):
        assert worker.algo.num_mini_batch == len(expected)
        assert worker.algo.sizes[:len(expected)] == expected


def test_mini_batch_size_trains_like_the_corresponding_num_mini_batch(make_scheme):
    states = []
    for option in ({"num_mini_batch": 4}, {"mini_batch_size": 8}):
        scheme = make_scheme(algo=PPO.create_factory(**option), num_col_workers=2)
        for _ in range(8):
            scheme.step()
        states.append(scheme.acting_state()["all"])
    assert torch.equal(*states)


def test_a_limit_on_the_lag_counts_the_updates_that_it_makes(make_scheme):
    scheme = make_scheme(algo=APPO.create_factory(num_epochs=2, mini_batch_size=4), storage=VTraceBuffer,
                         num_col_workers=2,
                         col_communication=ASYNC, max_policy_lag=16, on_policy_lag="wait", runtime="simulated")
    for _ in range(40):
        scheme.step()
    assert scheme.metrics()["policy_lag"]["max"] <= 16


def test_shards_of_rollouts_sample_one_rollout_by_default():
    learner, _ = make_learner("appo", "CartPole-v1", num_envs=2, num_steps=8, mini_batch_size=4, num_col_workers=2,
                              replay_size=64,
                              col_communication="asynchronous", num_replay_workers=1, runtime="simulated",
                              progress=False)
    assert learner.scheme.settings["train_batch_size"] == 16


def test_a_mini_batch_larger_than_the_train_batch_is_refused(make_scheme):
    with pytest.raises(ConfigError,
                       match=r"mini_batch_size must not exceed the batch: batch 32 = 2 .*mini_batch_size 33"):
        make_scheme(algo=PPO.create_factory(mini_batch_size=33), num_col_workers=2)
    make_scheme(algo=PPO.create_factory(mini_batch_size=33), num_col_workers=2, train_batch_size=64)


def test_several_policies_have_no_common_batch_size():
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2)
    with pytest.raises(ConfigError, match=r"mini_batch_size=8 of policy 'shared' .*set num_mini_batch"):
        multi_agent(envs, PPO.create_factory(mini_batch_size=8), OnPolicyActor.create_factory,
                    GAEBuffer.create_factory(8))


def test_the_option_of_train_replaces_num_mini_batch_of_the_preset():
    learner, agent = make_learner("ppo", "CartPole-v1", mini_batch_size=64, num_epochs=1, progress=False, seed=1)
    assert agent.algo_factory.options.mini_batch_size == 64
    with learner:
        learner.step()
        assert learner.scheme.update_worker.local_worker.algo.num_mini_batch == 16  # 8 environments x 128 steps / 64
    with pytest.raises(ConfigError, match="num_mini_batch=4 and mini_batch_size=64 both set"):
        make_learner("ppo", "CartPole-v1", mini_batch_size=64, num_mini_batch=4)
