"""Tests of `Learner` with small real schemes."""

from __future__ import annotations

import json

import pytest

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear, train
from pytorchrl.errors import ConfigError, StoppedError


@pytest.fixture
def make_learner(tmp_path):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)

    def make(target_steps=256, *, algorithm=None, scheme=None, test_envs_factory=envs, **options):
        built = Scheme(
            PPO.create_factory(**{"num_epochs": 2, "num_mini_batch": 2, **(algorithm or {})}),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
            GAEBuffer.create_factory(size=32), envs, test_envs_factory, **{"seed": 1, **(scheme or {})})
        return Learner(built, target_steps, tmp_path / "run", **{"progress": False, "tensorboard": False, **options})
    return make


@pytest.mark.parametrize("preset", ["impala", "appo"])
def test_the_env_steps_of_an_asynchronous_run_are_those_that_it_used(preset):
    summary = train(preset, "CartPole-v1", preset=preset, num_col_workers=2, runtime="simulated", seed=1,
                    target_steps=1500, progress=False).summary
    ledger = summary["ledger"]
    assert 1500 <= summary["env_steps"] == ledger["consumed_unique"]
    assert ledger["collected"] == summary["env_steps"] + sum(ledger["dropped"].values())


def test_a_synchronous_run_uses_all_that_it_collects(make_learner):
    with make_learner(256) as learner:
        summary = learner.train()
    ledger = learner.ledger
    assert 256 <= summary["env_steps"] < 256 + 64
    assert ledger["collected"] == ledger["consumed_unique"] == summary["env_steps"]
    # Each step is used in both epochs, including the steps of the last rollout.
    assert ledger["consumed"] == 2 * ledger["consumed_unique"]
    assert summary["updates"] % 4 == 0
    assert summary["policy_lag"]["max"] == 0


def test_a_synchronous_run_that_skips_epochs_also_ends(make_learner):
    with make_learner(256, algorithm={"target_kl": 1e-9, "lr": 0.01}) as learner:
        summary = learner.train()
    assert 256 <= summary["env_steps"] < 256 + 2 * 64
    assert learner.ledger["consumed"] < 2 * learner.ledger["consumed_unique"]


def test_an_asynchronous_run_stops_with_a_balanced_ledger(make_learner):
    with make_learner(1000, scheme={"col_communication": "asynchronous", "grad_communication": "asynchronous"},
                      ) as learner:
        summary = learner.train()
    assert summary["env_steps"] >= 1000
    assert learner.ledger["collected"] == learner.ledger["consumed_unique"] + sum(learner.ledger["dropped"].values())


def test_schedules_reach_their_end_at_the_target(make_learner):
    with make_learner(2000, algorithm={"lr": linear(1e-3, 1e-5)}) as learner:
        first = learner.step()["lr"]
        learner.train()
        last = learner.step()["lr"]
    assert first == pytest.approx(1e-3, rel=0.1)
    assert last == pytest.approx(1e-5)


def test_update_algorithm_parameter_is_in_force_from_the_next_update(make_learner):
    with make_learner(algorithm={"lr": linear(1e-3, 0.0)}) as learner:
        learner.step()
        learner.update_algorithm_parameter("lr", 0.0123)
        assert [learner.step()["lr"] for _ in range(3)] == [0.0123] * 3
        with pytest.raises(KeyError, match="clip_param"):
            learner.update_algorithm_parameter("typo", 1)
        with pytest.raises(ConfigError, match="lr"):
            learner.update_algorithm_parameter("lr", -1.0)
        assert learner.step()["lr"] == 0.0123
    with pytest.raises(StoppedError):
        learner.update_algorithm_parameter("lr", 0.1)


def test_evaluation_during_training_is_recorded_and_changes_nothing(make_learner, tmp_path, monkeypatch):
    monkeypatch.setattr("pytorchrl.learner.learner._LOOK_INTERVAL_S", 0.0)
    states = []
    for number, options in enumerate(({"eval_every": 128, "eval_episodes": 3}, {})):
        with make_learner(512, overwrite=bool(number), **options) as learner:
            learner.train()
            states.append(learner.scheme.acting_state()["all"])
    assert states[0].equal(states[1])
    lines = (tmp_path / "run.1" / "metrics.jsonl").read_text().splitlines()
    evaluations = [record["evaluation"] for record in map(json.loads, lines) if "evaluation" in record]
    assert evaluations
    assert all(evaluation["episodes"] == 3 and evaluation["return_mean"] > 0 for evaluation in evaluations)


def test_evaluate_plays_exactly_the_requested_episodes(make_learner):
    with make_learner() as learner:
        learner.train()
        evaluation = learner.evaluate(7)
    assert len(evaluation.returns) == len(evaluation.lengths) == 7
    assert evaluation.version == learner.updates


def test_a_seed_that_is_not_given_is_drawn_and_stored(make_learner, tmp_path):
    with make_learner(64, scheme={"seed": None}) as learner:
        seed = learner.train()["seed"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == seed
    with make_learner(64, scheme={"seed": None}, overwrite=True) as learner:
        assert learner.train()["seed"] != seed


def test_the_run_file_lists_every_setting_of_the_scheme(make_learner, tmp_path):
    with make_learner(64) as learner:
        learner.train()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["scheme"] == json.loads(
        json.dumps(learner.scheme.settings))
