"""Test that a trained agent can be trained further, and equals an agent that was trained longer at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import read_json
from pytorchrl.training.training import load, make_learner, train

COMMON = {"progress": False, "tensorboard": False, "seed": 3, "hidden_sizes": (8,)}
PPO = {**COMMON, "num_envs": 2, "num_steps": 16, "num_epochs": 2, "num_mini_batch": 2, "lr": 1e-3}
DQN = {**COMMON, "start_steps": 32, "replay_size": 200, "mini_batch_size": 8, "num_envs": 1, "num_steps": 4,
       "prioritized": True, "alpha": 0.6, "beta": 0.5, "lr": 1e-3}
SAC = {**COMMON, "start_steps": 32, "replay_size": 200, "mini_batch_size": 8, "num_envs": 1}
CASES = [("ppo", "CartPole-v1", {**PPO, "normalize_obs": True}), ("dqn", "CartPole-v1", DQN),
         ("sac", "Pendulum-v1", SAC), ("a2c", CountingEnv, {**COMMON, "num_envs": 2, "num_steps": 16, "lr": 1e-3})]


def longer(algorithm, env, options, first, whole):
    """Train for `whole` steps with a checkpoint after `first` steps; return the acting state and the ledger."""
    learner, _ = make_learner(algorithm, env, target_steps=whole, **options)
    with learner:
        target, learner._target.env_steps = learner._target.env_steps, first  # until a shorter run would be done
        learner._measured.count()
        while learner.env_steps < first or not learner._target.is_reached(learner.env_steps, learner.ledger, 0):
            learner.step()
            learner._measured.count()
        learner._target.env_steps, learner._target._last_collected = target, float("inf")
        learner.scheme.checkpoint()
        learner.train()
        return learner.scheme.acting_state(), learner.ledger


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("algorithm", "env", "options"), CASES, ids=[case[0] for case in CASES])
def test_an_agent_that_is_trained_further_equals_one_that_was_trained_longer(algorithm, env, options):
    agent = train(algorithm, env, target_steps=96, **options)
    assert agent.train(96) is agent
    assert agent.summary["env_steps"] == 192
    state, ledger = longer(algorithm, env, options, 96, 192)
    assert_equal(agent.acting_state, state)
    for name in ("collected", "consumed", "consumed_unique", "dropped"):
        assert agent.summary["ledger"][name] == ledger[name], name


def test_keeping_the_state_changes_nothing_in_the_run(monkeypatch):
    kept = train("ppo", "CartPole-v1", target_steps=96, **PPO)
    monkeypatch.setattr("pytorchrl.training.training._keeps_state", lambda learner: False)
    other = train("ppo", "CartPole-v1", target_steps=96, **PPO)
    assert_equal(kept.acting_state, other.acting_state)
    timed = {"seconds", "env_steps_per_s"}
    assert {k: v for k, v in kept.summary.items() if k not in timed} == {
        k: v for k, v in other.summary.items() if k not in timed}
    with pytest.raises(ConfigError, match=r"neither in memory.* train it with log_dir and checkpoint_every"):
        other.train(32)


def test_a_run_with_files_continues_in_its_directory(tmp_path):
    memory = train("dqn", "CartPole-v1", target_steps=96, **DQN)
    agent = train("dqn", "CartPole-v1", target_steps=96, log_dir=tmp_path / "a", log_every=32, **DQN)
    one = agent.evaluate(2)
    agent.train(np.int64(64)).train(32)
    assert_equal(agent.acting_state, memory.train(64).train(32).acting_state)
    assert agent.evaluate(2).returns == load(tmp_path / "a").evaluate(2).returns
    assert one.returns
    steps = [json.loads(line)["env_steps"] for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == read_json(tmp_path / "a" / "result.json")["env_steps"] == 192
    assert read_json(tmp_path / "a" / "run.json")["target_steps"] == 192
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_loaded_agent_continues_from_the_last_checkpoint(tmp_path):
    options = {**PPO, "checkpoint_every": 32}
    agent = train("ppo", "CartPole-v1", target_steps=64, log_dir=tmp_path / "a", **options)
    twin = train("ppo", "CartPole-v1", target_steps=64, log_dir=tmp_path / "b", **options)
    loaded = load(tmp_path / "a")
    assert_equal(loaded.train(64).acting_state, twin.train(64).acting_state)
    assert loaded.summary["env_steps"] == 128
    with pytest.raises(ConfigError, match="has ended at 64 env steps, but its newest checkpoint is at 128"):
        agent.train(64)
    train("ppo", "CartPole-v1", target_steps=64, log_dir=tmp_path / "c", **PPO)
    with pytest.raises(ConfigError, match="train it with log_dir and checkpoint_every"):
        load(tmp_path / "c").train(32)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None])
def test_wrong_numbers_of_steps_are_refused(steps):
    agent = train("ppo", "CartPole-v1", target_steps=32, **PPO)
    with pytest.raises(ConfigError, match="steps must be a whole number >= 1"):
        agent.train(steps)
