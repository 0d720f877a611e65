"""Tests that asynchronous collection without policy lag has the parameters of synchronous collection, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch

from pytorchrl import APPO, ASYNC, IMPALA, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv, VTraceBuffer

SIZE, NUM_ENVS, UPDATES = 16, 2, 12
ENVS = VecEnv.create_factory("CartPole-v1", vec_env_size=NUM_ENVS)
AGENTS = {
    "ppo": (PPO.create_factory(num_epochs=2, num_mini_batch=2), GAEBuffer.create_factory(size=SIZE)),
    "appo": (APPO.create_factory(num_epochs=2, num_mini_batch=2), VTraceBuffer.create_factory(size=SIZE)),
    "impala": (IMPALA.create_factory(), VTraceBuffer.create_factory(size=SIZE)),
}
# The last worker is the fastest, so rollouts arrive in the reverse order of workers.
REVERSED = {f"step@*/CWorker {index}": 0.001 * (4 - index) for index in (1, 2, 3)}


@functools.cache
def synchronous(agent, num_col_workers):
    """Return the parameters and normalizers of synchronous collection."""
    return parameters_of(agent, num_col_workers=num_col_workers, runtime="simulated")[0]


def parameters_of(agent, *, num_col_workers, runtime, normalize=False, **settings):
    """Return the parameters and normalizers after some updates, and the largest policy lag."""
    algorithm, storage = AGENTS[agent]
    actor = OnPolicyActor.create_factory(ENVS.observation_space, ENVS.action_space, normalize_obs=normalize)
    scheme = Scheme(algorithm, actor, storage, ENVS, seed=5, num_col_workers=num_col_workers, col_execution="Parallel",
                    runtime=runtime, **settings)
    try:
        while scheme.version < UPDATES:
            scheme.step()
        return scheme.acting_state(), scheme.metrics()["policy_lag"]["max"]
    finally:
        scheme.stop()


def without_lag(num_col_workers, **settings):
    """Return the settings of asynchronous collection without policy lag, with one rollout of each worker per batch."""
    return {"num_col_workers": num_col_workers, "col_communication": ASYNC, "max_policy_lag": 0,
            "on_policy_lag": "wait", "train_batch_size": num_col_workers * SIZE * NUM_ENVS, **settings}


def are_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.every(5)
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("num_col_workers", [1, 3])
@pytest.mark.parametrize(("runtime", "settings"), [
    ("simulated", {}), ("simulated", {"costs": REVERSED}), ("threads", {}), ("threads", {"col_in_flight": 1})])
def test_collection_without_lag_equals_synchronous_collection(agent, num_col_workers, runtime, settings):
    expected = synchronous(agent, num_col_workers)
    found, lag = parameters_of(agent, runtime=runtime, **without_lag(num_col_workers, **settings))
    assert lag == 0
    assert are_equal(found, expected)


@pytest.mark.usefixtures("quick_processes")
def test_collection_without_lag_equals_synchronous_collection_with_normalizers_and_processes():
    expected, _ = parameters_of("ppo", num_col_workers=2, runtime="simulated", normalize=True)
    found, lag = parameters_of("ppo", runtime="processes", normalize=True, **without_lag(2))
    assert lag == 0
    assert are_equal(found, expected)


@pytest.mark.parametrize("settings", [{"max_policy_lag": 1}, {"on_policy_lag": "drop"}, {"train_batch_size": 32}])
def test_every_condition_is_necessary(settings):
    expected = synchronous("ppo", 3)
    found, _ = parameters_of("ppo", runtime="simulated", **without_lag(3, costs=REVERSED) | settings)
    assert not are_equal(found, expected)
