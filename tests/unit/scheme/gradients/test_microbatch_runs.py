"""Tests of runs with microbatches: log, prefetch, ledger, recorded runs, and actors with batch normalization."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from pytorchrl import A2C, ASYNC, PPO, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, Scheme, VecEnv, multi_agent
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.scheme.gradients import microbatch as accumulator
from tests.unit.scheme.gradients.conftest import ALGORITHMS, PLACES, envs, assert_same


# Log


def lines_of(caplog):
    return [record.message for record in caplog.records if record.name == accumulator.__name__
            and record.levelno == logging.DEBUG]


def test_each_discarded_microbatch_is_logged(make_scheme, plain_a2c, caplog):
    """Check that each separately collected microbatch has one line in the log, even if it has several slices."""
    scheme = make_scheme(CountingEnv, {"episode_length": 10**6}, num_envs=2, size=20, algo=plain_a2c,
                         train_batch_size=100,
                         microbatch_size=30)
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        scheme.step()
    assert scheme.metrics()["backward_passes"] == 6
    assert lines_of(caplog) == [
        "Computing gradients for microbatch 1 (40/100 samples)",
        "Computing gradients for microbatch 2 (80/100 samples)",
        "Computing gradients for microbatch 3 (120/100 samples)", "Applying accumulated gradients (120 samples)"]


def test_each_slice_of_a_batch_is_logged(make_scheme, caplog):
    scheme = make_scheme(CountingEnv, {"episode_length": 10**6}, num_envs=2, size=20, microbatch_size=10,
                         algo=PPO.create_factory(num_epochs=1, num_mini_batch=2))
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        scheme.step()
    assert lines_of(caplog) == [
        "Computing gradients for microbatch 1 (10/20 samples)", "Computing gradients for microbatch 2 (20/20 samples)",
        "Applying accumulated gradients (20 samples)"]


def test_slices_of_several_policies_count_agent_samples(caplog):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, vec_env_size=2, policy_of="independent")
    agent = multi_agent(envs, PPO.create_factory(num_epochs=1, num_mini_batch=1), OnPolicyActor.create_factory,
                        GAEBuffer.create_factory(8))
    scheme = Scheme(*agent, envs, seed=1, microbatch_size=8)
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        scheme.step()
    scheme.stop()
    assert lines_of(caplog)[:2] == ["Computing gradients for microbatch 1 (16/32 samples)",
                                    "Computing gradients for microbatch 2 (32/32 samples)"]


def test_without_microbatches_nothing_is_logged(make_scheme, caplog):
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        make_scheme().step()
    assert lines_of(caplog) == []


# Prefetch


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("rollouts", [1, 3], ids=["one round a microbatch", "several"])
def test_prefetch_changes_no_result(train, runtime, rollouts):
    settings = {"runtime": runtime, "num_col_workers": 2, "train_batch_size": 400, "microbatch_size": 70 * rollouts}
    without, ahead, again = (train(ALGORITHMS["a2c"], **settings, prefetch=prefetch) for prefetch in (0, 1, 1))
    assert_same(without, ahead, exact=True)
    assert_same(ahead, again, exact=True)
    # No rollout is in flight between two updates, so all collected steps were used.
    assert ahead["ledger"]["collected"] == ahead["ledger"]["consumed_unique"]


def test_prefetch_collects_during_gradient_computation(train):
    """Check that, with prefetch, a microbatch is collected while the previous gradient is computed.

    A microbatch needs two rounds of 10 virtual seconds each, and its gradient takes 30 s.
    """
    costs = {"start": 0, "message": 0, "step": 1.0, "grad": 30.0, "update": 0}
    settings = {"runtime": "simulated", "costs": costs, "num_col_workers": 2, "updates": 1,
                "envs": VecEnv.create_factory(CountingEnv, {"episode_length": 10**6}, 4),
                "train_batch_size": 640, "microbatch_size": 160}
    without, ahead = (train(ALGORITHMS["a2c"], **settings, prefetch=prefetch) for prefetch in (0, 1))
    assert without["seconds"] == pytest.approx(4 * (20 + 30))
    assert ahead["seconds"] == pytest.approx(20 + 4 * 30)


@pytest.mark.parametrize(("settings", "expected"), [
    ({"num_col_workers": 2}, 1), ({}, 0), ({"num_col_workers": 2, "col_fraction_workers": 0.5}, 0),
    ({"num_col_workers": 2, "algo": ALGORITHMS["ppo by batch"]}, 0)])
def test_prefetch_is_on_if_work_can_overlap(make_scheme, settings, expected):
    scheme = make_scheme(**({"algo": ALGORITHMS["a2c"]} | settings), train_batch_size=64, microbatch_size=16)
    assert scheme.settings["prefetch"] == expected


@pytest.mark.parametrize("policy", ["restart", "ignore"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_worker_lost_while_collecting_microbatches(train, policy, prefetch):
    result = train(ALGORITHMS["a2c"], runtime="simulated", num_col_workers=3, train_batch_size=600, microbatch_size=300,
                   prefetch=prefetch, on_worker_failure=policy, faults="kill col.2 @ step 34")
    ledger = result["ledger"]
    assert ledger["collected"] == ledger["consumed_unique"] >= 3 * 600
    assert result["metrics"]["workers_restarted"] == (policy == "restart")
    assert result["metrics"]["updates"] == 3


def test_slow_workers_are_preempted_while_collecting_microbatches(train):
    result = train(ALGORITHMS["a2c"], runtime="simulated", num_col_workers=3, train_batch_size=300, microbatch_size=100,
                   col_fraction_workers=0.6, costs={"step@*/CWorker 3": 1.0})
    assert result["metrics"]["rollouts_preempted"] == result["metrics"]["rollouts"] / 3


# Ledger


def test_steps_stay_queued_until_the_update(make_scheme, check_ledger, monkeypatch):
    scheme = make_scheme(algo=ALGORITHMS["a2c"], train_batch_size=100, microbatch_size=20)
    worker = scheme.start().local_worker
    seen = []
    monkeypatch.setattr(worker, "compute_gradients", lambda *args, right=worker.compute_gradients: (
        seen.append(worker.ledger.snapshot().queued), right(*args))[1])
    scheme.step()
    assert len(seen) >= 4
    assert seen == sorted(set(seen))  # each microbatch adds queued steps
    ledger = check_ledger(scheme)
    assert ledger["queued"] == 0
    assert ledger["consumed_unique"] == ledger["collected"] == seen[-1]


def test_a_non_finite_microbatch_drops_the_steps_of_the_whole_update(make_scheme, check_ledger):
    scheme = make_scheme(algo=ALGORITHMS["a2c"], runtime="simulated", train_batch_size=100, microbatch_size=20,
                         faults="nan grad.0 @ grad 2")
    before = scheme.acting_state()["all"]
    assert scheme.step() == {}
    assert torch.equal(scheme.acting_state()["all"], before)
    dropped = check_ledger(scheme)["dropped"]["nan"]
    assert dropped == scheme.ledger()["collected"] >= 100
    scheme.step()
    ledger = check_ledger(scheme)
    assert ledger["dropped"]["nan"] == dropped
    assert ledger["consumed_unique"] == ledger["collected"] - dropped > 0


def test_the_non_finite_microbatch_is_saved(make_scheme, tmp_path):
    scheme = make_scheme(algo=ALGORITHMS["a2c"], runtime="simulated", train_batch_size=100, microbatch_size=20,
                         faults="nan grad.0 p=1.0", keep_bad_batches=tmp_path)
    for _ in range(5):
        scheme.step()
    with pytest.raises(NonFiniteUpdateError, match="saved to"):
        scheme.step()
    files = sorted(tmp_path.iterdir())
    assert 0 < torch.load(files[0], weights_only=True)["batch"]["num_samples"] < 40


def test_steps_of_a_failed_update_are_dropped_at_shutdown(make_scheme):
    class Fails(A2C):
        num_calls = 0

        def compute_gradients(self, batch):
            Fails.num_calls += 1
            if Fails.num_calls == 4:
                raise RuntimeError("out of luck")
            return super().compute_gradients(batch)

    scheme = make_scheme(algo=Fails.create_factory(), train_batch_size=200, microbatch_size=16)
    with pytest.raises(RuntimeError, match="out of luck"):
        scheme.step()
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["dropped"]["shutdown"] >= 40
    assert ledger["consumed_unique"] == 0


def test_normalizers_change_only_between_updates(train):
    """Check that normalizers count exactly the consumed steps, even if ranks used different numbers of rollouts."""
    settings = {"envs": envs(2, autoreset="next_step"), "actor": {"normalize_obs": True}, "train_batch_size": 77,
                "microbatch_size": 20}
    for place in PLACES.values():
        result = train(ALGORITHMS["a2c"], updates=3, **settings, **place)
        count, = (value for name, value in result["state"].items() if name.endswith("count"))
        assert count == result["ledger"]["consumed_unique"] > 3 * 57


# Record and replay


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 3}, {"num_col_workers": 2, "num_grad_workers": 2},
    {"num_col_workers": 2, "num_grad_workers": 2, "grad_communication": ASYNC}], ids=str)
def test_a_recorded_run_is_replayed(make_scheme, tmp_path, settings):
    common = {**settings, "algo": ALGORITHMS["a2c"], "train_batch_size": 100, "microbatch_size": 40}
    path = str(tmp_path / "run.record")
    first = make_scheme(**common, record=path)
    for _ in range(3):
        first.step()
    ledger = first.ledger()["consumed_unique"]
    state = first.acting_state()
    first.stop()
    again = make_scheme(**common, runtime=None, replay=path)
    while not again.replay_is_over:
        again.step()
    torch.testing.assert_close(again.acting_state(), state, rtol=0, atol=0)
    assert again.ledger()["consumed_unique"] == ledger


def test_a_record_with_another_microbatch_size_is_refused(make_scheme, tmp_path):
    path = str(tmp_path / "run.record")
    first = make_scheme(algo=ALGORITHMS["a2c"], microbatch_size=7, record=path)
    first.step()
    first.stop()
    with pytest.raises(ValueError, match="microbatch_size was 7, now it is 8"):
        make_scheme(algo=ALGORITHMS["a2c"], microbatch_size=8, runtime=None, replay=path)


# Networks with layers that depend on the mode


class BatchNormed(OnPolicyActor):
    """An actor with batch normalization, which would depend on how a batch is sliced if it were in training mode."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.norm = nn.BatchNorm1d(3)


def test_batch_normalization_warns():
    given = envs()
    actor = BatchNormed.create_factory(given.observation_space, given.action_space)
    for microbatch_size in (None, 8):
        scheme = Scheme(A2C.create_factory(), actor, GAEBuffer.create_factory(8), given, seed=1,
                        microbatch_size=microbatch_size)
        with pytest.warns(UserWarning, match="BatchNorm1d in the actor stay in evaluation mode in A2C"):
            scheme.start()
        scheme.stop()
