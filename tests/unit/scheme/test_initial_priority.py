"""Tests of initial priorities, which collection workers compute as TD errors with the weights they acted with."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest
import torch

from pytorchrl import ASYNC, DQN, SAC, TD3, OffPolicyActor, PERBuffer, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.synthetic import SyntheticAlgorithm, synthetic_agent
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.transport.receive import receive

ALPHA, EPSILON, GAMMA, N_STEP = 0.7, 0.01, 0.9, 3


@pytest.fixture
def make_apex():
    """Return a function that makes simulated schemes, by default Ape-X with a small DQN."""
    schemes = []

    def make(algo=None, storage=None, constructor=Scheme.apex, **settings):
        envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
        algo = algo or DQN.create_factory(
            start_steps=0, mini_batch_size=8, lr=1e-2, gamma=GAMMA, target_update_interval=3, epsilon_per_worker=True)
        actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,))
        storage = storage or PERBuffer.create_factory(400, rollout_size=7, n_step=N_STEP, alpha=ALPHA, epsilon=EPSILON)
        schemes.append(constructor(algo, actor, storage, envs, **{
            "seed": 1, "runtime": "simulated", "max_weight_sync_delay": 10, "num_replay_workers": 2} | settings))
        return schemes[-1]
    yield make
    for scheme in schemes:
        scheme.stop()


@pytest.fixture
def added(monkeypatch):
    """Return a list of (rollout added to a shard, its priorities (T, E)), and a dict {version: sent weights}."""
    arrived, weights = [], {}
    add, set_weights = RWorker.add, CWorker.set_weights

    @functools.wraps(add)
    def watched_add(worker, rollout, version):
        state = add(worker, rollout, version)
        rollout = receive(rollout, time.monotonic)[0]
        num_steps, num_envs = np.asarray(rollout.data.reward).shape
        ring = worker._storage.ring
        rows = (ring.total - num_steps * num_envs + np.arange(num_steps * num_envs)) % ring.capacity
        arrived.append((rollout, worker._storage.priority_sums.get(rows).reshape(num_envs, num_steps).T))
        return state

    def watched_set(worker, given):
        weights[given.version] = given
        set_weights(worker, given)
    monkeypatch.setattr(RWorker, "add", watched_add)
    monkeypatch.setattr(CWorker, "set_weights", watched_set)
    return arrived, weights


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


def td_errors_by_hand(rollout, weights, algo):
    """Compute TD errors (T, E) of double Q-learning in a plain loop, with the two networks in `weights`."""
    algo.load_learning_state({name: torch.as_tensor(np.array(value)) for name, value in weights.learning.items()})
    algo.load_acting_state({name: torch.as_tensor(np.array(value)) for name, value in weights.state.items()})
    data = rollout.data
    obs, finals = np.asarray(data.obs["obs"]), np.asarray(data.final_obs["obs"])
    final_of = {(int(t), int(e)): finals[k] for k, (t, e) in enumerate(np.asarray(data.final_index))}
    ended = np.asarray(data.terminated) | np.asarray(data.truncated)
    num_steps, num_envs = np.asarray(data.reward).shape

    def scores(network, one):
        with torch.no_grad():
            return network({"obs": torch.as_tensor(np.array(one))[None]}, None, None)[0]
    errors = np.zeros((num_steps, num_envs))
    for t in range(num_steps):
        for e in range(num_envs):
            total, m = 0.0, 0
            while True:
                total += GAMMA**m * float(data.reward[t + m][e])
                m += 1
                if m == N_STEP or ended[t + m - 1][e] or t + m == num_steps:
                    break
            after = final_of.get((t + m - 1, e), obs[t + m, e])
            if not data.terminated[t + m - 1][e]:
                best = int(scores(algo.actor.q, after).argmax())
                total += GAMMA**m * float(scores(algo.targets["q"], after)[best])
            errors[t, e] = abs(float(scores(algo.actor.q, obs[t, e])[int(data.action[t][e])]) - total)
    return errors


def test_priorities_in_shards_are_td_errors_of_the_acting_weights(make_apex, added):
    scheme = make_apex()
    assert scheme.settings["initial_priority"] == "worker"
    make_updates(scheme, 20)
    arrived, weights = added
    algo = DQN.create_factory(start_steps=0)(actor=scheme.agent.actor_factory(device="cpu", seed=0), device="cpu",
                                             seed=0)
    assert len({rollout.header.weights_version for rollout, _ in arrived}) > 3
    target_differs = 0
    for rollout, leaves in arrived:
        errors = td_errors_by_hand(rollout, weights[rollout.header.weights_version], algo)
        np.testing.assert_allclose(leaves, (errors + EPSILON) ** ALPHA, rtol=1e-4)
        target_differs += not torch.equal(algo.groups["q"].data, algo._target_vectors["q"].data)
    assert target_differs


def test_max_uses_the_largest_priority_seen(make_apex, added):
    scheme = make_apex(initial_priority="max")
    make_updates(scheme, 20)
    arrived, weights = added
    for rollout, leaves in arrived:
        assert np.ptp(leaves) == 0.0
        assert leaves[0, 0] >= 1.0
        assert "error" not in rollout.data.other
    assert not any(found.learning for found in weights.values())


def test_sampling_follows_initial_priorities(make_apex, monkeypatch):
    """Check that nearly all samples have the large initial error, which is 1000 times that of the other transitions."""
    def add_errors(storage, rollout):
        errors = torch.full(rollout.reward.shape, 1e-3)
        errors[2] = 1.0
        rollout.other["error"] = errors
    drawn = []
    sample = RWorker.sample

    @functools.wraps(sample)
    def watched(worker, *args):
        answer = sample(worker, *args)
        if answer.batch is not None:
            drawn.extend((np.asarray(answer.batch.ids) % 7).tolist())
        return answer
    monkeypatch.setattr(PERBuffer, "add_errors", add_errors)
    monkeypatch.setattr(PERBuffer, "update_priorities", lambda *args: None)
    monkeypatch.setattr(RWorker, "sample", watched)

    def share_of_third_steps(**settings):
        drawn.clear()
        make_updates(make_apex(storage=PERBuffer.create_factory(
            1400, rollout_size=7, alpha=1.0, epsilon=1e-6), **settings), 20)
        return np.mean(np.array(drawn) == 2)
    assert share_of_third_steps() > 0.98
    assert share_of_third_steps(initial_priority="max") < 0.3


@pytest.mark.parametrize("algo", [TD3, SAC])
def test_critics_are_sent_with_weights_if_td_errors_need_them(algo):
    """Check that collectors, which act with the policy alone, also receive the critics to compute TD errors."""
    envs = VecEnv.create_factory("Pendulum-v1", None, 2)
    policy = "deterministic" if algo is TD3 else "stochastic"
    actor = OffPolicyActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(8,), policy=policy)
    scheme = Scheme.apex(
        algo.create_factory(start_steps=0, mini_batch_size=8), actor, PERBuffer.create_factory(400, rollout_size=7),
        envs,
        seed=1, runtime="simulated", max_weight_sync_delay=10)
    make_updates(scheme, 12)
    learner = scheme.update_worker.local_worker
    learning = learner.algo.learning_state()
    assert "q" in learning
    collectors = [handle.native.worker for handle in learner.remote_workers]
    first = scheme.agent.algo_factory(actor=scheme.agent.actor_factory(device="cpu", seed=0), device="cpu",
                                      seed=0).learning_state()
    moved = [not torch.equal(worker.algo.learning_state()["q"], first["q"]) for worker in collectors if worker.version]
    assert moved
    assert all(moved)
    scheme.stop()


def test_compressed_rollouts_include_errors(make_apex, added):
    scheme = make_apex(compress_data_to_send=True, num_replay_workers=1)
    make_updates(scheme, 3)
    assert all(np.ptp(leaves) > 0.0 for _, leaves in added[0])


class WithoutErrors(SyntheticAlgorithm):
    """An algorithm that learns from transitions, but cannot compute their TD errors."""

    actor_class = QActor


@pytest.mark.parametrize(("settings", "text"), [
    ({"initial_priority": "first"}, "initial_priority must be one of .'max', 'worker'., got 'first'"),
    ({"storage": ReplayBuffer.create_factory(400, rollout_size=7), "initial_priority": "worker"},
     "initial_priority='worker' needs a storage with priorities, such as PERBuffer, got ReplayBuffer"),
    ({"prioritized": False, "initial_priority": "worker"},
     "needs a storage with priorities, such as PERBuffer, got ReplayBuffer"),
    ({"algo": WithoutErrors.create_factory(learns_from=DataKind.TRANSITIONS)},
     r"PERBuffer computes priorities from TD errors, but WithoutErrors has no td_errors\(\); storages for "
     r"WithoutErrors: .*ReplayBuffer"),
    ({"algo": WithoutErrors.create_factory(learns_from=DataKind.TRANSITIONS), "prioritized": True,
      "initial_priority": "max"},
     "PERBuffer computes priorities from TD errors, but WithoutErrors has no td_errors"),
])
def test_priorities_that_nothing_would_set_are_refused(make_apex, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_apex(**settings)


def test_initial_priority_requires_replay_workers():
    algo, actor, storage, envs = synthetic_agent(4, capacity=100)
    with pytest.raises(ConfigError, match=r"initial_priority='worker': only .*with num_replay_workers; change"):
        Scheme(algo, actor, storage, envs, initial_priority="worker")


def test_the_default_outside_apex_is_max(make_apex):
    assert make_apex(constructor=Scheme, num_col_workers=2, col_communication=ASYNC, grad_communication=ASYNC
                     ).settings["initial_priority"] == "max"
    assert make_apex(storage=ReplayBuffer.create_factory(400, rollout_size=7)).settings["initial_priority"] == "max"
    assert make_apex(prioritized=False).settings["initial_priority"] == "max"
