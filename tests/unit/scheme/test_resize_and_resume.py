"""Tests of runs that resume after `Scheme.resize`, or with another number of collection workers."""

from __future__ import annotations


import numpy as np
import pytest

from pytorchrl import (
    PARALLEL,
    Scheme,
    train,
)
from pytorchrl.errors import CheckpointError
from tests.unit.scheme.checkpointed import AGENTS, differences, go_on, through_a_file
from tests.unit.scheme.resizing import (  # noqa: F401 - fixtures
    CASES,
    account_fixture,
    make_fixture,
    num_workers,
)


RESUMED = {"2 collectors": {}, "2 of each": {"num_grad_workers": 2},
           "ranks": {"num_grad_workers": 2, "distribute_gradients": True}}


@pytest.fixture
def make_agent():
    """Return a function that makes schemes from an agent's name and settings; all are stopped after the test."""
    schemes = []

    def make_(agent, **settings):
        schemes.append(Scheme(*AGENTS[agent](), **{"runtime": "threads", "seed": 1} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


@pytest.mark.parametrize(("agent", "settings"), [
    pytest.param(agent, settings, id=f"{agent}-{name}", marks=[pytest.mark.thorough] if i + j != 2 else [])
    for i, agent in enumerate(("ppo, normalized", "dqn, prioritised", "r2d2"))
    for j, (name, settings) in enumerate(RESUMED.items())])
def test_a_run_resumes_bit_for_bit_after_a_resize(make_agent, check_ledger, agent, settings):
    """The last resize takes effect with the checkpoint, and a later one brings back a worker that had left."""
    straight = make_agent(agent, num_col_workers=3, **settings)
    straight.start(target_steps=900)
    for number in (2, 3, 4, 2):
        straight.resize(num_col_workers=number)
        go_on(straight, 2)
    straight.resize(num_col_workers=3)
    checkpoint = through_a_file(straight.checkpoint())
    resumed = make_agent(agent, num_col_workers=3, **settings)
    resumed.resume(checkpoint)
    resumed.start(target_steps=900)
    np.testing.assert_equal(go_on(resumed, 3), go_on(straight, 3))
    for scheme in (straight, resumed):
        scheme.resize(num_col_workers=4)
    np.testing.assert_equal(go_on(resumed, 3), go_on(straight, 3))
    assert differences(straight.checkpoint(), resumed.checkpoint()) == []
    assert check_ledger(resumed) == check_ledger(straight)
    assert resumed.stop() == straight.stop()


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("case", ["sync, 1 sync", "sync, 2 sync", "async, 1 async", "async, 2 async", "shards", "ranks",
                                  "central inference"])
def test_a_run_resumes_with_another_number(make, account, check_ledger, case, number):
    first = make(num_col_workers=3, **CASES[case])
    for _ in range(9):
        first.step()
    checkpoint = through_a_file(first.checkpoint())
    first.stop()
    made = list(account.made)
    second = make(num_col_workers=number, col_execution=PARALLEL, **CASES[case])
    second.resume(checkpoint)
    second.start()
    assert num_workers(second) == [number] * CASES[case].get("num_grad_workers", 1)
    assert check_ledger(second)["collected"] == checkpoint_collected(checkpoint)
    before = len(made)
    for _ in range(9):
        second.step()
        check_ledger(second)
    final = second.stop()
    assert check_ledger(second) == final
    assert final["collected"] == checkpoint_collected(checkpoint) + len(account.made) - before


def checkpoint_collected(checkpoint):
    """Return the number of steps that the ledgers in a checkpoint count as collected."""
    return sum(worker["ledger"]["collected"] for worker in checkpoint["state"]["workers"])


def test_a_learner_resumes_with_another_number(tmp_path):
    def run(number, target_steps):
        return train("ppo", "CartPole-v1", seed=1, num_envs=2, num_steps=16, num_col_workers=number, runtime="threads",
                     checkpoint_every=100, resume=True, progress=False, target_steps=target_steps,
                     log_dir=str(tmp_path / "run"), num_mini_batch=2).summary

    assert run(2, 300)["ledger"]["collected"] == 320
    ledger = run(3, 600)["ledger"]
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values()) == 320 + 3 * 96


def test_a_central_run_does_not_resume_with_remote_workers(make):
    first, second = make(num_col_workers=1), make(num_col_workers=3)
    first.step()
    with pytest.raises(CheckpointError, match=r"col_execution was 'Central', now it is 'Parallel'; use its settings"):
        second.resume(through_a_file(first.checkpoint()))
    make(num_col_workers=1).resume(through_a_file(first.checkpoint()))


def test_resume_with_one_worker_says_what_to_do(make):
    first, second = make(num_col_workers=3), make(num_col_workers=1)
    first.step()
    with pytest.raises(CheckpointError, match="col_execution='Parallel' continues a run with remote"):
        second.resume(through_a_file(first.checkpoint()))
