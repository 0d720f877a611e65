"""Tests that IMPALA and APPO learn CartPole from old data, collected asynchronously or sampled from replay."""

from __future__ import annotations

import statistics

import pytest
import torch

from pytorchrl.training.training import make_learner

ASYNCHRONOUS = {"num_col_workers": 2, "col_communication": "asynchronous", "queue_size": 4, "col_in_flight": 1}
UPDATES_PER_BATCH = {"impala": 1, "appo": 16}


def play(algorithm, seed, **settings):
    """Train with the preset for CartPole; return the mean return of 20 episodes and the summary of the run."""
    torch.set_num_threads(1)
    learner, _ = make_learner(algorithm, "CartPole-v1", seed=seed, progress=False, **ASYNCHRONOUS, **settings)
    with learner:
        learner.train()
        evaluation = learner.evaluate(20)
    return statistics.fmean(evaluation.returns), learner.summary()


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "options"), [("impala", {"target_steps": 30_000, "lr": 2e-3}),
                                                    ("appo", {"target_steps": 20_000})])
def test_learns_within_seconds(algorithm, options):
    """Check learning in the simulated runtime, where collection is asynchronous but reproducible."""
    result, summary = play(algorithm, seed=1, runtime="simulated", **options)
    assert summary["policy_lag"]["mean"] > 3 * UPDATES_PER_BATCH[algorithm]
    assert result >= 195, summary


@pytest.mark.slow
def test_learns_from_rollouts_in_shards_within_seconds():
    """Check learning from rollouts sampled from the latest 4000 env steps; each rollout is used twice on average."""
    torch.set_num_threads(1)
    learner, _ = make_learner(
        "impala", "CartPole-v1", seed=1, progress=False, preset="apex", num_col_workers=2,
        num_replay_workers=2,
        replay_size=4000, train_batch_size=384, max_replay_ratio=2.0, max_weight_sync_delay=128, target_steps=40_000,
        runtime="simulated")
    with learner:
        learner.train()
        evaluation, metrics = learner.evaluate(20), learner.get_metrics()
    assert 1.8 < metrics["scheme"]["replay_ratio"] <= 2.0
    assert metrics["scheme"]["policy_lag_replay_mean"] > 8.0
    assert statistics.fmean(evaluation.returns) >= 195, learner.summary()  # the mean return is about 20 before training


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["threads", "simulated", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize(("algorithm", "target_steps"), [("impala", 200_000), ("appo", 100_000)])
def test_solves_cartpole(algorithm, target_steps, runtime):
    """Check the median of three seeds, because the final policy of a run is sometimes bad."""
    runs = [play(algorithm, seed, target_steps=target_steps, runtime=runtime) for seed in (1, 2, 3)]
    assert all(summary["policy_lag"]["mean"] >= UPDATES_PER_BATCH[algorithm] for _, summary in runs), runs
    assert statistics.median(result for result, _ in runs) >= 475, runs
