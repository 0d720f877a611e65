"""Check the policy lag of data sampled from shards against a list of all rollouts, samples and versions."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from pytorchrl import (
    ASYNC, DQN, R2D2, SYNC, MultiAgentVecEnv, PERBuffer, QActor, ReplayBuffer, Scheme, SequenceBuffer, VecEnv,
    multi_agent)
from pytorchrl.agent.multi.data import MultiBatch, MultiRollout
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import ChangingAgents, CountingEnv
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.rollouts import RolloutBatch
from pytorchrl.scheme.replay.shards import Shards

ENVS = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
SMALL = {"start_steps": 0, "mini_batch_size": 12}
SETTINGS = {"num_col_workers": 2, "num_replay_workers": 2, "col_communication": ASYNC, "grad_communication": SYNC,
            "runtime": "simulated",
            "seed": 1, "costs": {"grad": 0.005}}


def single(storage):
    return (DQN.create_factory(**SMALL),
            QActor.create_factory(ENVS.observation_space, ENVS.action_space, hidden_sizes=(8,)), storage, ENVS)


def several():
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2,
                                           policy_of={"agent_0": "early", "agent_1": "shared", "agent_2": "shared"})
    actors = functools.partial(QActor.create_factory, hidden_sizes=(8,))
    return (*multi_agent(envs, DQN.create_factory(**SMALL), actors, ReplayBuffer.create_factory(120, rollout_size=6)),
            envs)


def sequences():
    actor = QActor.create_factory(ENVS.observation_space, ENVS.action_space, hidden_sizes=(4,), recurrent_net="gru",
                                  recurrent_size=4)
    return (R2D2.create_factory(**SMALL), actor, SequenceBuffer.create_factory(
        200, rollout_size=4, length=4, burn_in=2, period=2, n_step=1), ENVS)


AGENTS = {
    "transitions": lambda: (single(ReplayBuffer.create_factory(60, rollout_size=7)), {}),
    "priorities": lambda: (single(PERBuffer.create_factory(60, rollout_size=7)), {"initial_priority": "worker"}),
    "sequences": lambda: (sequences(), {}),
    "several": lambda: (several(), {}),
    "rollouts": lambda: (synthetic_agent(4, num_epochs=2), {"size": 60, "train_batch_size": 10}),
}


def numbered(rollout, number):
    """Return the rollout with `number` as the reward of every step."""
    def change(part):
        return dataclasses.replace(part, reward=np.full_like(part.reward, number))
    data = rollout.data
    if isinstance(data, MultiRollout):
        data = dataclasses.replace(data, parts={policy: change(part) for policy, part in data.parts.items()})
    else:
        data = change(data)
    return dataclasses.replace(rollout, data=data)


def numbers(batch):
    """Return, for each item of the batch, the number of its rollout.

    An item is a rollout, a transition or a sequence. For a sequence, the first step after the burn-in determines the
    number.
    """
    if isinstance(batch, RolloutBatch):
        return [int(data.reward[0, 0]) for data in batch.rollouts]
    if isinstance(batch, MultiBatch):
        return [number for part in batch.parts.values() for number in numbers(part)]
    return [round(x) for x in (batch.ret[0] if batch.ret.ndim == 2 else batch.ret).tolist()]


@pytest.mark.parametrize("kind", AGENTS)
def test_lag_is_that_of_the_rollouts_of_each_sample(monkeypatch, kind):
    made, batches, draws = [], [], []
    add, get, add_draw = RWorker._add, Shards.get, WorkerStats.add_draw

    def add_numbered(self, rollout, version):
        made.append((rollout.header.weights_version, version))
        add(self, numbered(rollout, len(made) - 1), version)

    def get_noted(self, *args):
        batches.append(get(self, *args))
        return batches[-1]

    def draw_noted(self, headers, versions, version):
        draws.append((numbers(batches[-1]), version))
        assert versions.tolist() == [list(made[number]) for number in draws[-1][0]]
        add_draw(self, headers, versions, version)

    for cls, name, method in ((RWorker, "_add", add_numbered), (Shards, "get", get_noted),
                              (WorkerStats, "add_draw", draw_noted)):
        monkeypatch.setattr(cls, name, method)
    agent, settings = AGENTS[kind]()
    scheme = Scheme(*agent, **SETTINGS, **settings)
    try:
        while scheme.version < 30 or sum(len(draw) for draw, _ in draws) <= 80:
            scheme.step()
        metrics = scheme.metrics()
    finally:
        scheme.stop()
    drawn = [(version, *made[number]) for draw, version in draws for number in draw]
    lags = [version - collected for version, collected, _ in drawn]
    assert len(lags) > 80
    assert len({sent for _, _, sent in drawn}) > 5
    assert metrics["policy_lag"]["mean"] == pytest.approx(np.mean(lags))
    assert metrics["policy_lag"]["max"] == max(lags) > 3
    assert metrics["policy_lag"]["p90"] == np.quantile(lags, 0.9, method="inverted_cdf")
    assert metrics["policy_lag_collect_mean"] == pytest.approx(np.mean([sent - collected for _, collected,
                                                                        sent in drawn]))
    assert metrics["policy_lag_replay_mean"] == pytest.approx(np.mean([version - sent for version, _,
                                                                       sent in drawn])) != 0
    assert metrics["policy_lag_queue_mean"] == 0.0


def test_without_shards_no_lag_is_spent_in_replay(make_replay_scheme):
    scheme = make_replay_scheme({"size": 4}, num_col_workers=2, col_communication=ASYNC)
    while scheme.version < 20:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["policy_lag_replay_mean"] == 0.0
    assert metrics["policy_lag"][
        "mean"] == pytest.approx(metrics["policy_lag_collect_mean"] + metrics["policy_lag_queue_mean"]) != 0
