"""Check simulated schemes whose shards hold whole rollouts, for algorithms that correct for the age of their data."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl import (
    APPO, ASYNC, IMPALA, SYNC, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, Scheme, VecEnv, VTraceBuffer, multi_agent,
    train,
)
from pytorchrl.agent.synthetic import SyntheticStorage
from pytorchrl.envs.testing import ChangingAgents, CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.replay.rollouts import RolloutReplay
from pytorchrl.scheme.replay.storage_options import kind_of

LEVEL = {"num_col_workers": 3, "col_communication": ASYNC, "grad_communication": ASYNC, "num_replay_workers": 2,
         "train_batch_size": 8,
         "size": 400}


@pytest.fixture
def make_level(make_replay_scheme):
    """Return a function that makes a scheme of the synthetic agent, with rollouts of four steps in replay shards."""
    return lambda agent=None, **settings: make_replay_scheme({"size": 4} | (agent or {}), **(LEVEL | settings))


@pytest.fixture
def make_impala(stopped):
    """Return a function that makes a simulated scheme of a small IMPALA agent with replay shards."""
    def make(algo=None, **settings):
        envs = VecEnv.create_factory(CountingEnv, None, 2)
        return stopped(Scheme(
            algo or IMPALA.create_factory(),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            VTraceBuffer.create_factory(8), envs,
            **{"runtime": "simulated", "seed": 1, **LEVEL, "train_batch_size": 32, **settings}))
    return make


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


def shards_of(scheme):
    return [handle.native.worker._storage
            for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]


@pytest.mark.parametrize("settings", [
    {}, {"num_replay_workers": 1}, {"num_col_workers": 1}, {"grad_communication": SYNC}, {"num_grad_workers": 2},
    {"num_grad_workers": 2, "grad_communication": SYNC},
    {"num_grad_workers": 2, "grad_communication": SYNC, "distribute_gradients": True},
    {"runtime": "threads"},
    {"runtime": "threads", "num_replay_workers": 1, "num_col_workers": 1}],
    ids=["apex", "one-shard", "one-collector", "learner-in-turn", "gorila", "parallel", "ranks", "threads",
         "threads-all-local"])
def test_updates_use_sampled_rollouts(make_level, check_ledger, settings):
    scheme = make_level({"num_epochs": 2}, **settings)
    make_updates(scheme, 10)
    ledger = check_ledger(scheme)
    assert ledger["resident"] > 0
    assert ledger["consumed_unique"] == ledger["queued"] == 0
    assert ledger["consumed"] >= 10 * 8
    final = scheme.stop()
    assert final["in_flight"] == 0
    assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


def test_a_batch_consists_of_whole_rollouts_and_counts_each_pass(make_level):
    scheme = make_level({"num_epochs": 3, "num_mini_batch": 2}, train_batch_size=10, grad_communication=SYNC)
    make_updates(scheme, 5 * 6)
    storage = scheme.update_worker.local_worker.storage
    assert type(storage) is SyntheticStorage
    # Five batches; three rollouts of four steps each are needed for at least ten steps per batch
    assert [len(part) for part in storage.inserted] == [4] * 15
    assert {tuple(np.diff(part)) for part in storage.inserted} == {(1, 1, 1)}
    assert scheme.ledger()["consumed"] == 5 * 3 * 12


@pytest.mark.parametrize("num_replay_workers", [1, 2])
def test_the_oldest_rollouts_are_evicted_whole(make_level, check_ledger, num_replay_workers):
    scheme = make_level(num_replay_workers=num_replay_workers, size=45, costs={"grad": 0.01})
    for _ in range(8):
        make_updates(scheme, scheme.version + 3)
        ledger = check_ledger(scheme)
        assert ledger["resident"] <= 45
        assert ledger["resident"] % 4 == ledger["evicted"] % 4 == 0
    # Rollouts have 4 steps: a shard of size 45 holds 44 steps, and shards of sizes 23 and 22 hold 20 steps each
    assert ledger["resident"] == {1: 44, 2: 20 + 20}[num_replay_workers]
    assert ledger["evicted"] > 0
    scheme.drain()
    ledger = check_ledger(scheme)
    stored = [storage.counters for storage in shards_of(scheme)]
    assert (ledger["resident"],
            ledger["evicted"]) == tuple(sum(each[name] for each in stored) for name in ("resident", "evicted"))
    held = [kept.data.reward for storage in shards_of(scheme) for kept in storage._kept]
    assert len(held) == ledger["resident"] // 4


@pytest.mark.parametrize("faults", [
    "kill shard.1 @ sample 5", "kill col.2 @ step 9", "delay shard.2 0.1s p=0.1",
    "kill shard.* p=0.02; kill col.* p=0.01"])
def test_the_ledger_balances_under_faults(make_level, check_ledger, faults):
    scheme = make_level({"num_epochs": 2}, faults=faults)
    for _ in range(8):
        make_updates(scheme, scheme.version + 8)
        check_ledger(scheme)
    if "sample 5" in faults:
        assert scheme.metrics()["workers_restarted"] == 1
        assert scheme.ledger()["dropped"]["worker_lost"] > 0
    final = scheme.stop()
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert final["collected"] == places + sum(final["dropped"].values())


def test_a_drain_discards_sampled_batches_and_learning_continues(make_level, check_ledger):
    scheme = make_level({"num_mini_batch": 2})
    make_updates(scheme, 5)
    scheme.drain()
    ledger = check_ledger(scheme)
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert ledger["collected"] == ledger["resident"] + ledger["evicted"]
    make_updates(scheme, scheme.version + 5)
    assert check_ledger(scheme)["collected"] > ledger["collected"]


def test_a_skipped_update_moves_no_steps(make_level, check_ledger):
    scheme = make_level({"num_epochs": 2}, faults="nan grad.0 @ grad 3")
    make_updates(scheme, 20)
    assert scheme.metrics()["updates_skipped_nan"] == 1
    ledger = check_ledger(scheme)
    assert (ledger["dropped"]["nan"], ledger["consumed_unique"]) == (0, 0)


def test_learning_starts_with_one_batch_and_ratios_count_every_pass(make_level):
    scheme = make_level()
    assert kind_of(scheme.agent.storage_factory) == "batch"
    assert (scheme.settings["learning_starts"], scheme.settings["prefetch"]) == (8, 4)
    assert make_level(train_batch_size=None).settings["train_batch_size"] == 4
    scheme = make_level({"num_epochs": 4}, max_replay_ratio=2.0, costs={"grad": 1e-4, "step": 1e-2})
    for _ in range(10):
        make_updates(scheme, scheme.version + 4)
        ledger = scheme.ledger()
        assert ledger["consumed"] <= 2.0 * (ledger["resident"] + ledger["evicted"] - 8)
    assert ledger["consumed"] > 1.0 * ledger["resident"]
    scheme = make_level({"num_epochs": 4}, min_replay_ratio=2.0, costs={"grad": 0.5})
    make_updates(scheme, 20)
    ledger = scheme.ledger()
    assert ledger["consumed"] > 1.0 * (ledger["resident"] + ledger["evicted"])


def test_shards_hold_rollouts_and_the_learner_has_its_own_storage(make_impala):
    scheme = make_impala()
    make_updates(scheme, 3)
    assert {type(storage) for storage in shards_of(scheme)} == {RolloutReplay}
    assert [storage.options.size for storage in shards_of(scheme)] == [200, 200]
    assert type(scheme.update_worker.local_worker.storage) is VTraceBuffer


@pytest.mark.parametrize(("algo", "settings"), [
    (IMPALA.create_factory(lr=0.05), {}),
    (APPO.create_factory(num_epochs=2, num_mini_batch=2, lr=0.05), {"num_replay_workers": 1})],
    ids=["impala", "appo"])
def test_vtrace_sees_the_log_probabilities_of_the_policy_that_acted(make_impala, monkeypatch, algo, settings):
    acted, seen = {}, []

    def keys(rollout):
        return [tuple(int(x) for x in row[:3]) for row in rollout.obs["obs"][:rollout.num_steps].flatten(0, 1)]

    finish, estimate = algo.cls.finish_rollout, VTraceBuffer.estimate

    def finish_rollout(self, rollout):
        finish(self, rollout)
        acted.update(zip(keys(rollout), rollout.other["logp"].flatten().tolist(), strict=True))

    def estimated(self, rollout, recompute=False):
        recorded = zip(keys(rollout), rollout.other["logp"].flatten().tolist(), strict=True)
        present = self.algorithm.evaluate_rollout(rollout)[0].flatten().tolist()
        seen.extend((*pair, now) for pair, now in zip(recorded, present, strict=True))
        return estimate(self, rollout, recompute)

    monkeypatch.setattr(algo.cls, "finish_rollout", finish_rollout)
    monkeypatch.setattr(VTraceBuffer, "estimate", estimated)
    scheme = make_impala(algo, **settings)
    while scheme.version < 40 or len(seen) <= 20 * 32:
        scheme.step()
    assert len(seen) > 20 * 32
    assert all(acted[key] == recorded for key, recorded, _ in seen)
    # The policy has changed since the data were collected
    assert max(abs(recorded - now) for _, recorded, now in seen) > 0.05
    assert len(seen) > 16 + len({key for key, *_ in seen})  # some rollouts were used more than once
    assert scheme.metrics()["policy_lag"]["max"] > 5


def test_several_policies_train_from_shards_of_rollouts(check_ledger):
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2,
                                           policy_of={"agent_0": "early", "agent_1": "shared", "agent_2": "shared"})
    agent = multi_agent(envs, IMPALA.create_factory(),
                        lambda *spaces: OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,)),
                        VTraceBuffer.create_factory(6))
    scheme = Scheme.apex(*agent, envs, size=100, train_batch_size=20, num_replay_workers=2,
                         runtime="simulated", seed=1)
    make_updates(scheme, 10)
    assert check_ledger(scheme)["consumed"] == 24 * scheme.version  # each batch has two rollouts of twelve env steps
    assert sum(check_ledger(scheme)[name] for name in ("resident", "evicted")) % 12 == 0
    scheme.stop()


def test_train_accepts_impala_with_the_apex_preset():
    settings = {"runtime": "simulated", "seed": 1, "num_envs": 2, "num_steps": 8, "progress": False}
    agent = train("impala", "CartPole-v1", preset="apex", replay_size=400, target_steps=600,
                  train_batch_size=64, **settings)
    assert agent.summary["updates"] > 3
    with pytest.raises(ConfigError, match="A2C has no correction for this policy lag; use IMPALA"):
        train("a2c", "CartPole-v1", preset="apex", target_steps=10, **settings)


@pytest.mark.parametrize(("settings", "text"), [
    ({"size": None}, "replay of whole rollouts needs size, the total number of env steps that the shards keep"),
    ({"size": 0}, "size must be a whole number >= 1 or None, got 0"),
    ({"size": 400.0}, r"size must be a whole number >= 1 or None, got 400\.0"),
    ({"size": 14}, "size 14 divided among 2 shards is 7 per shard, less than train_batch_size 8; raise size"),
    ({"size": 6, "train_batch_size": 1},
     "a shard must have space for a rollout of 4 steps, but size 6 divided among 2 shards is only 3 per shard"),
    ({"alpha": 0.5}, "alpha would be ignored: SyntheticStorage has no such option"),
    ({"stratified": True}, "stratified would be ignored"),
    ({"prioritized": True}, "prioritized=True is for ReplayBuffer, PERBuffer and their counterparts of sequences, "
                            "but the storage is a SyntheticStorage; leave prioritized out"),
    ({"initial_priority": "worker"}, "initial_priority='worker' needs a storage with priorities"),
    ({"microbatch_size": 4}, "microbatch_size=4: only without num_replay_workers; change that, or leave "
                             "microbatch_size out"),
    ({"learning_starts": 500}, "learning_starts 500 exceeds size 400"),
    ({"num_replay_workers": None, "train_batch_size": None},
     "size=400: only with num_replay_workers; change that, or leave size out"),
])
def test_unused_or_invalid_settings_are_refused(make_level, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_level(**settings)


def test_the_storage_determines_the_kind_of_batches(make_level, make_replay_scheme):
    assert kind_of(make_level().agent.storage_factory) == "batch"
    scheme = make_replay_scheme({"size": 4, "capacity": 400}, **{**LEVEL, "size": None})
    assert kind_of(scheme.agent.storage_factory) == "transition"
    assert kind_of(GAEBuffer.create_factory(4)) is None
