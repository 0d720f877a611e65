"""Tests of schemes whose environments are restarted: the count of restarts, the ledger, and errors that end the run."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from pytorchrl import ASYNC, VecEnv
from pytorchrl.envs.testing import CountingEnv, FaultyEnv, RaisingEnv
from pytorchrl.errors import EnvError, NonFiniteDataError
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.transport.messages import RolloutHeader

SCHEMES = {
    "central": {}, "parallel-sync": {"num_col_workers": 2}, "two-grad-workers": {"num_grad_workers": 2},
    "parallel-async": {"num_col_workers": 2, "col_communication": ASYNC},
    "decentralized": {"num_grad_workers": 2, "distribute_gradients": True},
}


class Log:
    """A log of the successful and the failed steps of all workers."""

    def __init__(self, probability=0.02):
        self.made, self.raised = [], []
        log = self

        class Logged(RaisingEnv):
            def step(self, action):
                try:
                    result = super().step(action)
                except RuntimeError:
                    log.raised.append(1)
                    raise
                log.made.append(1)
                return result
        self.options = {"wrappers": (functools.partial(Logged, probability=probability),), "on_env_error": "restart",
                        "max_env_restarts": 1000}


@pytest.mark.every(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES.keys())
def test_restarts_are_counted_and_the_ledger_is_exact(make_scheme, settings, runtime):
    log = Log()
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 7}, 3, **log.options)
    scheme = make_scheme(envs=envs, size=20, runtime=runtime, **settings)
    for _ in range(60):
        scheme.step()
    metrics = scheme.metrics()
    assert 10 < metrics["envs_restarted"] <= len(log.raised)
    if settings.get("col_communication") is not ASYNC:
        assert metrics["envs_restarted"] == len(log.raised)
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    assert ledger["collected"] == len(log.made), "a step that raised an error must not be in the ledger"


def test_no_restart_is_counted_without_faults(make_scheme):
    states = []
    for policy in ("restart", "raise"):
        scheme = make_scheme(envs=VecEnv.create_factory(CountingEnv, None, 2, on_env_error=policy))
        for _ in range(5):
            scheme.step()
        assert scheme.metrics()["envs_restarted"] == 0
        states.append(scheme.acting_state()["all"])
    assert torch.equal(*states)


def test_the_same_seed_repeats_a_run_with_faults(make_scheme):
    states = []
    for _ in range(2):
        scheme = make_scheme(envs=VecEnv.create_factory(CountingEnv, {"episode_length": 7}, 3, **Log().options))
        for _ in range(60):
            scheme.step()
        assert scheme.metrics()["envs_restarted"] > 3
        states.append(scheme.acting_state()["all"])
    assert torch.equal(*states)


def test_restarts_of_dropped_rollouts_are_in_the_next_total():
    stats = WorkerStats(time.monotonic)
    for worker, incarnation, total in ((1, 0, 2), (1, 0, 5), (2, 0, 1), (1, 1, 1)):
        stats.add_rollout(RolloutHeader(
            num_env_steps=1, size=1, collected_steps=1, weights_version=0, worker=worker, sequence=1,
            incarnation=incarnation, envs_restarted=total), 0, 0)
    assert stats.counters.envs_restarted == 7


def test_non_finite_data_never_cause_a_restart(make_scheme):
    envs = VecEnv.create_factory(FaultyEnv, {"fault": "nan_obs", "at": 5}, 2, on_env_error="restart")
    with pytest.raises(NonFiniteDataError, match="env 0: obs is nan"):
        make_scheme(envs=envs).step()


@pytest.mark.parametrize("policy", ["restart", "raise"])
def test_on_env_error_decides_whether_a_rare_fault_ends_the_run(make_scheme, policy):
    envs = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 30}, 1, on_env_error=policy)
    scheme = make_scheme(envs=envs, size=16)

    def step_on(num_steps):
        for _ in range(num_steps):
            scheme.step()
    if policy == "raise":
        with pytest.raises(EnvError, match="faulty step"):
            step_on(12)
        return
    step_on(12)  # 12 updates use 3 rollouts of 16 steps; the environment restarts once
    assert scheme.metrics()["envs_restarted"] == 1
    with pytest.raises(EnvError, match=r"faulty step; not restarted, .* 3 times"):
        step_on(60)


def test_evaluations_exclude_episodes_cut_by_a_fault(make_scheme):
    """Check that every evaluated episode has its full length."""
    log = Log(probability=0.1)
    scheme = make_scheme(envs=VecEnv.create_factory(CountingEnv, None, 2),
                         test_envs=VecEnv.create_factory(CountingEnv, {"episode_length": 8}, 2, **log.options))
    scheme.start_evaluation(12)
    assert scheme.wait_evaluation(20.0).lengths == (8,) * 12
    assert len(log.raised) > 3
