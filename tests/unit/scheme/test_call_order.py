"""Tests of methods that are called in the wrong order: they raise an error that says so, and change nothing."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import CallOrderError


@pytest.fixture
def worker(make_scheme):
    return make_scheme(num_envs=2, size=8).start().local_worker


def state_of(worker):
    """Return everything that an update changes."""
    return worker.actor_version, worker.algo.acting_state(
        )["all"].tolist(), repr(worker.algo.state_dict()["optimizers"])


def test_an_update_before_any_gradient_is_refused(worker):
    before = state_of(worker)
    with pytest.raises(CallOrderError, match=r"computed last, but there are none; call step\(\), get_grads\(\) or"):
        worker.apply_gradients()
    assert state_of(worker) == before


def test_gradients_without_a_batch_are_refused(worker):
    with pytest.raises(CallOrderError, match=r"call get_data\(\) first, or call step\(\)"):
        worker.get_grads()
    assert worker.iter == 0


def test_a_batch_is_used_once(worker):
    worker.get_data()
    worker.get_grads()
    ledger = worker.ledger.snapshot()
    with pytest.raises(CallOrderError, match=r"once; call get_data\(\) first"):
        worker.get_grads()
    assert worker.ledger.snapshot() == ledger
    worker.get_data()
    worker.get_grads()
    assert worker.iter == 2


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_gradients_computed_by_hand_are_applied(make_scheme, microbatch_size):
    """Check that the gradient of the whole batch is applied, even if it was computed in microbatches."""
    found = []
    for gives_gradients in (True, False):
        worker = make_scheme(num_envs=2, size=8, microbatch_size=microbatch_size).start().local_worker
        gradients, _ = worker.compute_gradients(worker.get_data(), False)
        worker.apply_gradients(gradients if gives_gradients else None)
        assert worker.actor_version == 1
        found.append(worker.algo.acting_state()["all"])
    assert torch.equal(*found)


def test_algorithms_refuse_to_apply_gradients_before_computing_any(worker):
    message = r"applies the gradients of the latest compute_gradients\(batch\), which has not been called yet"
    before = state_of(worker)
    with pytest.raises(CallOrderError, match=message):
        worker.algo.apply_gradients()
    assert state_of(worker) == before
    worker.step()
    worker.algo.apply_gradients()
    assert state_of(worker) != before


@pytest.mark.parametrize("name", ["APPO", "SAC", "several policies", "synthetic"])
def test_every_algorithm_refuses_to_apply_missing_gradients(name, make_multi_agent, make_algorithm):
    algorithm = {"several policies": make_multi_agent, "synthetic": lambda: synthetic_agent(4)[0](
        device="cpu", actor=None, seed=0)}.get(name, lambda: make_algorithm(name))()
    with pytest.raises(CallOrderError):
        algorithm.apply_gradients()


@pytest.fixture
def make_algorithm():
    """Return a function that takes the name of an algorithm, and builds the algorithm with a small actor."""
    from pytorchrl import APPO, SAC, OffPolicyActor, OnPolicyActor, VecEnv

    def make(name):
        env_id = "Pendulum-v1" if name == "SAC" else "CartPole-v1"
        envs = VecEnv.create_factory(env_id, vec_env_size=1)
        algo, actor = {"APPO": (APPO, OnPolicyActor), "SAC": (SAC, OffPolicyActor)}[name]
        built = actor.create_factory(envs.observation_space, envs.action_space)(device="cpu", seed=0)
        return algo.create_factory()(device="cpu", actor=built, seed=0)
    return make


@pytest.fixture
def make_multi_agent():
    """Return a function that builds a multi-agent algorithm with two policies."""
    from pytorchrl import PPO, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, multi_agent
    from pytorchrl.envs.testing import MatchingGame

    def make():
        envs = MultiAgentVecEnv.create_factory(MatchingGame, vec_env_size=2, policy_of="independent")
        algo, actor, _ = multi_agent(envs, PPO.create_factory(), OnPolicyActor.create_factory,
                                     GAEBuffer.create_factory(8))
        return algo(device="cpu", actor=actor(device="cpu", seed=0), seed=0)
    return make
