"""Tests of `train` and `load` with several policies."""

from __future__ import annotations

import dataclasses
import json
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import pytorchrl
from pytorchrl.training.composition import compose
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.training.training import load, make_learner, train
from pytorchrl.play.video import record_video

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 2, "hidden_sizes": (8,), "target_steps": 64,
        "progress": False, "tensorboard": False, "seed": 3}
TINY_REPLAY = {"start_steps": 40, "mini_batch_size": 8, "hidden_sizes": (8,), "target_steps": 80, "progress": False,
               "seed": 3}
AGENTS = ["agent_0", "agent_1"]


@pytest.fixture
def game(tmp_path, monkeypatch):
    """Return the name of a module whose environments have two agents."""
    package = tmp_path / "modules" / "games_of_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "matching.py").write_text("from pytorchrl.envs.testing import MatchingGame as parallel_env\n")
    monkeypatch.syspath_prepend(package.parent)
    yield "games_of_test.matching"
    for name in ("games_of_test", "games_of_test.matching"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("policies", "expected"), [
    (None, {"shared": AGENTS}), ("shared", {"shared": AGENTS}),
    ("independent", {"agent_0": AGENTS[:1], "agent_1": AGENTS[1:]}),
    ({"agent_0": "a", "agent_1": "b"}, {"a": AGENTS[:1], "b": AGENTS[1:]}),
    (lambda agent: agent[-1], {"0": AGENTS[:1], "1": AGENTS[1:]}),
])
def test_policies_are_assigned_to_agents(game, policies, expected):
    agent, _, _ = compose("ppo", game, {} if policies is None else {"policies": policies})
    for part in (agent.algo_factory, agent.actor_factory, agent.storage_factory):
        assert {policy: list(agents) for policy, agents in part.options.agents.items()} == expected
        assert list(part.options.policies) == list(expected)
    assert agent.train_envs_factory.agents == agent.test_envs_factory.agents


def test_options_reach_the_parts_of_every_policy_and_the_environments(game):
    agent, _, _ = compose("ppo", game, {
        "policies": "independent", "lr": 0.5, "hidden_sizes": (7,), "gae_lambda": 0.33, "num_envs": 3,
        "env_kwargs": {"num_symbols": 5}, "max_episode_steps": 4, "reward_transform": "clip"})
    for policy in AGENTS:
        assert agent.algo_factory.options.policies[policy].options.lr == 0.5
        assert agent.actor_factory.options.policies[policy].options.hidden_sizes == (7,)
        assert agent.storage_factory.options.policies[policy].options.gae_lambda == 0.33
    options = agent.train_envs_factory.options
    assert (options.vec_env_size, options.env_kwargs, options.max_episode_steps, options.reward_transform) == (
        3, {"num_symbols": 5}, 4, "clip")
    assert agent.train_envs_factory.action_space["agent_1"] == gym.spaces.Discrete(5)
    assert agent.test_envs_factory.options == dataclasses.replace(options, vec_env_size=8)


@pytest.mark.parametrize(("algorithm", "options"), [("ppo", TINY), ("dqn", TINY_REPLAY),
                                                    ("dqn", {**TINY_REPLAY, "prioritized": True})],
                         ids=["ppo", "dqn", "prioritized"])
def test_loaded_run_plays_like_the_trained_agent(game, tmp_path, algorithm, options):
    agent = train(algorithm, game, policies="independent", log_dir=tmp_path / "run", **options)
    assert agent.summary["updates"] >= 2
    means = agent.summary["policy_return_means"]
    assert list(means) == AGENTS
    assert sum(means.values()) == pytest.approx(agent.return_mean)
    assert {name.split("/")[0] for name in agent.acting_state} == set(AGENTS)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {policy: values["return_mean"] for policy, values in last["policies"].items()} == pytest.approx(means)
    (monitor,) = (tmp_path / "run").glob("*.csv")
    assert monitor.read_text().splitlines()[0] == "r,l,t,env,ended,r/agent_0,r/agent_1"
    loaded = load(tmp_path / "run")
    assert loaded.agent.algo_factory == agent.agent.algo_factory
    assert all(torch.equal(loaded.acting_state[name], agent.acting_state[name]) for name in agent.acting_state)
    played = loaded.evaluate(3)
    expected = agent.evaluate(3)
    assert (played.returns, played.lengths, played.policy_returns) == (expected.returns, expected.lengths,
                                                                       expected.policy_returns)
    assert {policy: len(returns) for policy, returns in played.policy_returns.items()} == dict.fromkeys(AGENTS, 3)


@pytest.mark.parametrize("algorithm", ["a2c", "impala", "appo"])
def test_other_algorithms_train_from_their_presets(game, algorithm):
    assert train(algorithm, game, target_steps=300, progress=False, seed=1).summary["updates"] >= 1


class Reach(MatchingGame):
    """A matching game with continuous actions, which have no effect."""

    def action_space(self, agent):
        return gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, actions):
        return super().step(dict.fromkeys(actions, 0))


@pytest.mark.parametrize("algorithm", ["ddpg", "td3", "sac"])
def test_continuous_actions(algorithm):
    assert train(algorithm, Reach, policies="shared", **TINY_REPLAY).summary["updates"] >= 1


def test_a_policy_of_all_agents_learns_from_all_agents():
    """Check that one policy that controls two agents learns from twice as many agent steps as env steps."""
    learner, _ = make_learner("ppo", MatchingGame, policies="shared", **TINY)
    with learner:
        learner.train()
        metrics = learner.get_metrics()["scheme"]
    assert metrics["agent_steps/shared"] == 2 * learner.ledger["collected"] == 128


def test_a_checkpoint_contains_all_policies(game, tmp_path):
    agent = train("ppo", game, policies="independent", **TINY)
    path = agent.save(tmp_path / "model.pt")
    other = train("ppo", game, policies="independent", **{**TINY, "target_steps": 0, "seed": 8, "checkpoint": path})
    assert all(torch.equal(other.acting_state[name], agent.acting_state[name]) for name in agent.acting_state)
    with pytest.raises(CheckpointError):
        train("ppo", game, policies="shared", **{**TINY, "target_steps": 0, "checkpoint": path})


@pytest.mark.parametrize("policies", [{"agent_0": "A", "agent_1": "B"}, lambda agent: "AB"[int(agent[-1])]],
                         ids=["mapping", "function"])
def test_the_assignment_of_policies_is_stored_with_the_run(game, tmp_path, policies):
    agent = train("ppo", game, policies=policies, log_dir=tmp_path, **{**TINY, "target_steps": 0})
    loaded = load(tmp_path)
    assert loaded.agent.train_envs_factory.agents == {"A": ("agent_0",), "B": ("agent_1",)}
    assert loaded.agent == agent.agent
    assert loaded.evaluate(2).returns == agent.evaluate(2).returns


@pytest.mark.parametrize("preset", ["a3c", "ddppo", "microbatch", "impala", "appo", "rapid", "apex"])
def test_architectures_train_several_policies(preset):
    algorithm = {"impala": "impala", "appo": "appo", "rapid": "appo", "apex": "dqn"}.get(preset, "ppo")
    options = TINY_REPLAY if preset == "apex" else {**TINY, "num_mini_batch": 1}
    if preset == "a3c":
        options = {**options, "updates_per_step": 4}
    elif preset == "microbatch":
        options = {**options, "train_batch_size": 64, "microbatch_size": 16}
    elif preset in ("impala", "appo"):
        options = {**options, "train_batch_size": 32}
    if algorithm == "impala":
        options = {name: value for name, value in options.items() if name not in ("num_epochs", "num_mini_batch")}
    agent = train(algorithm, MatchingGame, policies="independent", preset=preset, runtime="simulated", **options)
    assert agent.summary["updates"] >= 1
    assert set(agent.summary["policy_return_means"]) == set(AGENTS)


@pytest.mark.parametrize(("env", "options", "message"), [
    ("CartPole-v1", {"policies": "shared"}, "^policies must be left out for 'CartPole-v1'.*got 'shared'"),
    ("ALE/Pong-v5", {"policies": "independent"}, "^policies must be left out for 'ALE/Pong-v5'"),
    (gym.spec("CartPole-v1"), {"policies": "shared"}, "^policies must be left out for 'CartPole-v1'"),
    (CountingEnv, {"policies": "shared"}, "parallel API, got CountingEnv without possible_agents"),
    (MatchingGame, {}, r"got pytorchrl\.envs\.testing\.MatchingGame from Match.*; it has several.*policies='shared'"),
    (MatchingGame, {"policies": "together"}, "^policies must be 'shared', 'independent', a mapping"),
    (MatchingGame, {"policies": {"agent_0": "a"}}, "^policies must map each of"),
    (MatchingGame, {"policies": {"agent_5": "a"}}, "^policies must map the agents"),
    (MatchingGame, {"policies": "shared", "frame_stack": 2, "backend": "sync"},
     "several agents have no option backend, frame_stack"),
    (MatchingGame, {"policies": "shared", "target_kl": 0.1}, "target_kl"),
    ("mpe3.simple_v3", {}, r"mpe3\.simple_v3 cannot be imported.*pip install 'pettingzoo"),
    ("json", {}, "json has no parallel_env"),
])
def test_contradictions_are_refused_before_anything_starts(env, options, message):
    with pytest.raises(ConfigError, match=message):
        train("ppo", env, **{**TINY, **options})


def test_sequences_of_several_policies_are_refused():
    with pytest.raises(ConfigError, match="several policies supports ReplayBuffer and PERBuffer, got SequenceBuffer"):
        train("r2d2", MatchingGame, policies="shared", progress=False)


def test_videos_are_refused(tmp_path):
    agent = train("ppo", MatchingGame, policies="shared", **{**TINY, "target_steps": 0})
    assert isinstance(agent, pytorchrl.TrainedAgent)
    with pytest.raises(ConfigError, match="only single-agent environments can be recorded"):
        record_video(agent, tmp_path)
    agent.evaluate(1)
