"""Tests of several policies in every scheme: counts are in env steps, and gradients are averaged for each policy."""

from __future__ import annotations

import dataclasses
import functools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import (
    ASYNC, DQN, IMPALA, PPO, SYNC, GAEBuffer, Learner, MultiAgentVecEnv, OnPolicyActor, PERBuffer, QActor, Scheme,
    VecEnv, VTraceBuffer, multi_agent,
)
from pytorchrl.agent.multi.data import MultiBatch
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.envs.testing import ChangingAgents, CountingEnv, MatchingGame
from pytorchrl.errors import ConfigError
from pytorchrl.learner.reporting import Progress, progress_text
from pytorchrl.scheme.gradients.microbatch import GradAccumulator
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.transport.messages import Gradients
from pytorchrl.scheme.updates.averaging import mean_gradients, mean_info

POLICY_OF = {"agent_0": "early", "agent_1": "shared", "agent_2": "shared"}
SMALL = functools.partial(OnPolicyActor.create_factory, hidden_sizes=(8,))


def ppo(**options):
    return PPO.create_factory(**{"num_epochs": 2, "num_mini_batch": 2, **options})


def dqn(**options):
    return DQN.create_factory(**{"start_steps": 20, "mini_batch_size": 8, **options})


@pytest.fixture
def make_multi(stopped):
    """Return a function that makes simulated schemes of several policies; all are stopped after the test."""
    def make(algo=None, storage=None, *, actor=None, env_fn=ChangingAgents, policy_of=POLICY_OF, num_envs=2,
             preset=Scheme, test=False, env_kwargs=None, **settings):
        envs = MultiAgentVecEnv.create_factory(env_fn, env_kwargs, num_envs, policy_of=policy_of)
        algo = algo or ppo()
        is_replay = getattr(algo, "cls", None) is DQN
        actor = actor or (functools.partial(QActor.create_factory, hidden_sizes=(8,)) if is_replay else SMALL)
        default = PERBuffer.create_factory(60, rollout_size=6) if is_replay else GAEBuffer.create_factory(6)
        return stopped(preset(*multi_agent(envs, algo, actor, storage or default), envs, envs if test else None,
                              **{"runtime": "simulated", "seed": 1, **settings}))
    return make


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


# Counting

@pytest.mark.parametrize("algo", [ppo(), dqn()], ids=["ppo", "dqn"])
def test_env_steps_are_accounted_for_in_every_pattern(make_multi, check_ledger, some_pattern, algo):
    scheme = make_multi(algo, **some_pattern)
    make_updates(scheme, 6)
    check_ledger(scheme)
    metrics = scheme.metrics()
    # A rollout has two episodes of 6 env steps. Per episode, policy `early` takes 6 agent steps, and `shared` takes 7.
    assert metrics["agent_steps/early"] == 12 * metrics["rollouts"] > 0
    assert metrics["agent_steps/shared"] == 14 * metrics["rollouts"]
    final = scheme.stop()
    assert check_ledger(scheme) == final
    assert final["in_flight"] == final["queued"] == 0
    if algo.cls is PPO:
        assert final["collected"] == final["consumed_unique"] + final["dropped"]["shutdown"]
        assert final["consumed_unique"] > 0
        assert final["consumed"] >= 1.5 * final["consumed_unique"]
    else:
        assert final["resident"] > 0
        batches = 2 if some_pattern["num_grad_workers"] == 2 and some_pattern["grad_communication"] is SYNC else 1
        assert final["consumed"] == 8 * batches * scheme.version  # 8 transitions of one policy per batch


def test_statistics_and_episodes_are_per_policy(make_multi):
    scheme = make_multi()
    info = scheme.step()
    assert {name.rpartition("/")[2] for name in info} == {"early", "shared"}
    assert {"loss/early", "lr/shared", "grad_norm/early"} <= set(info)
    assert [episode.policy_returns for episode in scheme.episodes()] == [{"early": 21.0, "shared": (306 + 818) / 2}] * 2


def test_a_batch_that_counts_for_no_env_step_is_used(make_multi, check_ledger):
    """Check that a minibatch that counts as 0 env steps is used. A rollout has 8 agent steps, but only 6 env steps."""
    scheme = make_multi(ppo(num_epochs=1, num_mini_batch=6), num_envs=1, policy_of="independent",
                        env_kwargs={"lives": ((0, 6), (0, 2))})
    make_updates(scheme, 12)
    metrics = scheme.metrics()
    assert (metrics["grads_applied"], metrics["grads_empty"], metrics["rollouts"]) == (12, 0, 2)
    assert check_ledger(scheme)["consumed"] == 12


def test_lossless_compression_does_not_change_a_run(make_multi):
    pytest.importorskip("lz4")
    states = []
    for compress in (False, True):
        scheme = make_multi(num_col_workers=2, num_grad_workers=2, compress_data_to_send=compress,
                            compress_grads_to_send=compress)
        make_updates(scheme, 4)
        states.append(scheme.acting_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "col_communication": ASYNC}, {"num_grad_workers": 2, "grad_communication": ASYNC}])
def test_a_recorded_run_is_replayed(make_multi, tmp_path, settings):
    path = str(tmp_path / "run.record")
    scheme = make_multi(record=path, runtime="threads", **settings)
    make_updates(scheme, 5)
    scheme.stop()
    again = make_multi(replay=path, runtime="simulated", **settings)
    while not again.replay_is_over:
        again.step()
    assert again.version == scheme.version


# N workers on slices of a batch make the same update as one worker on the whole batch

SEED, NUM_ENVS = 1, 6


class PreparedGame:
    """A game that does not depend on the actions, only on its number. Games 3 to 5 have no agent `b`."""

    possible_agents = ("a", "b")

    def __init__(self, numbers):
        self._numbers, self._number = numbers, 0

    def observation_space(self, agent):
        return gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._number = self._numbers.get(seed, 0)
            self._series = np.random.default_rng(self._number)
        self.agents = ["a"] if self._number >= 3 else ["a", "b"]
        return self._observe(), {}

    def step(self, actions):
        acting, obs = self.agents, self._observe()
        rewards = {agent: float(self._series.normal() * 3 + 1) for agent in acting}
        terminated = {agent: bool(self._series.random() < 0.1) for agent in acting}
        truncated = {agent: bool(self._series.random() < 0.05) for agent in acting}
        self.agents = [agent for agent in acting if not terminated[agent] and not truncated[agent]]
        return obs, rewards, terminated, truncated, {}

    def close(self):
        pass

    def _observe(self):
        return {agent: np.append(self._series.normal(size=3), self._series.integers(2)).astype(np.float32)
                for agent in self.agents}


class Obedient(PPO):
    """An algorithm that takes the action in the last entry of the observation."""

    def acting_step(self, obs, rhs, done, deterministic=False, mask=None):
        acting = super().acting_step(obs, rhs, done, deterministic, mask)
        action = (obs["obs"][:, -1] > 0.5).astype(np.int64)
        return acting._replace(action=action, clipped_action=action)


def train(make_multi, num_workers, normalization="none", **settings):
    """Return the parameters after five updates by workers that share six environments."""
    each, numbers = NUM_ENVS // num_workers, {}
    for worker in range(num_workers):
        for env in range(each):
            place = 0 if num_workers == 1 else worker + 1
            numbers[derive_seed(SEED, Stream.ENV, place, 0, 0, env) >> 32] = worker * each + env
    # Use plain SGD, because Adam or gradient clipping would hide a gradient that is wrong by a constant factor.
    algo = Obedient.create_factory(num_epochs=3, num_mini_batch=1, lr=1e-3, optimizer="sgd", max_grad_norm=None,
                                   advantage_normalization=normalization)
    scheme = make_multi(algo, GAEBuffer.create_factory(12), env_fn=PreparedGame, policy_of=lambda agent: agent,
                        env_kwargs={"numbers": numbers}, num_envs=each, seed=SEED, num_grad_workers=num_workers,
                        **settings)
    make_updates(scheme, 5)
    return scheme.acting_state()


def distance(one, other):
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


@pytest.mark.parametrize("settings", [{}, {"distribute_gradients": True}], ids=["central", "decentralized"])
@pytest.mark.parametrize("normalization", ["none", "batch"])
def test_workers_on_slices_make_the_update_of_one_worker(make_multi, normalization, settings):
    """Check the average of two workers if the second worker has no data of agent `b`."""
    whole = train(make_multi, 1, normalization)
    assert distance(train(make_multi, 2, normalization, **settings), whole) < 1e-5


def test_averaging_with_total_sample_counts_would_differ(make_multi, monkeypatch):
    whole = train(make_multi, 1)
    monkeypatch.setattr(Gradients, "weights", lambda self, num_vectors: [self.num_samples] * num_vectors)
    assert distance(train(make_multi, 3), whole) > 1e-5


def test_microbatches_make_the_update_of_the_whole_batch(make_multi):
    whole = train(make_multi, 1)
    assert distance(train(make_multi, 1, microbatch_size=7), whole) < 1e-5
    assert distance(train(make_multi, 1, microbatch_size=7), whole) > 0
    with pytest.raises(ConfigError, match="correction='m2po' compares all steps of a minibatch, which microbatch_size"):
        make_multi(PPO.create_factory(correction="m2po"), microbatch_size=7)


def gradients(vectors, samples, info=None):
    return Gradients(vectors=vectors, num_samples=10, num_new_samples=0, weights_version=0, worker=1, sequence=1,
                     info=info or {}, ledger=LedgerSnapshot(), samples=samples)


def test_means_cover_only_workers_with_data_of_the_policy():
    one = gradients([torch.tensor([1.0]), None], {"a": 3, "b": 0}, {"loss/a": 1.0})
    two = gradients([torch.tensor([5.0]), torch.tensor([8.0, 4.0])], {"a": 1, "b": 7}, {"loss/a": 5.0, "loss/b": 6.0})
    assert [vector.tolist() for vector in mean_gradients([one, two])] == [[2.0], [8.0, 4.0]]
    assert mean_info([one, two]) == {"loss/a": 2.0, "loss/b": 6.0}
    assert mean_gradients([one, one])[1] is None
    assert [vector.tolist() for vector in mean_gradients([one, two], [1.0, 0.5])] == [[5.5 / 4], [4.0, 2.0]]


def test_a_policy_absent_from_some_slices_gets_its_own_gradient(make_multi):
    scheme = make_multi(ppo(advantage_normalization="none", num_epochs=1, num_mini_batch=1))
    worker = scheme.start().local_worker
    worker.get_data()
    batch = worker.batch
    # Rearrange the slices so that half of them have no sample of `early`.
    parts = list(GradAccumulator(3).slices(batch, worker.algo.device))
    assert len(parts) == 4
    own = list(GradAccumulator(6).slices(MultiBatch({"early": batch.parts["early"]}, batch.policies, 12),
                                         worker.algo.device))
    parts = [dataclasses.replace(
        part, parts={"shared": part.parts["shared"], **(own[index // 2].parts if index % 2 else {})})
             for index, part in enumerate(parts)]
    accumulator = GradAccumulator(3)
    for part in parts:
        vectors, info = worker.algo.compute_gradients(part)
        accumulator.add(vectors, part.num_samples, info,
                        {policy: part.parts[policy].num_samples if policy in part.parts else 0
                                                          for policy in part.policies})
    assert accumulator.samples == {"early": 12, "shared": 14}
    whole, expected = worker.algo.compute_gradients(batch)
    for vector, other in zip(accumulator.result(), whole, strict=True):
        torch.testing.assert_close(vector, other, rtol=1e-4, atol=1e-5)
    for name, value in accumulator.info().items():
        assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


class OnlyFirstEpisode(ChangingAgents):
    """A game in which `agent_0` takes part in the first episode only."""

    def _present(self):
        return [agent for agent in super()._present() if agent != "agent_0" or self._episode == 0]


@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "grad_communication": ASYNC, "aggregate": 2},
    {"num_grad_workers": 2, "distribute_gradients": True}, {"microbatch_size": 5},
    {"num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC}])
def test_an_absent_policy_does_not_change(make_multi, settings):
    scheme = make_multi(env_fn=OnlyFirstEpisode, **settings)
    states, infos = [], []
    for _ in range(16):
        infos.append(scheme.step())
        states.append(scheme.acting_state())
    assert "loss/early" in infos[0]
    assert "loss/early" not in infos[-1]
    assert torch.equal(states[-1]["early/all"], states[-2]["early/all"])
    assert not torch.equal(states[-1]["shared/all"], states[-2]["shared/all"])
    assert not torch.equal(states[-1]["early/all"], make_multi(env_fn=OnlyFirstEpisode).acting_state()["early/all"])


def test_a_non_finite_gradient_updates_no_policy(make_multi, tmp_path):
    scheme = make_multi(keep_bad_batches=tmp_path)
    scheme.step()
    before = scheme.acting_state()
    scheme.update_algorithm_parameter("shared/value_loss_coef", 1e38)
    scheme.update_algorithm_parameter("early/value_loss_coef", 0.1)
    scheme.step()
    assert all(torch.equal(before[name], value) for name, value in scheme.acting_state().items())
    assert scheme.metrics()["updates_skipped_nan"] == 1
    (path,) = tmp_path.iterdir()
    kept = torch.load(path, weights_only=True)
    assert set(kept["batch"]["parts"]) == {"early", "shared"}
    assert not math.isfinite(kept["info"]["loss/shared"])


# Replay shards and the learner thread

@pytest.mark.every(3)
@pytest.mark.parametrize("num_replay_workers", [1, 2])
@pytest.mark.parametrize("num_grad_workers", [1, 2])
def test_shards_store_and_sample_per_policy(make_multi, check_ledger, num_replay_workers, num_grad_workers):
    scheme = make_multi(dqn(), preset=Scheme.apex, num_replay_workers=num_replay_workers,
                        num_grad_workers=num_grad_workers, learning_starts=24)
    make_updates(scheme, 6)
    ledger = check_ledger(scheme)
    assert ledger["resident"] > 0
    assert scheme.metrics()["agent_steps/shared"] * 6 == scheme.metrics()["agent_steps/early"] * 7
    assert {"loss/early", "loss/shared"} <= set(scheme.step())
    final = scheme.stop()
    assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


SHARDS_NAMES = ("added", "sampled", "items", "bytes", "mass", "min_priority", "stale_priorities", "evicted_unused")


def test_shards_report_metrics_of_each_policy(make_multi):
    storage = PERBuffer.create_factory(30, rollout_size=6, alpha=0.5)
    scheme = make_multi(dqn(), storage, preset=Scheme.apex, learning_starts=24, costs={"step": 0.02})
    make_updates(scheme, 30)
    scheme.drain()
    make_updates(scheme, 31)
    (shard,) = (handle.native.worker for handle in scheme.update_worker.local_worker.replay_workers.remote_workers())
    metrics, of_shard = scheme.metrics(), shard._storage
    found = {policy: {name: metrics[f"shard/1/{name}/{policy}"] for name in SHARDS_NAMES}
             for policy in ("early", "shared")}
    for policy, own in of_shard.storages.items():
        assert 0 < found[policy]["added"] <= own.counters["inserted"]
        assert 0 < found[policy]["sampled"] <= own.counters["sampled"]
        assert found[policy]["evicted_unused"] <= own.counters["evicted_unused"]
        assert 0 < found[policy]["items"] <= own.options.size
        assert found[policy]["bytes"] == own.num_bytes
        assert found[policy]["min_priority"] ** 0.5 * found[policy]["items"] <= found[policy]["mass"] * 1.001
    early, shared = found["early"], found["shared"]
    # A rollout has 12 env steps, but 12 agent steps of `early` and 14 of `shared`, which controls two agents.
    assert metrics["shard/1/added"] == early["added"]
    assert 6 * shared["added"] == 7 * early["added"]
    # A metric of the whole shard is the sum over its policies; `min_priority` is the minimum.
    for name in ("items", "bytes", "mass", "stale_priorities", "evicted_unused"):
        assert metrics[f"shard/1/{name}"] == pytest.approx(early[name] + shared[name])
    assert metrics["shard/1/min_priority"] == min(early["min_priority"], shared["min_priority"])


def test_priorities_reach_their_policy_in_a_shard(make_multi):
    scheme = make_multi(dqn(), preset=Scheme.apex, learning_starts=24, min_replay_ratio=4.0)
    make_updates(scheme, 30)
    worker = scheme.update_worker.local_worker
    (shard,) = (handle.native.worker for handle in worker.replay_workers.remote_workers())
    for storage in shard._storage.storages.values():
        assert storage._max_priority > 1.0  # TD errors are large, because rewards are large
        assert len(np.unique(storage.priority_sums.get(np.arange(storage.options.size)))) > 3
    scheme.stop()


@pytest.mark.parametrize("settings", [
    {}, {"minibatch_buffer_size": 2, "num_passes": 2}, {"buffer": "circular", "num_passes": 2},
    {"max_policy_lag": 2, "on_policy_lag": "wait"}, {"replay_proportion": 1.0, "replay_slots": 8},
    {"num_grad_workers": 2},
])
def test_a_learner_thread_uses_train_batches_of_all_policies(make_multi, check_ledger, settings):
    scheme = make_multi(IMPALA.create_factory(), VTraceBuffer.create_factory(6), preset=Scheme.impala,
                        train_batch_size=24, **settings)
    make_updates(scheme, 5)
    assert {"loss/early", "loss/shared"} <= set(scheme.step())
    check_ledger(scheme)
    final = scheme.stop()
    assert final["consumed_unique"] > 0


def test_architectures_check_the_algorithms_of_all_policies(make_multi):
    with pytest.raises(ConfigError,
                       match=r"impala provides rollouts of older policies .*learns from rollouts with advantages"):
        make_multi(preset=Scheme.impala)
    mixed = {"early": PPO.create_factory(num_epochs=1, num_mini_batch=1), "shared": IMPALA.create_factory()}
    storages = {"early": GAEBuffer.create_factory(6), "shared": VTraceBuffer.create_factory(6)}
    with pytest.raises(ConfigError, match="MultiAgentAlgorithm learns from rollouts with advantages"):
        make_multi(mixed, storages, preset=Scheme.impala)
    assert {"loss/early", "loss/shared"} <= set(make_multi(mixed, storages).step())


# Combinations that are rejected

def test_mixing_single_and_multi_policy_parts_is_refused(make_multi):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, policy_of=lambda agent: agent)
    others = MultiAgentVecEnv.create_factory(MatchingGame)
    algo, actor, storage = multi_agent(envs, ppo(), SMALL, GAEBuffer.create_factory(6))
    single = VecEnv.create_factory(CountingEnv)
    for parts in ((ppo(), actor, storage, envs), (algo, actor, GAEBuffer.create_factory(6), envs),
                  (algo, actor, storage, single), (algo, actor, storage, others)):
        with pytest.raises(ConfigError, match="all parts must have the same policies"):
            Scheme(*parts)


def test_weights_over_the_whole_buffer_require_one_shard(make_multi):
    storage = PERBuffer.create_factory(60, rollout_size=6, weight_norm="buffer")
    with pytest.raises(ConfigError, match="weight_norm='buffer' with several policies needs a single replay shard"):
        make_multi(dqn(), storage, preset=Scheme.apex, num_replay_workers=2, learning_starts=24)
    assert make_multi(dqn(), storage, preset=Scheme.apex, num_replay_workers=1, learning_starts=24).version == 0


def test_initial_priorities_by_workers_require_one_policy(make_multi):
    storage = PERBuffer.create_factory(60, rollout_size=6)
    with pytest.raises(ConfigError, match="initial_priority='worker' is not for several policies"):
        make_multi(dqn(), storage, preset=Scheme.apex, learning_starts=24, initial_priority="worker")


def test_microbatches_are_refused_with_replay(make_multi):
    with pytest.raises(ConfigError, match="microbatch_size=5 is for rollouts that are used and discarded"):
        make_multi(dqn(), microbatch_size=5)


# Learner, evaluation, learning

def test_learner_reports_per_policy(make_multi, tmp_path, monkeypatch):
    scheme = make_multi(test=True, runtime="threads")
    shown = []
    monkeypatch.setattr(Progress, "show", lambda self, status, last=False: shown.append(progress_text(status)))
    with Learner(scheme, target_steps=100, log_dir=tmp_path, progress=True) as learner:
        learner.train()
        evaluation, metrics = learner.evaluate(3), learner.get_metrics()
    assert evaluation.policy_returns == {"early": (21.0,) * 3, "shared": (562.0,) * 3}
    assert evaluation.return_mean == 21.0 + 2 * 562.0
    assert metrics["policies"] == {"early": {"return_mean": 21.0}, "shared": {"return_mean": 562.0}}
    assert metrics["scheme"]["agent_steps/early"] == metrics["env_steps"]
    assert learner.summary()["policy_return_means"] == {"early": 21.0, "shared": 562.0}
    assert "return 1145.0 (early 21.0, shared 562.0)" in shown[-1]
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)["acting_state"]) == {"early/all", "shared/all"}


@pytest.mark.parametrize(("algo", "storage", "target"), [
    (PPO.create_factory(lr=3e-3), GAEBuffer.create_factory(32), 3_000),
    (dqn(start_steps=300, epsilon_steps=2000, lr=2e-3, mini_batch_size=64, gamma=0.0, target_update_interval=100),
     PERBuffer.create_factory(5000, rollout_size=8), 2_000)], ids=["ppo", "dqn"])
def test_agents_learn_the_matching_game(make_multi, algo, storage, target):
    """Check that both agents reach a mean return above 7. The maximum is 8; random actions reach 8 / 3."""
    actor = functools.partial((QActor if algo.cls is DQN else OnPolicyActor).create_factory, hidden_sizes=(32,))
    scheme = make_multi(algo, storage, actor=actor, env_fn=MatchingGame, policy_of=lambda agent: agent, num_envs=8,
                        test=True, runtime="threads")
    with Learner(scheme, target_steps=target, progress=False) as learner:
        learner.train()
        found = learner.evaluate(20).policy_returns
    assert {policy: np.mean(returns) > 7 for policy, returns in found.items()} == {"agent_0": True, "agent_1": True}
