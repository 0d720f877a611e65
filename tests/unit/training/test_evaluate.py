"""Test the environments that `TrainedAgent.evaluate` builds, and evaluations of episodes that do not end."""

from __future__ import annotations

import gc
import logging

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import ConfigError, EnvError, NonFiniteDataError
from pytorchrl.training.training import train

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "target_steps": 32, "progress": False,
        "seed": 3}


class Numbered(CountingEnv):
    """An environment that counts how many of its class were built and closed."""

    built = closed = 0

    def __init__(self):
        super().__init__()
        type(self).built += 1

    def close(self):
        type(self).closed += 1
        super().close()


def test_evaluate_builds_no_more_environments_than_episodes_and_keeps_them():
    agent = train("ppo", Numbered, **TINY)
    for episodes, new in ((1, 1), (1, 0), (1, 0), (5, 5), (8, 8), (20, 0), (20, 0), (1, 1)):
        before = Numbered.built
        assert len(agent.evaluate(episodes).returns) == episodes
        assert Numbered.built - before == new, episodes
    del agent
    gc.collect()
    assert Numbered.built == Numbered.closed


def test_num_eval_envs_limits_the_environments_of_an_evaluation():
    agent = train("ppo", Numbered, num_eval_envs=2, **TINY)
    before = Numbered.built
    assert len(agent.evaluate(7).returns) == 7
    assert Numbered.built - before == 2
    with pytest.raises(ConfigError, match="num_eval_envs must be a whole number >= 1, got 0"):
        train("ppo", Numbered, num_eval_envs=0, **TINY)


@pytest.mark.parametrize("options", [{}, {"num_envs": 4}, {"backend": "async"}])
def test_kept_environments_play_the_episodes_of_new_ones(options):
    agent = train("ppo", "CartPole-v1", **{**TINY, **options})
    first = [agent.evaluate(3, deterministic=False, seed=seed) for seed in (5, 6)]
    assert first[0].returns != first[1].returns
    assert [agent.evaluate(3, deterministic=False, seed=seed) for seed in (5, 6)] == first
    agent.evaluate(2)  # builds others
    assert agent.evaluate(3, deterministic=False, seed=5) == first[0]


class Endless(gym.Env):
    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}


def test_an_evaluation_of_an_endless_episode_warns_and_then_fails(monkeypatch, caplog):
    monkeypatch.setattr("pytorchrl.scheme.supervision.evaluation._LONG_STEPS", 50)
    monkeypatch.setattr("pytorchrl.scheme.supervision.evaluation._MOST_STEPS", 200)
    agent = train("ppo", Endless, **TINY)
    with caplog.at_level(logging.WARNING), pytest.raises(EnvError, match=r"200 steps; .* give max_episode_steps"):
        agent.evaluate(2)
    (warning,) = caplog.messages
    assert "which has taken 50 steps" in warning
    assert "give max_episode_steps" in warning
    caplog.clear()
    agent = train("ppo", Endless, max_episode_steps=300, **TINY)
    assert agent.evaluate(2).lengths == (300, 300)
    agent = train("ppo", CountingEnv, **TINY)  # whose many episodes together are longer
    assert len(agent.evaluate(100).returns) == 100
    assert not caplog.messages


class WrongInTests(CountingEnv):
    """An environment that returns a wrong number as an observation or a reward, but not in training."""

    def __init__(self, at=None, number="nan"):
        super().__init__(episode_length=5)
        self.at, self.number, self.steps = at, float(number), 0

    def reset(self, **options):
        obs, info = super().reset(**options)
        return (np.full_like(obs, self.number) if self.at == "reset" else obs), info

    def step(self, action):
        obs, reward, *result = super().step(action)
        self.steps += 1
        is_wrong = self.steps == 3
        return (np.full_like(obs, self.number) if is_wrong and self.at == "step" else obs,
                self.number if is_wrong and self.at == "reward" else reward, *result)


class WrongGame(MatchingGame):
    """A game with several agents in which an observation is wrong, but not in training."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at

    def step(self, actions):
        obs, *result = super().step(actions)
        return ({agent: own * np.float32(np.nan if self.at else 1) for agent, own in obs.items()}, *result)


@pytest.mark.parametrize(("env", "kwargs", "message"), [
    (WrongInTests, {"at": "reset"}, r"evaluation, env 0: obs is nan at \(0, 0\)"),
    (WrongInTests, {"at": "step", "number": "inf"}, r"evaluation, env 0: obs is inf at"),
    (WrongInTests, {"at": "reward"}, r"evaluation, env 0: the return of an episode is nan"),
    (WrongGame, {"at": "step"}, r"evaluation, policy 'shared', env 0, agent 'agent_0': obs is nan at"),
])
def test_an_evaluation_refuses_numbers_that_are_not_finite(env, kwargs, message):
    options = {"policies": "shared"} if env is WrongGame else {}
    agent = train("ppo", env, test_env_kwargs=kwargs, **options, **TINY)
    with pytest.raises(NonFiniteDataError, match=message):
        agent.evaluate(2)
    with pytest.raises(NonFiniteDataError, match=message):  # the environments of a failed evaluation are not used again
        agent.evaluate(2)
