"""Tests of a user-defined algorithm, actor and storage on Ray workers."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest
from torch import nn

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ContractError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


class Asymmetric(OnPolicyActor):
    def build_networks(self, generator):
        self.body, self.critic, self.decoder = nn.Linear(2, 8), nn.Linear(4, 8), nn.Linear(8, 1)
        self.policy_head, self.value_head = nn.Linear(8, self.distribution.num_outputs), nn.Linear(8, 1)

    def policy_features(self, obs, rhs, done):
        return self.body(0.1 * obs["obs"][..., 2:]).tanh(), {}

    def value_features(self, obs, rhs, done):
        return self.critic(1e-5 * obs["obs"]).tanh(), {}


class Decoding(PPO):
    def terms(self, evaluated, batch, parameters):
        terms, measures = super().terms(evaluated, batch, parameters)
        error = self.actor.decoder(evaluated.features).squeeze(-1) - 0.1 * batch.obs["obs"][:, 2]
        return {**terms, "decoding": error.square()}, measures

    def loss_weights(self, parameters):
        return {**super().loss_weights(parameters), "decoding": 1.0}


class HalfAdvantages(GAEBuffer):
    def estimate(self, rollout, recompute=False):
        advantages, returns = super().estimate(rollout, recompute)
        return 0.5 * advantages, returns


class WrongStep(Decoding):
    def acting_step(self, *args, **kwargs):
        step = super().acting_step(*args, **kwargs)
        return step._replace(action=np.zeros(1, np.int64))


@pytest.fixture
def make_own(shared_ray, stop):
    """Return a function that makes asynchronous schemes from the parts in this file, with two collection workers."""
    # Workers cannot import the directory of the tests as a package.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def make(algo):
        envs = VecEnv.create_factory(CountingEnv, None, 2)
        stop.append(Scheme(
            algo.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-2),
            Asymmetric.create_factory(envs.observation_space, envs.action_space), HalfAdvantages.create_factory(8),
            envs,
            num_col_workers=2, col_communication=ASYNC, runtime="ray", seed=1))
        return stop[-1]
    return make


def test_user_defined_parts_train_with_two_remote_workers(make_own):
    scheme = make_own(Decoding)
    infos = [scheme.step() for _ in range(30)]
    assert infos[-1]["decoding"] < infos[0]["decoding"]
    ledger = scheme.stop()
    assert ledger["consumed_unique"] == 30 * 16


@pytest.mark.thorough
def test_a_contract_violation_in_a_remote_worker_is_reported(make_own):
    scheme = make_own(WrongStep)
    with pytest.raises(ContractError,
                       match=r"WrongStep.acting_step\(\) returned 'action' as a numpy array of shape \(1,\)"):
        scheme.step()
