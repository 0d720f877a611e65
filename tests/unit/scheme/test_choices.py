"""Tests of `mixed_precision="auto"` in schemes: one decision for all workers, which resumed and replayed runs keep."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import (
    DQN, PPO, R2D2, SAC, GAEBuffer, MultiAgentVecEnv, OffPolicyActor, OnPolicyActor, QActor, ReplayBuffer, Scheme,
    SequenceBuffer, VecEnv, multi_agent,
)
from pytorchrl.agent.algorithms import precision
from pytorchrl.agent.algorithms.precision import PrecisionTrial
from pytorchrl.envs.testing import ChangingAgents
from pytorchrl.errors import CheckpointError, DeviceError
from tests.unit.scheme.checkpointed import through_a_file

FASTER = {True: PrecisionTrial(2.0, 1.0), False: PrecisionTrial(1.0, 2.0)}
MEMORY = {"recurrent_net": "gru", "recurrent_size": 8}


@pytest.fixture
def trials(monkeypatch):
    """Replace the measurement; return an object with the arguments of all trials, `done`, and their result."""
    trials = SimpleNamespace(done=[], is_mixed=True)

    def measure(algorithm, actor, shape, device):
        trials.done.append((shape, device))
        return FASTER[trials.is_mixed]
    monkeypatch.setattr("pytorchrl.scheme.choices.measure", measure)
    return trials


def agent_of(kind, **options):
    """Return the factories of an agent, with `options` of its algorithm."""
    envs = VecEnv.create_factory("Pendulum-v1" if kind == "sac" else "CartPole-v1", vec_env_size=2)
    spaces = envs.observation_space, envs.action_space
    replay = {"start_steps": 16, "update_every": 8, "num_updates": 1, "mini_batch_size": 8}
    if kind == "dqn":
        return (DQN.create_factory(**{**replay, **options}), QActor.create_factory(*spaces, hidden_sizes=(8,)),
                ReplayBuffer.create_factory(200, rollout_size=8), envs)
    if kind == "sac":
        return (SAC.create_factory(**{**replay, **options}), OffPolicyActor.create_factory(*spaces, hidden_sizes=(8,)),
                ReplayBuffer.create_factory(200, rollout_size=8), envs)
    if kind == "r2d2":
        return (R2D2.create_factory(**{**replay, **options}),
                QActor.create_factory(*spaces, hidden_sizes=(8,), **MEMORY),
                SequenceBuffer.create_factory(400, rollout_size=8, length=4, burn_in=2, period=2, n_step=1), envs)
    memory = MEMORY if kind == "ppo, memory" else {}
    minibatches = {} if "mini_batch_size" in options else {"num_mini_batch": 2}
    return (PPO.create_factory(**{"num_epochs": 2, **minibatches, **options}),
            OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,), **memory), GAEBuffer.create_factory(16), envs)


@pytest.fixture
def make():
    """Return a function that makes schemes; all are stopped after the test."""
    schemes = []

    def make_(kind="ppo", mixed_precision="auto", *, options=None, **settings):
        schemes.append(Scheme(*agent_of(kind, mixed_precision=mixed_precision, **options or {}),
                              **{"runtime": "threads", "seed": 1} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def parameters_after(scheme, updates):
    while scheme.version < updates:
        scheme.step()
    return torch.cat([scheme.acting_state()[name].flatten() for name in sorted(scheme.acting_state())])


PATTERNS = {"central": {}, "collectors": {"num_col_workers": 2},
            "gradients": {"num_grad_workers": 2, "num_col_workers": 2},
            "ranks": {"num_grad_workers": 2, "distribute_gradients": True}}


@pytest.mark.every(3)
@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize(("kind", "settings"), [
    *(pytest.param("ppo", settings, id=f"ppo-{name}") for name, settings in PATTERNS.items()),
    ("dqn", {}), ("sac", {}), ("r2d2", {}),
    ("dqn", {"num_replay_workers": 1, "col_communication": "asynchronous", "runtime": "simulated"})])
def test_the_faster_precision_is_used_by_every_worker(make, trials, kind, settings, is_faster):
    trials.is_mixed = is_faster
    auto = make(kind, **settings)
    same, other = (make(kind, value, **settings) for value in (is_faster, not is_faster))
    found, expected, different = (parameters_after(scheme, 4) for scheme in (auto, same, other))
    assert torch.equal(found, expected)
    assert not torch.equal(found, different)
    assert len(trials.done) == 1
    assert auto.agent.algo_factory.options.mixed_precision is is_faster


def test_the_decision_is_logged(make, trials, caplog):
    with caplog.at_level(logging.INFO, "pytorchrl"):
        make().start()
    assert ("mixed_precision='auto': networks compute in bfloat16, because a gradient takes 2e+03 ms in float32 and "
            "1e+03 ms in bfloat16") in caplog.messages


def test_a_real_trial_decides_before_the_first_step(make, monkeypatch):
    monkeypatch.setattr(precision, "TRIAL_S", 0.0)
    scheme = make("dqn")
    assert scheme.agent.algo_factory.options.mixed_precision == "auto"
    scheme.start()
    assert scheme.agent.algo_factory.options.mixed_precision in (False, True)


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_a_resumed_run_keeps_the_decision(make, trials, kind):
    straight = make(kind)
    parameters_after(straight, 4)
    checkpoint = through_a_file(straight.checkpoint())
    trials.is_mixed = False
    resumed = make(kind)
    resumed.resume(checkpoint)
    assert torch.equal(parameters_after(resumed, 12), parameters_after(straight, 12))
    assert resumed.agent.algo_factory.options.mixed_precision is True
    assert len(trials.done) == 1
    with pytest.raises(CheckpointError, match="mixed_precision was True, now it is False"):
        make(kind, False).resume(checkpoint)


def test_a_replayed_run_keeps_the_decision(make, trials, tmp_path):
    settings = {"num_col_workers": 2, "col_communication": "asynchronous"}
    recorded = make(record=tmp_path / "run", **settings)
    parameters_after(recorded, 12)
    recorded.stop()
    trials.is_mixed = False
    replayed = make(runtime=None, replay=tmp_path / "run", **settings)
    while not replayed.replay_is_over:
        replayed.step()
    assert replayed.agent.algo_factory.options.mixed_precision is True
    assert len(trials.done) == 1
    first, second = (scheme._worker.local_worker.get_weights() for scheme in (recorded, replayed))
    np.testing.assert_array_equal(first.state["all"], second.state["all"])


def test_each_policy_has_its_own_decision(trials):
    policy_of = {"agent_0": "early", "agent_1": "shared", "agent_2": "shared"}
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2, policy_of=policy_of)
    algorithms = {"early": PPO.create_factory(mixed_precision=False, num_mini_batch=1),
                  "shared": PPO.create_factory(mixed_precision="auto", num_mini_batch=1)}
    factories = multi_agent(envs, algorithms, lambda *spaces: OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,)),
                            GAEBuffer.create_factory(6))
    scheme = Scheme(*factories, envs, runtime="simulated", seed=1)
    scheme.step()
    assert precision.choices_of(scheme.agent.algo_factory)["mixed_precision"] == {"early": False, "shared": True}
    ((shape, _),) = trials.done
    assert shape == (6 * 2 * 2, 1)  # steps, environments, agents of the policy
    state = scheme.checkpoint()
    scheme.stop()
    trials.is_mixed = False
    resumed = Scheme(*factories, envs, runtime="simulated", seed=1)
    resumed.resume(state)
    assert precision.choices_of(resumed.agent.algo_factory)["mixed_precision"] == {"early": False, "shared": True}
    resumed.stop()


@pytest.mark.parametrize(("kind", "options", "settings", "length"), [
    ("ppo", {}, {}, 1), ("ppo", {"num_mini_batch": 3}, {"num_col_workers": 3}, 1),
    ("ppo", {"mini_batch_size": 10}, {}, 1),
    ("ppo", {"num_mini_batch": 1}, {"train_batch_size": 96}, 1),
    ("ppo", {"num_mini_batch": 1, "num_epochs": 1}, {"microbatch_size": 8}, 1),
    ("ppo", {}, {"num_col_workers": 2, "col_communication": "asynchronous", "train_batch_size": 64}, 1),
    ("ppo, memory", {}, {}, 16), ("dqn", {}, {}, 1), ("r2d2", {}, {}, 6)])
def test_the_trial_uses_the_size_of_the_batches_of_training(make, trials, monkeypatch, kind, options, settings, length):
    scheme, batches = make(kind, options=options, **settings), []
    cls = scheme.agent.algo_factory.cls
    original = cls.compute_gradients
    monkeypatch.setattr(cls, "compute_gradients", lambda self, batch: (batches.append(batch), original(self, batch))[1])
    parameters_after(scheme, 2)
    columns = len(batches[0].ids) if hasattr(batches[0], "ids") else batches[0].logp.numel() // length
    assert trials.done == [((columns, length), "cpu")]


def test_a_device_that_only_workers_have_is_refused(make):
    scheme = make(num_grad_workers=2, grad_device="cuda:7", grad_worker_resources={"num_gpus": 8}, runtime="ray")
    with pytest.raises(DeviceError, match="the device on which mixed_precision='auto' measures must be one of"):
        scheme.start()
    assert scheme.runtime is None
