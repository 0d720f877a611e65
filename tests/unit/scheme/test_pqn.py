"""Test PQN in schemes: the sixteen patterns, environments whose steps are tensors, several policies."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl import PQN, GAEBuffer, MultiAgentVecEnv, QActor, Scheme, VecEnv, multi_agent
from pytorchrl.envs.testing import MatchingGame


def parts_of(envs, **options):
    """Return the parts of an agent whose networks have normalized layers."""
    algorithm = PQN.create_factory(**{"num_epochs": 2, "num_mini_batch": 2, "epsilon_steps": 100, **options})
    actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), norm="layer")
    return algorithm, actor, GAEBuffer.create_factory(size=8, gae_lambda=0.65), envs


def updated(scheme, count=4):
    """Make `count` updates, stop the scheme, and return the info of the last update."""
    while scheme.version < count:
        info = scheme.step()
    scheme.stop()
    return info


@pytest.mark.timeout(60)
def test_every_pattern_trains_and_balances_its_ledger(pattern, check_ledger):
    scheme = Scheme(*parts_of(VecEnv.create_factory("CartPole-v1", vec_env_size=2)), seed=1, runtime="simulated",
                    **pattern)
    while scheme.version < 4:
        info = scheme.step()
    assert check_ledger(scheme)["consumed_unique"] > 0
    assert np.isfinite(info["td_loss"])
    scheme.stop()


def test_environments_whose_steps_are_tensors_train(monkeypatch):
    estimates, estimate = [], GAEBuffer.estimate
    monkeypatch.setattr(GAEBuffer, "estimate", lambda *args: estimates.append(estimate(*args)) or estimates[-1])
    envs = VecEnv.create_factory("pytorchrl/TorchCartPole-v1", vec_env_size=4)
    assert np.isfinite(updated(Scheme(*parts_of(envs), seed=1), 8)["td_loss"])
    assert len(estimates) == 2


def test_policies_of_several_agents_train():
    envs = MultiAgentVecEnv.create_factory(MatchingGame, vec_env_size=2)
    parts = multi_agent(envs, PQN.create_factory(num_epochs=1, num_mini_batch=1),
                        lambda obs, action: QActor.create_factory(obs, action, hidden_sizes=(8,), norm="layer"),
                        GAEBuffer.create_factory(size=8))
    info = updated(Scheme(*parts, envs, seed=1))
    assert np.isfinite(info["td_loss/shared"])


def test_each_collector_has_its_own_epsilon():
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    scheme = Scheme(*parts_of(envs, epsilon_per_worker=True, epsilon_steps=100_000), seed=1, num_col_workers=2,
                    runtime="simulated")
    assert np.isfinite(updated(scheme)["loss"])
