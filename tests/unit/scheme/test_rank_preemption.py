"""Check ranks that collect data themselves: once enough ranks have their data, the others are preempted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl import A2C, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv

COSTS = {"start": 0, "message": 0, "step": 0.1, "grad": 0, "update": 0, "step@GWorker 3/*": 1.0}


@pytest.fixture
def run(check_ledger):
    """Return a function that trains three ranks, of which the third is ten times slower.

    The function returns (lengths of rollouts by rank, metrics, virtual seconds, final parameters).
    """
    def run_(updates=5, name="ddppo", **settings):
        lengths = {}

        class Watched(GAEBuffer):
            def insert_data_slice(self, rollouts):
                lengths.setdefault(id(self), []).extend(rollout.num_steps for rollout in rollouts)
                super().insert_data_slice(rollouts)
        envs = VecEnv.create_factory(CountingEnv, None, 2)
        agent = (A2C.create_factory(),
                 OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
                 Watched.create_factory(20), envs)
        scheme = getattr(Scheme, name)(*agent, **{
            "num_grad_workers": 3, "runtime": "simulated", "costs": COSTS, "seed": 1} | settings)
        while scheme.version < updates:
            scheme.step()
            check_ledger(scheme)
        ranks = [handle.native.worker for handle in scheme.update_worker.remote_workers]
        by_rank = [lengths[id(rank.storage)] for rank in ranks]
        state, metrics, seconds = scheme.acting_state()["all"], scheme.metrics(), scheme.runtime.now()
        for rank in ranks:
            assert torch.equal(rank.algo.acting_state()["all"], state)
        final = scheme.stop()
        assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
        return by_rank, metrics, seconds, state
    return run_


def test_a_slow_rank_is_preempted(run):
    """Check that the slow rank stops after the required 5 steps.

    The other ranks take 20 steps in 2 s; the slow rank takes only 2 steps in that time.
    """
    by_rank, metrics, seconds, _ = run()
    assert by_rank[0] == by_rank[1] == [20] * 5
    assert by_rank[2] == [5] * 5
    assert metrics["rollouts_preempted"] == 5
    assert seconds == pytest.approx(5 * 5.0)


@pytest.mark.parametrize(("settings", "least"),
                         [({"fraction_samples": 0.5}, 10),
                          ({"col_fraction_workers": 1.0, "fraction_samples": 0.25}, 20)])
def test_options_set_the_minimum_of_preempted_steps(run, settings, least):
    by_rank, *_ = run(**settings)
    assert by_rank[2] == [least] * 5


def test_the_share_applies_to_collection_workers_of_each_rank(run):
    """Check that `col_fraction_workers` applies to the workers of each rank separately.

    The slow rank has three equally slow workers, so none of them is preempted.
    """
    by_rank, *_ = run(2, num_col_workers=3)
    assert np.mean(by_rank[2]) > 15


def test_equal_ranks_are_not_preempted(run):
    costs = {**COSTS, "step@GWorker 3/*": 0.1}
    by_rank, metrics, *_ = run(costs=costs)
    assert by_rank == [[20] * 5] * 3
    assert metrics["rollouts_preempted"] == 0


def test_a_recorded_run_is_replayed(run, tmp_path):
    path = str(tmp_path / "run.jsonl")
    recorded, *_, state = run(4, record=path)
    assert recorded[2] == [5] * 4
    repeated, *_, again = run(4, replay=path, costs=None)
    assert repeated == recorded
    assert torch.equal(state, again)
