"""Agents and tools for tests of microbatches."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import A2C, PPO, GAEBuffer, OnPolicyActor, VecEnv

ONE_PASS = {"num_epochs": 1, "num_mini_batch": 1}
ALGORITHMS = {
    "a2c": A2C.create_factory(lr=1e-2),
    "ppo by minibatch": PPO.create_factory(**ONE_PASS, lr=1e-2, advantage_normalization="minibatch"),
    "ppo by batch": PPO.create_factory(**ONE_PASS, lr=1e-2, advantage_normalization="batch"),
    "ppo of several passes": PPO.create_factory(num_epochs=2, num_mini_batch=3, lr=1e-2),
}
PLACES = {
    "central": {}, "parallel collection": {"num_col_workers": 2}, "parallel gradients": {"num_grad_workers": 2},
    "decentralized": {"num_grad_workers": 2, "distribute_gradients": True},
}


class Watch:
    """An algorithm class and a storage class that record the sizes of the data that they receive."""

    def __init__(self, cls=A2C):
        watch = self
        self.slices, self.updates, self.items, self.held = [], 0, [], []

        class Watched(cls):
            def compute_gradients(self, batch):
                watch.slices.append(batch.num_samples)
                return super().compute_gradients(batch)

            def apply_gradients(self, gradients=None):
                watch.updates += 1
                return super().apply_gradients(gradients)

        class WatchedBuffer(GAEBuffer):
            def insert_data_slice(self, rollouts):
                watch.items.append(sum(rollout.size for rollout in rollouts))
                super().insert_data_slice(rollouts)

        self.algo, self.storage = Watched, WatchedBuffer


@pytest.fixture
def watch():
    return Watch()


def envs(num_envs=4, **options):
    return VecEnv.create_factory("CartPole-v1", vec_env_size=num_envs, **options)


@pytest.fixture
def train(make_scheme, check_ledger):
    """Return a function that trains for some updates, and returns a dict of results."""
    def run(algo, updates=3, recurrent=None, actor=None, **settings):
        given = settings.pop("envs", None) or envs()
        actor = OnPolicyActor.create_factory(
            given.observation_space, given.action_space, hidden_sizes=(8,), recurrent_net=recurrent, **(actor or {}))
        scheme = make_scheme(envs=given, actor=actor, algo=algo, size=10, **settings)
        infos = []
        for _ in range(updates):
            infos.append(scheme.step())
            check_ledger(scheme)
        metrics, runtime = scheme.metrics(), scheme.runtime
        return {"state": scheme.acting_state(), "infos": infos, "metrics": metrics, "ledger": scheme.stop(),
                "seconds": runtime.now(), "settings": scheme.settings}
    return run


def assert_same(first, second, exact=False):
    tolerance = 0.0 if exact else 2e-6
    assert first["ledger"] == second["ledger"]
    torch.testing.assert_close(first["state"], second["state"], rtol=tolerance, atol=tolerance)
    for one, other in zip(first["infos"], second["infos"], strict=True):
        assert one == (other if exact else pytest.approx(other, rel=1e-4, abs=1e-5))
