"""Test the inputs of corrections: the proximal policy, and the lag of each step, for PPO, APPO and GRPO."""

from __future__ import annotations

import copy

import pytest
import torch

from pytorchrl import APPO, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv, VTraceBuffer
from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.envs.tasks import Copy
from pytorchrl.errors import ConfigError

SETTINGS = {"lr": 1e-2, "num_epochs": 2, "num_mini_batch": 2}
CASES = {
    "ppo": (PPO, GAEBuffer, {}), "ppo, gru": (PPO, GAEBuffer, {"recurrent_net": "gru", "recurrent_size": 8}),
    "appo": (APPO, VTraceBuffer, {}), "grpo": (GRPO, GroupBuffer, {}),
}


def scheme_of(case, correction, **settings):
    algorithm, storage, network = CASES[case]
    if algorithm is GRPO:
        envs = TokenEnv.create_factory(Copy, {"longest": 5}, 12, group_size=4)
        actor = DecoderActor.create_factory(envs.observation_space, envs.action_space, context=12, width=8)
        data = storage.create_factory(3, group_size=4)
    else:
        envs = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
        actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **network)
        data = storage.create_factory(16, **({"sequence_length": 8} if network else {}))
    return Scheme(algorithm.create_factory(**SETTINGS, correction=correction), actor, data, envs, seed=1, **settings)


def batches_of(scheme, count):
    """Return `count` prepared batches, each with a copy of the actor before its gradient, and the version then."""
    algorithm, found = scheme.start().local_worker.algo, []
    compute = algorithm.compute_gradients

    def recording(batch):
        found.append((algorithm.prepare_batch(batch), copy.deepcopy(algorithm.actor), algorithm.version))
        return compute(batch)

    algorithm.compute_gradients = recording
    while len(found) < count:
        scheme.step()
    scheme.stop()
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_proximal_policy_is_that_before_the_first_update_with_the_data(case):
    found = batches_of(scheme_of(case, "decoupled"), 8)
    for number, (batch, actor, _) in enumerate(found):
        before = found[number - number % 4][1]
        valid = torch.ones_like(batch.done) if batch.valid is None else batch.valid
        logps = [policy.evaluate_actions(batch.obs, batch.rhs, batch.done, batch.action)[0][valid].detach()
                 for policy in (before, actor)]
        torch.testing.assert_close(batch.other["proximal"][valid], logps[0], rtol=0, atol=1e-5)
        assert torch.allclose(batch.other["proximal"][valid], logps[1], rtol=0, atol=1e-5) == (number % 4 == 0)


@pytest.mark.parametrize("case", CASES)
def test_the_lag_is_the_number_of_updates_since_an_action_was_chosen(case):
    for number, (batch, _, version) in enumerate(batches_of(scheme_of(case, "a3po"), 8)):
        assert version == number
        valid = torch.ones_like(batch.done) if batch.valid is None else batch.valid
        assert batch.other["lag"][valid].tolist() == [number % 4] * int(valid.sum())


def test_the_lag_includes_the_time_in_the_queue():
    scheme = scheme_of("ppo", "a3po", num_col_workers=2, col_communication="asynchronous", runtime="simulated",
                       queue_size=3, costs={"grad": 1.0, "step": 1e-4})
    lags = {int(lag) for batch, _, _ in batches_of(scheme, 24) for lag in batch.other["lag"].unique()}
    assert max(lags) > 8


@pytest.mark.parametrize("correction", ["ppo", "tis", "m2po"])
def test_other_corrections_need_no_further_values(correction):
    (batch, _, _), *_ = batches_of(scheme_of("ppo", correction), 1)
    assert batch.other == {}


def test_ppo_refuses_corrections_of_sequences():
    with pytest.raises(ConfigError, match="correction='gspo' needs whole sequences"):
        PPO.create_factory(correction="gspo")
    with pytest.raises(ConfigError, match="dual_clip needs correction='ppo'"):
        PPO.create_factory(correction="tis", dual_clip=2.0)
    assert PPO.create_factory(correction="tis", use_clipped_value_loss=True, clip_param=0.1).options.clip_param == 0.1
