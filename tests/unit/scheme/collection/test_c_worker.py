"""Tests of the weights that a collection worker returns and receives, and of the parameters sent with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytorchrl import DQN, PERBuffer, QActor, Scheme, VecEnv, train
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import NonFiniteDataError
from pytorchrl.scheme.collection.c_worker import CWorker, Role
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.transport.encoder import Traffic


@pytest.fixture
def make():
    """Return a function that makes collection workers without environments."""
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    recipe = CWorkerSet.create_factory(
        1, DQN.create_factory(lr=1e-3), QActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(4,)),
        PERBuffer.create_factory(100, rollout_size=5), envs)
    return lambda index: CWorker(index, recipe, role=Role.SERVER)


def test_a_snapshot_is_reused_until_something_changes(make):
    worker = make(0)
    assert worker.get_weights() is worker.get_weights()


@pytest.mark.parametrize(("part", "name", "field"),
                         [("algo", "lr", "parameters"), ("storage", "beta", "storage_parameters")])
def test_a_parameter_that_changes_within_a_version_is_in_the_next_snapshot(make, part, name, field):
    worker = make(0)
    before = worker.get_weights()
    getattr(worker, part).parameters[name] = 0.125  # schedules change parameters like this
    after = worker.get_weights()
    assert getattr(before, field)[name] != 0.125
    assert getattr(after, field)[name] == 0.125
    assert (after.version, after.state) == (before.version, before.state)
    assert worker.get_weights() is after


def test_parameters_sent_with_weights_are_adopted(make):
    server, worker = make(0), make(1)
    server.algo.parameters["lr"], server.storage.parameters["beta"] = 0.25, 0.75
    worker.set_weights(server.get_weights())
    assert (worker.algo.parameters["lr"], worker.storage.parameters["beta"]) == (0.25, 0.75)
    assert worker.algo.parameters == server.algo.parameters


def test_parameters_that_are_not_sent_stay_unchanged(make):
    worker = make(1)
    worker.storage.parameters["beta"] = 0.75
    worker.set_weights(replace(worker.get_weights(), storage_parameters={}))
    assert worker.storage.parameters["beta"] == 0.75
    before = dict(worker.algo.parameters)
    worker.set_weights(worker.get_weights().state)  # an acting state, without the algorithm's `parameters`
    assert worker.algo.parameters == before


@pytest.fixture
def collector():
    """Return a collection worker whose rollouts have six steps in each of two environments."""
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 4}, 2)
    recipe = CWorkerSet.create_factory(
        1, DQN.create_factory(), QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
        PERBuffer.create_factory(100, rollout_size=6), envs)
    worker = CWorker(1, recipe)
    yield worker
    worker.close()


def lengths(*rollouts):
    return [(rollout.header.num_steps, rollout.header.preempted) for rollout in rollouts]


def test_only_the_preempted_rollout_ends_early_and_it_has_at_least_one_step(collector):
    whole = (6, False)
    collector.preempt_running(2)  # no rollout has been started, so this affects none
    assert lengths(collector.collect()) == [whole]
    collector.preempt_next(0)
    assert lengths(collector.collect(), collector.collect()) == [(1, True), whole]
    collector.preempt_next(3)
    assert lengths(collector.collect(), collector.collect()) == [(3, True), whole]
    collector.preempt_running(2)  # too late for this rollout, and not for the next one
    assert lengths(collector.collect()) == [whole]
    collector.preempt(8, 2)  # the signal arrives before the rollout begins
    assert lengths(collector.collect(), collector.collect(), collector.collect()) == [whole, (2, True), whole]


def test_a_rollout_of_a_given_length_is_not_preempted(collector):
    collector.preempt_next(2)
    assert lengths(collector.collect(num_steps=4), collector.collect()) == [(4, False), (6, False)]


def test_traffic_of_weights_is_reported_once(collector, make, monkeypatch):
    """Check the sum over several messages that arrive before the next rollout, and that it is not reported again."""
    weights = make(0).get_weights()
    monkeypatch.setattr("pytorchrl.scheme.collection.c_worker.receive", lambda message, now: (
        message, Traffic(decodes=1, decode_s=0.5)))
    collector.set_weights(weights)
    rollouts = [collector.collect(weights), collector.collect(), collector.collect(weights)]
    assert [rollout.header.traffic["weights"] for rollout in rollouts] == [
        Traffic(decodes=2, decode_s=1.0), Traffic(), Traffic(decodes=1, decode_s=0.5)]


def test_a_worker_adopts_the_version_of_its_weights(make):
    server, worker = make(0), make(1)
    server.version = 7
    worker.set_weights(server.get_weights())
    assert worker.version == 7
    worker.set_weights(server.get_weights().state)  # a state without a version
    assert worker.version == 7


def test_collect_can_be_called_directly(make_scheme):
    """Check that `CWorker.collect` can be called directly, as documented."""
    scheme = make_scheme(num_col_workers=2)
    handle = scheme.update_worker.local_worker.remote_workers[0]
    rollout = handle.runtime.get(handle.submit(CWorker.collect), 10.0)
    assert rollout.header.num_env_steps == 16
    assert rollout.header.sequence == 1


class Ends(CountingEnv):
    """Environment of three steps; the last observation of the second episode of the second one that is built is NaN."""

    built = 0

    def __init__(self):
        super().__init__(3)
        type(self).built += 1
        self.is_bad = type(self).built == 2

    def step(self, action):
        obs, reward, terminated, *rest = super().step(action)
        return np.full_like(obs, np.nan) if self.is_bad and terminated and obs[1] else obs, reward, terminated, *rest


class Game(MatchingGame):
    """Game in which the second agent of the second one that is built observes NaN after a step."""

    built = 0

    def __init__(self):
        super().__init__()
        type(self).built += 1
        self.is_bad = type(self).built == 2

    def step(self, actions):
        obs, *rest = super().step(actions)
        if self.is_bad:
            obs["agent_1"][:] = np.nan
        return obs, *rest


@pytest.mark.parametrize(("env", "options", "where"), [
    (Ends, {}, "last observations of episodes, env 1: obs is nan"),
    (Game, {"policies": "shared"}, "policy 'shared', env 1, agent 'agent_1': obs is nan")])
def test_the_environment_and_the_agent_of_a_value_that_is_not_finite_are_named(env, options, where):
    """Check rows that are no environments: ended episodes, and agents that share a policy, also in evaluations."""
    agent = train("ppo", MatchingGame if options else CountingEnv, num_envs=2, num_steps=8, target_steps=16,
                  num_epochs=1, num_mini_batch=1, hidden_sizes=(4,), progress=False, **options)
    factory = agent.agent.train_envs_factory.with_options(env_fn=env)
    scheme = Scheme(**{**agent.agent.as_dict(), "train_envs_factory": factory}, seed=1)
    env.built = 0
    with pytest.raises(NonFiniteDataError, match=where):
        scheme.step()
    scheme.stop()
    if options:
        env.built = 0
        with pytest.raises(NonFiniteDataError, match=f"evaluation, {where}"):
            agent.evaluate(2, envs=factory)
