"""Check all sixteen patterns on threads: ledgers balance, schemes stop, collectors have the learner's weights, and
agents learn."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

from pytorchrl import ASYNC, PPO, SYNC, OnPolicyActor, VecEnv
from pytorchrl.errors import StoppedError
from pytorchrl.scheme.collection.c_worker import CWorker

NUM_STEPS = 400


@pytest.mark.timeout(60)
def test_every_step_is_accounted_for(pattern, make_scheme, recorder, check_ledger):
    before = set(threading.enumerate())
    scheme = make_scheme(recorder.env_fn, {"episode_length": 7}, size=16, storage=recorder.storage, **pattern)
    made_by_probe = len(recorder.made)
    while check_ledger(scheme)["consumed_unique"] < NUM_STEPS:
        assert np.isfinite(scheme.step()["loss"])
    metrics = scheme.metrics()
    start = time.monotonic()
    final = scheme.stop()
    assert time.monotonic() - start < 10
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]

    # The ledger must balance exactly, and no steps may be in flight or queued.
    assert check_ledger(scheme) == final
    assert final["in_flight"] == final["queued"] == 0
    dropped = final["dropped"].pop("shutdown")
    assert not any(final["dropped"].values())
    assert final["collected"] == final["consumed_unique"] + dropped

    # The recorder counts steps in the environments and in the batches; its counts must agree with the ledger.
    made, drawn, inserted = Counter(recorder.made[made_by_probe:]), Counter(recorder.drawn), Counter(recorder.inserted)
    assert final["collected"] == made.total()
    assert max(made.values()) == max(drawn.values()) == max(inserted.values()) == 1
    assert inserted.keys() <= made.keys()
    assert drawn.keys() <= inserted.keys()
    # Every drawn step was used in an update, or belonged to a gradient that was in flight at the end.
    assert final["consumed_unique"] <= drawn.total() <= final["consumed_unique"] + dropped
    if pattern["grad_communication"] is SYNC:
        assert final["consumed_unique"] == drawn.total()
    # Each rollout is used for two epochs, except perhaps the last rollout.
    assert final["consumed"] >= 1.5 * final["consumed_unique"]

    if pattern["col_communication"] is SYNC:
        assert metrics["policy_lag"]["max"] == 0
        assert metrics["rollouts"] > 0
    if pattern["grad_communication"] is SYNC or pattern["num_grad_workers"] == 1:
        assert metrics["grad_lag"]["max"] == 0


@pytest.mark.timeout(60)
def test_collectors_have_the_weights_of_the_learner(some_pattern, make_scheme, one_batch, all_collectors):
    """Check that each collector's weights equal the learner's weights of the same version, bit for bit.

    If collection and gradients are both synchronous, collectors have the version before the latest update.
    """
    scheme = make_scheme(algo=one_batch, **some_pattern)
    root = scheme.start()
    server = root.local_worker
    states = {0: server.get_weights().state}
    apply = server.apply_gradients

    def apply_and_remember(*args, **kwargs):
        with server.local_worker.journal.lock:
            info = apply(*args, **kwargs)
            states[server.actor_version] = server.get_weights().state
        return info
    server.apply_gradients = apply_and_remember
    newest = []
    for _ in range(6):
        scheme.step()
        for _worker, handle in all_collectors(scheme):
            weights = handle.runtime.get(handle.submit(CWorker.get_weights), 10.0)
            assert weights.state.keys() == states[weights.version].keys()
            for name, array in weights.state.items():
                assert array.tobytes() == states[weights.version][name].tobytes()
            newest.append(weights.version)
            in_turns = some_pattern["grad_communication"] is SYNC and some_pattern["col_communication"] is SYNC
            if in_turns:  # the latest update used a round that was collected with the previous version
                assert weights.version == scheme.version - 1
        for handle in root.remote_workers:
            weights = handle.runtime.get(handle.submit(type(server).get_weights), 10.0)
            assert weights.state["all"].tobytes() == states[weights.version]["all"].tobytes()
    if all_collectors(scheme):
        deadline = time.monotonic() + 20
        while max(newest) == 0 and time.monotonic() < deadline:  # asynchronous collectors may receive new weights later
            scheme.step()
            newest += [handle.runtime.get(handle.submit(CWorker.get_weights), 10.0).version
                       for _, handle in all_collectors(scheme)]
        assert max(newest) > 0
    assert any(state["all"].tobytes() != states[0]["all"].tobytes() for state in states.values())


@pytest.mark.timeout(60)
def test_stop_is_final_and_idempotent(some_pattern, make_scheme):
    scheme = make_scheme(**some_pattern)
    scheme.step()
    assert scheme.stop() == scheme.stop() == scheme.ledger()
    for call in (scheme.step, scheme.start):
        with pytest.raises(StoppedError):
            call()


def test_stop_before_start(make_scheme):
    scheme = make_scheme()
    assert scheme.stop()["collected"] == 0
    with pytest.raises(StoppedError):
        scheme.step()


@pytest.mark.timeout(60)
def test_stop_right_after_start(some_pattern, make_scheme):
    scheme = make_scheme(**some_pattern)
    scheme.start()
    start = time.monotonic()
    assert scheme.stop()["collected"] == 0
    assert time.monotonic() - start < 10


@pytest.mark.timeout(120)
def test_patterns_learn_cartpole(pattern, make_scheme):
    """Check that training on CartPole reaches a mean return of 120 within 30,000 steps; a random policy reaches about
    22."""
    rollouts = 1
    for level in ("col", "grad"):
        if pattern[f"{level}_communication"] is SYNC and pattern[f"num_{level}_workers"] > 1:
            rollouts *= 2
    fresh = {} if pattern["col_communication"] is SYNC else {"queue_size": 1, "col_in_flight": 1}
    two_collectors = {"num_col_workers": min(2, pattern["num_col_workers"])}
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=16)
    scheme = make_scheme(
        envs=envs, size=64 // rollouts, test_envs=VecEnv.create_factory("CartPole-v1", vec_env_size=10),
        actor=OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        algo=PPO.create_factory(lr=2e-3, num_epochs=4, num_mini_batch=4, gamma=0.98, entropy_coef=0.0),
        **(pattern | fresh | two_collectors))
    mean = 0.0
    for target in (3_000, 4_000, 5_000, 6_000, 8_000, 10_000, 20_000, 30_000):
        while scheme.ledger()["consumed_unique"] < target:
            scheme.step()
        scheme.start_evaluation(10)
        evaluation = scheme.wait_evaluation(60.0)
        assert len(evaluation.returns) == 10
        mean = evaluation.return_mean
        if mean >= 120:
            break
    assert mean >= 120


@pytest.mark.parametrize("normalization", ["minibatch", "batch"])
@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "grad_communication": ASYNC},
    {"num_grad_workers": 2, "distribute_gradients": True}], ids=["central", "sync", "async", "decentralized"])
def test_steps_skipped_by_target_kl_are_counted(make_scheme, recorder, check_ledger, settings, normalization):
    """Check that steps that are not used because of `target_kl` are counted as dropped.

    Each rollout is split into four batches. The policy has not changed before the first batch, so its KL is only a
    rounding error. Training stops after the second batch, so half of the steps are never used.
    """
    scheme = make_scheme(
        recorder.env_fn, num_envs=2, size=8, storage=recorder.storage, **settings,
        algo=PPO.create_factory(
            num_epochs=2, num_mini_batch=4, target_kl=1e-5, lr=1e-2, advantage_normalization=normalization))
    by_probe = len(recorder.made)
    for _ in range(12):
        scheme.step()
        ledger = check_ledger(scheme)
    final = scheme.stop()
    assert ledger["dropped"]["early_stop"] > 0
    assert check_ledger(scheme)["collected"] == len(recorder.made) - by_probe
    assert len(recorder.drawn) >= final["consumed_unique"]
    assert 1 <= len(recorder.inserted) / len(recorder.drawn) <= 2.5


@pytest.mark.timeout(60)
def test_intrinsic_rewards_reach_every_worker(pattern, make_scheme):
    """Check that the learner merges moments of the learners below it, and that collectors receive no more weights."""
    scheme = make_scheme(algo=PPO.create_factory(num_epochs=1, num_mini_batch=2, lr=1e-3, intrinsic_reward="rnd"),
                         **pattern)
    losses = [scheme.step()["predictor_loss"] for _ in range(8)]
    assert np.isfinite(losses).all()
    own = scheme.update_worker.local_worker.algo
    size = sum(parameter.numel() for parameter in own.actor.parameters())
    assert scheme.acting_state()["all"].shape == (size,)
    assert own.groups["all"].data.shape[0] > size
    counts = {int(own.intrinsic.return_moments.count), int(own.intrinsic.obs_moments[0].count)}
    assert len(counts) == 1
    assert min(counts) >= 16 * (8 // 2) - 16  # 16 steps in each of the rollouts of 8 updates, the last not yet merged
