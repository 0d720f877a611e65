"""Tests of `mixed_precision="auto"` and `compile="auto"` in schemes: one decision for all workers, which resumed and
replayed runs keep."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import (
    APPO, DQN, MPO, PPO, R2D2, SAC, GAEBuffer, MultiAgentVecEnv, OffPolicyActor, OnPolicyActor, QActor, ReplayBuffer,
    Scheme, SequenceBuffer, VecEnv, VTraceBuffer, multi_agent,
)
from pytorchrl.agent.algorithms import compile_rule, precision
from pytorchrl.agent.algorithms.precision import PrecisionOptions, PrecisionTrial
from pytorchrl.envs.testing import ChangingAgents
from pytorchrl.errors import CheckpointError, DeviceError
from pytorchrl.scheme.choices import decide_choices
from pytorchrl.training.training import make_learner
from tests.conftest import ROOT
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
    envs = VecEnv.create_factory("Pendulum-v1" if kind in ("sac", "mpo") else "CartPole-v1", vec_env_size=2)
    spaces = envs.observation_space, envs.action_space
    replay = {"start_steps": 16, "update_every": 8, "num_updates": 1, "mini_batch_size": 8}
    if kind == "dqn":
        return (DQN.create_factory(**{**replay, **options}), QActor.create_factory(*spaces, hidden_sizes=(8,)),
                ReplayBuffer.create_factory(200, rollout_size=8), envs)
    if kind in ("sac", "mpo"):
        cls = SAC if kind == "sac" else MPO
        return (cls.create_factory(**{**replay, **options}), OffPolicyActor.create_factory(*spaces, hidden_sizes=(8,)),
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
def make(stopped):
    """Return a function that makes schemes; all are stopped after the test."""
    def make_(kind="ppo", mixed_precision="auto", *, options=None, **settings):
        return stopped(Scheme(*agent_of(kind, mixed_precision=mixed_precision, **options or {}),
                              **{"runtime": "threads", "seed": 1} | settings))
    return make_


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


@pytest.mark.cpu("names the device of the trial")
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


# compile="auto"


def compile_choice(kind, target_steps, settings=None, actor_options=None, **options):
    """Return whether a run of `target_steps` would compile, without starting any worker."""
    algorithm, actor, storage, envs = agent_of(kind, **options)
    if actor_options:
        actor = actor.cls.create_factory(envs.observation_space, envs.action_space, **actor_options)
    scheme = Scheme(algorithm, actor, storage, envs, seed=1, **(settings or {}))
    decided = decide_choices(scheme.agent, scheme.nested, target_steps)
    return decided.algo_factory.options.compile


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(compile_rule, "has_compiler", lambda: True)


@pytest.mark.cpu("by default, losses are compiled on the CPU only")
def test_only_runs_with_many_updates_are_compiled(compiler):
    # Updates: 2 epochs of 16 samples each for PPO, one per 8 env steps for SAC and DQN.
    for kind, target_steps, expected in [
            ("ppo", 500, False), ("ppo", 100_000, False), ("ppo", 1_000_000, True),
            ("sac", 500, False), ("sac", 50_000, False), ("sac", 200_000, True),
            ("dqn", 100_000, False), ("dqn", 1_000_000, True)]:
        assert compile_choice(kind, target_steps) is expected, (kind, target_steps)
        updates_per_step = 1 / 8
        break_even = compile_rule._BREAK_EVEN[kind.upper()]
        assert (target_steps * updates_per_step > break_even) is expected, (kind, target_steps)


@pytest.mark.cpu("by default, losses are compiled on the CPU only")
def test_runs_by_default_choose_what_took_less_time_in_the_benchmark(compiler):
    source = ROOT / "docs" / "benchmarks" / "compile.jsonl"
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    found = {(line["case"], line["target_steps"]): line["is_compiled"] for line in lines
             if line["variant"] == "default"}
    assert len(found) >= 5
    for (case, target_steps), is_compiled in found.items():
        algorithm, env = case.split("-")
        name = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}[env]
        learner, _ = make_learner(algorithm, name, target_steps=target_steps, progress=False)
        scheme = learner.scheme
        decided = decide_choices(scheme.agent, scheme.nested, target_steps)
        assert decided.algo_factory.options.compile is is_compiled, case


@pytest.mark.cpu("by default, losses are compiled on the CPU only")
def test_options_that_change_the_number_of_updates_change_the_choice(compiler):
    assert compile_choice("sac", 20_000, update_every=1) is True
    assert compile_choice("sac", 20_000, update_every=1, start_steps=19_000) is False
    assert compile_choice("sac", 20_000, update_every=50, num_updates=50) is True
    assert compile_choice("mpo", 10_000, update_every=1) is True
    assert compile_choice("mpo", 10_000, update_every=1, dual_solver="exact") is False
    assert compile_choice("ppo", 200_000, num_epochs=4) is True
    assert compile_choice("ppo", 200_000, num_epochs=4, mini_batch_size=32) is True
    assert compile_choice("ppo", 200_000, num_epochs=1) is False


class OwnPPO(PPO):
    pass


def extractor(space):
    return torch.nn.Identity()


@pytest.mark.cpu("by default, losses are compiled on the CPU only")
def test_what_was_not_measured_is_not_compiled(compiler, monkeypatch):
    millions = 10**8
    assert compile_choice("ppo", millions) is True
    assert compile_choice("ppo", millions, {"num_grad_workers": 2, "runtime": "simulated"}) is False
    assert compile_choice("ppo", millions, {"num_col_workers": 2, "runtime": "simulated"}) is True
    assert compile_choice("ppo, memory", millions) is False
    assert compile_choice("r2d2", millions) is False
    assert compile_choice("ppo", millions, actor_options={"feature_extractor": extractor}) is False
    own = agent_of("ppo")
    scheme = Scheme(OwnPPO.create_factory(num_mini_batch=2), *own[1:], seed=1)
    assert decide_choices(scheme.agent, scheme.nested, millions).algo_factory.options.compile is False
    for value in (True, False):
        assert compile_choice("ppo", 500 if value else millions, compile=value) is value
    monkeypatch.setattr(compile_rule, "has_compiler", lambda: False)
    assert compile_choice("ppo", millions) is False


@pytest.mark.cpu("by default, losses are compiled on the CPU only")
def test_a_slow_policy_that_cannot_be_compiled_is_not(compiler):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)
    for target_network in (False, True):
        scheme = Scheme(APPO.create_factory(target_network=target_network, kl_coef=0.1), actor,
                        VTraceBuffer.create_factory(16), envs, seed=1)
        found = decide_choices(scheme.agent, scheme.nested, 10**8).algo_factory.options.compile
        assert found is not target_network


@pytest.mark.cpu("by default, losses are compiled on the CPU only")
def test_the_choice_stays_in_resumed_and_replayed_runs(make, compiler, monkeypatch, tmp_path):
    def scheme(**settings):
        return make("ppo", False, **{"runtime": "simulated", **settings})

    monkeypatch.setattr("pytorchrl.scheme.choices.is_worth_compiling", lambda agent, shape, steps: steps >= 1000)
    monkeypatch.setattr(PrecisionOptions, "is_compiled", False)  # nothing is compiled in this test
    first = scheme()
    first.start(100)
    first.step()
    state = through_a_file(first.checkpoint())
    assert precision.choices_of(first.agent.algo_factory)["compile"] == {"": False}
    assert state["choices"]["compile"] == {"": False}
    longer = scheme()
    longer.resume(state)
    longer.start(10_000)
    assert precision.choices_of(longer.agent.algo_factory)["compile"] == {"": False}
    recorded = scheme(record=str(tmp_path / "record"))
    recorded.start(2000)
    recorded.step()
    recorded.stop()
    replayed = scheme(replay=str(tmp_path / "record"))
    monkeypatch.setattr("pytorchrl.scheme.choices.is_worth_compiling", lambda agent, shape, steps: False)
    replayed.start(2000)
    assert [precision.choices_of(one.agent.algo_factory)["compile"] for one in (recorded, replayed)] == [{"": True}] * 2


def test_an_algorithm_without_a_scheme_is_not_compiled():
    assert not PPO.create_factory().options.is_compiled
    assert PPO.create_factory().options.compile == "auto"
