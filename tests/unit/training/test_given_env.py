"""Test training on an environment that is given as an object."""

from __future__ import annotations

import re

import gymnasium as gym
import pytest

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.training.composition import compose
from pytorchrl.training.training import load, train

TINY = {"num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "target_steps": 32, "progress": False, "seed": 3}
REMEDY = "give a function that makes one environment, such as lambda: MyEnv()"


class Closable(CountingEnv):
    closed = False

    def close(self):
        self.closed = True


def test_an_environment_is_trained_on_played_in_and_left_open(tmp_path):
    env = Closable()
    agent = train("ppo", env, log_dir=f"{tmp_path}/", **TINY)
    assert agent.summary["env_steps"] == 32
    assert agent.log_dir.name == "ppo-Closable-1"
    assert len(agent.evaluate(3).returns) == 3
    assert agent.train(32).summary["env_steps"] == 64
    assert len(agent.evaluate(3).returns) == 3
    assert not env.closed
    with pytest.raises(CheckpointError, match="cannot be built"):
        load(agent.log_dir)


def test_an_environment_trains_as_a_function_that_makes_one():
    one = train("ppo", gym.make("CartPole-v1"), **TINY)
    other = train("ppo", lambda: gym.make("CartPole-v1"), num_envs=1, **TINY)
    assert one.acting_state["all"].equal(other.acting_state["all"])
    assert one.evaluate(1).returns == other.evaluate(1).returns
    agent = train("dqn", gym.make("CartPole-v1"), target_steps=64, start_steps=32, progress=False)
    assert agent.summary["env_steps"] == 64


def test_the_preset_has_one_environment_and_as_many_steps():
    agent, _, _ = compose("ppo", CountingEnv(), {})
    assert (agent.train_envs_factory.num_envs, agent.storage_factory.options.size) == (1, 8 * 128)
    agent, _, _ = compose("ppo", CountingEnv(), {"num_steps": 50})
    assert agent.storage_factory.options.size == 50


@pytest.mark.parametrize(("options", "message"), [
    ({"num_envs": 2}, "num_envs must be 1 for an environment that is given as an object, got 2"),
    ({"backend": "async"}, "backend must be 'auto' or 'sync' for an environment that is given as an object, got"),
    ({"num_col_workers": 2}, "several workers or processes cannot share an environment"),
    ({"num_grad_workers": 2}, "several workers or processes cannot share an environment"),
    ({"col_execution": "Parallel", "runtime": "processes"}, "several workers or processes cannot share an environment"),
    ({"eval_every": 16}, "eval_every needs a second environment"),
])
def test_several_uses_of_one_environment_are_refused_with_the_remedy(options, message):
    with pytest.raises(ConfigError, match=f"{re.escape(message)}.*{re.escape(REMEDY)}"):
        train("ppo", CountingEnv(), **{**TINY, **options})


def test_a_scheme_accepts_an_environment_but_not_for_training_and_tests():
    envs = VecEnv.create_factory(CountingEnv())
    parts = (PPO.create_factory(num_mini_batch=1), OnPolicyActor.create_factory(
        envs.observation_space, envs.action_space), GAEBuffer.create_factory(8), envs)
    scheme = Scheme(*parts, seed=1)
    scheme.step()
    scheme.stop()
    with pytest.raises(ConfigError, match="training and evaluation cannot share an environment"):
        Scheme(*parts, envs)
    Scheme(*parts, VecEnv.create_factory(CountingEnv()))
