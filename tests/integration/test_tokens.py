"""Tests of token tasks in worker trees: ledgers close in each pattern, lag 0 is synchronous, runs resume and replay."""

from __future__ import annotations

import pytest
import torch

import pytorchrl as prl
from pytorchrl import ASYNC, Scheme, VecEnv
from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.envs.tasks import Copy
from pytorchrl.errors import ConfigError
from tests.integration.test_ray_patterns import PATTERNS
from tests.unit.packaging.remedied_tokens import MODULE

GROUPS, GROUP = 3, 4
FINISH, KEEP, RECOMPUTE = ({"on_new_weights": mode, "waits": False} for mode in ("finish", "keep", "recompute"))
WAIT = {"on_new_weights": "finish", "waits": True}


@pytest.fixture
def make(quick_processes):
    """Return a function that makes small schemes of a token task, which are stopped after the test."""
    schemes = []

    def make_one(*, on_new_weights="finish", waits=False, correction="ppo", storage=None, algorithm=None, actor=None,
                 **settings):
        envs = TokenEnv.create_factory(Copy, {"longest": 5}, GROUPS * GROUP, group_size=GROUP, waits=waits)
        scheme = Scheme(
            GRPO.create_factory(**{"num_epochs": 2, "on_new_weights": on_new_weights, "correction": correction,
                                   **(algorithm or {})}),
            DecoderActor.create_factory(envs.observation_space, envs.action_space,
                                        **{"context": 12} | (actor or {"width": 8})),
            GroupBuffer.create_factory(**{"size": GROUPS, "group_size": GROUP} | (storage or {})), envs, seed=1,
            **settings)
        schemes.append(scheme)
        return scheme

    yield make_one
    for scheme in schemes:
        scheme.stop()


def close(scheme):
    """Stop a scheme, check its ledger, and return it."""
    ledger = scheme.stop()
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    assert ledger["consumed_unique"] > 0
    return ledger


@pytest.mark.parametrize("mode", [WAIT, FINISH], ids=["wait", "finish"])
@pytest.mark.parametrize("runtime", ["simulated", "threads", pytest.param("processes", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_ledger_of_tokens_closes(make, pattern, runtime, mode):
    scheme = make(runtime=runtime, **mode, **pattern)
    for _ in range(8):
        scheme.step()
    scheme.checkpoint(30)
    for _ in range(4):
        scheme.step()
    metrics = scheme.metrics()
    ledger = close(scheme)
    if ASYNC not in (pattern["col_communication"], pattern["grad_communication"]) and mode is WAIT:
        assert metrics["policy_lag"]["max"] == 0
        assert ledger["dropped"]["shutdown"] <= ledger["collected"] / 3


@pytest.mark.parametrize("runtime", ["simulated", "threads", pytest.param("processes", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("pattern", [{}, {"num_col_workers": 2, "col_execution": "Parallel"},
                                     {"num_col_workers": 2, "col_communication": ASYNC}],
                         ids=["central", "synchronous", "asynchronous"])
def test_cancelled_sequences_are_dropped_and_forgotten(make, pattern, runtime):
    scheme = make(runtime=runtime, storage={"size": 1, "cancels_unfinished": True}, **FINISH, **pattern)
    lags, kept = [], []
    for _ in range(8):
        scheme.step()
        lags.append(scheme.metrics()["step_lag"]["generation"]["max"])
        kept.append(len(scheme._worker.local_worker.algo._generation._kept))
    scheme.checkpoint(30)
    for _ in range(4):
        scheme.step()
    ledger = close(scheme)
    assert ledger["dropped"]["cancelled"] > 0
    assert max(kept) <= 1
    if ASYNC not in pattern.values():
        assert max(lags) == 0  # no sequence lives longer than the weights with which it started


def test_sequences_are_not_cancelled_with_central_inference(make):
    with pytest.raises(ConfigError, match="cancels_unfinished=True contradicts inference='central'"):
        make(runtime="simulated", num_col_workers=2, col_communication=ASYNC, inference="central",
             storage={"cancels_unfinished": True})


@pytest.mark.parametrize("mode", [FINISH, KEEP, RECOMPUTE], ids=["finish", "keep", "recompute"])
def test_the_ledger_closes_with_central_inference(make, mode):
    scheme = make(runtime="simulated", num_col_workers=2, col_communication=ASYNC, inference="central", **mode)
    for _ in range(8):
        scheme.step()
    scheme.checkpoint(30)
    for _ in range(4):
        scheme.step()
    close(scheme)


def test_microbatches_of_answers_of_different_lengths_add_up(make):
    found = []
    for microbatch_size in (None, 10, 23):
        scheme = make(microbatch_size=microbatch_size, runtime="simulated", algorithm={"lr": 0.0, "num_epochs": 1})
        algorithm, gradients = scheme.start().local_worker.algo, []
        apply = algorithm.apply_gradients
        algorithm.apply_gradients = lambda own, apply=apply, seen=gradients: (
            seen.append(own[0].clone()), apply(own))[1]
        for _ in range(10):
            scheme.step()
        found.append(torch.stack(gradients))
    assert (found[0].norm(dim=1) > 0.1).any()  # in some rollouts, all answers are equally wrong
    for other in found[1:]:
        assert not torch.equal(other, found[0])
        assert torch.allclose(other, found[0], rtol=1e-4, atol=1e-6)


def test_groups_limit_training_only(tmp_path):
    agent = prl.train("grpo", "tokens/SortDigits", num_envs=32, group_size=16, target_steps=128, eval_every=64,
                      eval_episodes=3, log_dir=tmp_path / "run", seed=1, progress=False)
    assert agent.evaluate(5).return_mean == prl.load(tmp_path / "run").evaluate(5).return_mean
    with pytest.raises(ConfigError, match="vec_env_size=24 must be a multiple of group_size=16"):
        prl.train("grpo", "tokens/SortDigits", num_envs=24, group_size=16, target_steps=128, progress=False)


def test_a_context_that_is_too_small_is_refused_at_the_start(make):
    with pytest.raises(ConfigError, match="context=10 is smaller than the 11 tokens of the longest prompt and"):
        make(actor={"context": 10})
    scheme = make(actor={"context": 11, "width": 8})
    scheme.step()
    close(scheme)


def test_corrections_of_whole_minibatches_refuse_microbatches(make):
    with pytest.raises(ConfigError, match="correction='m2po' compares all steps of a minibatch, which microbatch_size"):
        make(correction="m2po", microbatch_size=10)


@pytest.mark.parametrize("waits", [True, False])
def test_a_model_of_the_users_learns_from_rollouts_of_different_lengths(make, waits):
    scheme = make(waits=waits, actor=MODULE, num_col_workers=2, runtime="simulated")
    before = scheme.acting_state()["all"].clone()
    for _ in range(6):
        scheme.step()
    assert not torch.equal(scheme.acting_state()["all"], before)
    close(scheme)


def test_environments_that_reset_in_the_next_step_begin_groups_with_the_reset(make):
    envs = VecEnv.create_factory(
        "FrozenLake-v1", vec_env_size=2 * GROUP, max_episode_steps=12, autoreset="next_step")
    actor = DecoderActor.create_factory(envs.observation_space, envs.action_space, context=16, width=8)
    scheme = Scheme(GRPO.create_factory(), actor, GroupBuffer.create_factory(2, group_size=GROUP), envs, seed=1)
    algorithm = scheme.start().local_worker.algo
    starts, compute = [], algorithm.compute_gradients
    algorithm.compute_gradients = lambda batch: (
        starts.append((batch.obs["obs"][0].unique().tolist(), bool(batch.valid[0].all()))), compute(batch))[1]
    for _ in range(8):
        scheme.step()
    close(scheme)
    assert starts == [([0], True)] * 8


def test_there_are_at_most_as_many_minibatches_as_answers(make):
    with pytest.raises(ConfigError, match="batch 24 = 2 collection workers x 3 groups x 4 episodes, num_mini_batch 25"):
        make(algorithm={"num_mini_batch": 25}, num_col_workers=2)
    scheme = make(algorithm={"num_mini_batch": 24}, num_col_workers=2, runtime="simulated")
    parameters(scheme, 24)
    assert scheme.metrics()["policy_lag"]["max"] == 0


def parameters(scheme, version=8):
    """Return the parameters after `version` updates, and the largest policy lag."""
    while scheme.version < version:
        scheme.step()
    return scheme.acting_state()["all"], scheme.metrics()["policy_lag"]["max"]


@pytest.mark.parametrize("correction", ["ppo", "decoupled"])
@pytest.mark.parametrize("runtime", ["simulated", "threads", pytest.param("processes", marks=pytest.mark.thorough)])
def test_without_lag_asynchronous_collection_is_synchronous(make, runtime, correction):
    settings = {**WAIT, "correction": correction, "num_col_workers": 1, "col_execution": "Parallel"}
    expected, _ = parameters(make(runtime="simulated", **settings))
    settings |= {"col_communication": ASYNC, "on_policy_lag": "wait"}
    found, lag = parameters(make(runtime=runtime, **settings, max_policy_lag=0))
    assert lag == 0
    other, some_lag = parameters(make(runtime="simulated", **settings, max_policy_lag=2))
    assert some_lag == 2
    assert not torch.equal(other, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", [WAIT, FINISH, KEEP, RECOMPUTE], ids=["wait", "finish", "keep", "recompute"])
@pytest.mark.parametrize("workers", [{}, {"num_col_workers": 2}, {"num_grad_workers": 2}],
                         ids=["central", "collectors", "gradients"])
def test_a_run_resumes_bit_for_bit(make, workers, mode):
    first = make(runtime="threads", **mode, **workers)
    parameters(first, 6)
    checkpoint = first.checkpoint(30)
    expected, _ = parameters(first, 12)
    second = make(runtime="threads", **mode, **workers)
    second.resume(checkpoint)
    found, _ = parameters(second, 12)
    assert torch.equal(found, expected)
    assert close(first) == close(second)


@pytest.mark.parametrize("runtime", ["threads", "processes"])
@pytest.mark.parametrize("mode", [FINISH, RECOMPUTE], ids=["finish", "recompute"])
def test_a_recorded_run_replays(make, tmp_path, runtime, mode):
    settings = {**mode, "num_col_workers": 2, "col_communication": ASYNC}
    recorded = make(runtime=runtime, record=tmp_path / "run", **settings)
    parameters(recorded, 12)
    close(recorded)
    replayed = make(replay=tmp_path / "run", **settings)
    while not replayed.replay_is_over:
        replayed.step()
    states = [scheme._worker.local_worker.get_weights() for scheme in (recorded, replayed)]
    assert states[0].version == states[1].version >= 12
    assert states[0].state["all"].tobytes() == states[1].state["all"].tobytes()
