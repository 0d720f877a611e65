"""Check R2D2 with whole rollouts in replay: batches match the collected rollouts, the ledger balances, and settings
take effect."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl import ASYNC, DQN, R2D2, PERBuffer, QActor, RolloutSequenceBuffer, Scheme, SequenceBuffer, VecEnv, train
from pytorchrl.agent.data import map_tensors
from pytorchrl.training.composition import compose
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.gradients.replay_source import ReplaySource
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.storage_options import kind_of

STEPS, ENVS, N_STEP = 6, 2, 3
SHARDS = {"num_col_workers": 3, "num_replay_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC}
PLACES = {
    "in-learner": {}, "in-rounds": {"num_col_workers": 3},
    "separate-thread": {"col_communication": ASYNC, "grad_communication": ASYNC},
    "one-shard": {**SHARDS, "num_replay_workers": 1}, "shards": SHARDS, "by-stream": {**SHARDS, "routing": "by_stream"},
    "least-loaded": {**SHARDS, "routing": "least_loaded"}, "gorila": {**SHARDS, "num_grad_workers": 2},
    "threads": {**SHARDS, "runtime": "threads"}}


class Watched(R2D2):
    """R2D2 that stores its batches for the tests; all workers run in the process of the tests."""

    seen = []  # noqa: RUF012 - one list for all workers

    def compute_gradients(self, batch):
        self.seen.append(map_tensors(batch, torch.Tensor.cpu))
        return super().compute_gradients(batch)


@pytest.fixture
def collected(monkeypatch):
    """Return the rollouts inserted into replay, by the key of their first step: (seed of the environment, episode,
    step)."""
    found, insert = {}, RolloutSequenceBuffer._insert

    def insert_(self, rollout, source):
        found[key_of(rollout.obs["obs"][0, 0])] = rollout.map(torch.clone)
        insert(self, rollout, source)
    monkeypatch.setattr(RolloutSequenceBuffer, "_insert", insert_)
    return found


def key_of(row):
    return tuple(int(x) for x in row[:3])


def make_agent(size=600, storage=RolloutSequenceBuffer, envs=None, **algo):
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 10, "truncate": True}, ENVS) if envs is None else envs
    options = {"length": 5, "burn_in": 3, "period": 2} if storage is SequenceBuffer else {}
    return (Watched.create_factory(**{"start_steps": 60, "mini_batch_size": 5, "update_every": 16, "num_updates": 1,
                                      "lr": 1e-3} | algo),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,), recurrent_net="gru",
                                  recurrent_size=5),
            storage.create_factory(size, rollout_size=STEPS, n_step=N_STEP, **options), envs)


@pytest.fixture
def make(stopped):
    """Return a function that makes a scheme from settings; all schemes are stopped after the test."""
    Watched.seen = []
    return lambda agent=None, **settings: stopped(
        Scheme(*(agent or make_agent()), **{"seed": 1, "runtime": "simulated"} | settings))


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


def check_batches(collected):
    """Check that each batch consists of whole rollouts, with the steps, states and last observations that were
    collected."""
    for batch in Watched.seen:
        num_sequences = batch.valid.shape[1]
        assert num_sequences == 6  # at least five sequences are needed, and each rollout has two
        for begin in range(0, num_sequences, ENVS):
            rollout = collected[key_of(batch.obs["obs"][0, begin])]
            finals = {tuple(index): obs for index,
                      obs in zip(rollout.final_index.tolist(), rollout.final_obs["obs"], strict=True)}
            for e in range(ENVS):
                rows = []
                for t in range(STEPS):
                    rows.append((rollout.obs["obs"][t, e], t))
                    rows += [(finals[t, e], None)] if (t, e) in finals else []
                rows += [] if rows[-1][1] is None else [(rollout.obs["obs"][STEPS, e], None)]
                shown = batch.obs["obs"][:len(rows), begin + e]
                assert torch.equal(shown, torch.stack([obs for obs, _ in rows]))
                steps = [at for at, (_, t) in enumerate(rows) if t is not None and rollout.valid[t, e]]
                assert batch.valid[:, begin + e].nonzero().flatten().tolist() == steps
                assert batch.action[steps, begin + e].tolist() == rollout.action[rollout.valid[:, e], e].tolist()
                assert torch.equal(batch.rhs["q"][begin + e], rollout.rhs["q"][0, e])
                assert batch.done[:len(rows), begin + e].nonzero().flatten().tolist() == [
                    at for at, (_, t) in enumerate(rows) if t is not None and rollout.done[t, e]]
                counts = [int(obs[2]) for obs, _ in rows]  # the step within the episode, which has ten steps
                for at in steps:
                    last = next((to for to in range(at + 1, len(rows)) if rows[to][1] is None), len(rows) - 1)
                    to = int(batch.next_row[at, begin + e])
                    assert to == min(at + N_STEP, last)
                    assert counts[to] - counts[at] == to - at


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
def test_r2d2_learns_from_whole_rollouts_for_any_replay_location(make, check_ledger, collected, settings):
    scheme = make(**settings)
    make_updates(scheme, 6)
    ledger = check_ledger(scheme)
    assert ledger["resident"] > 0
    assert ledger["consumed_unique"] == 0
    check_batches(collected)
    assert any(batch.done[1:].any() for batch in Watched.seen)  # some episodes start within a rollout
    final = scheme.stop()
    assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


@pytest.mark.parametrize("settings", [{}, SHARDS], ids=["in-learner", "shards"])
def test_every_valid_step_counts_as_consumed_each_time(make, settings):
    scheme = make(**settings)
    make_updates(scheme, 10)
    consumed = scheme.ledger()["consumed"]
    scheme.stop()
    counts = [int(batch.valid.sum()) for batch in Watched.seen]
    assert counts == [3 * STEPS * ENVS] * len(counts)  # a reset takes no extra step, so all steps are valid
    assert consumed in np.cumsum(counts)
    assert all((batch.weight == 1.0).all() for batch in Watched.seen)


def test_both_shards_are_sampled_and_hold_whole_rollouts(make):
    scheme = make(agent=make_agent(size=101), **SHARDS, max_replay_ratio=2.0, costs={"grad": 1e-4, "step": 1e-2})
    make_updates(scheme, 30)
    shards = [handle.native.worker for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]
    storages = [shard._storage for shard in shards]
    assert [storage.options.size for storage in storages] == [51, 50]
    assert [storage.counters["resident"] for storage in storages] == [48, 48]  # four rollouts of twelve steps
    assert all(storage.counters["sampled"] > 0 for storage in storages)
    ledger = scheme.ledger()
    assert 0 < ledger["consumed"] <= 2.0 * (ledger["resident"] + ledger["evicted"] - 60)


def test_policy_lag_is_computed_from_rollout_versions(make, monkeypatch):
    """Check that each sample has the version of the weights that collected its rollout, as stored by the shard."""
    made, drawn, add, draw = {}, [], RWorker._add, ReplaySource.draw

    def add_(self, rollout, version):
        made[key_of(rollout.data.obs["obs"][0, 0])] = rollout.header.weights_version
        add(self, rollout, version)

    def draw_(self):
        batch = draw(self)
        drawn.append((batch, self._shards.sampler.versions.copy()))
        return batch
    monkeypatch.setattr(RWorker, "_add", add_)
    monkeypatch.setattr(ReplaySource, "draw", draw_)
    make_updates(make(**SHARDS), 15)
    for batch, versions in drawn:
        starts = [key_of(batch.obs["obs"][0, begin]) for begin in range(0, len(batch.ids), ENVS)]
        assert versions[:, 0].tolist() == [made[start] for start in starts for _ in range(ENVS)]
    assert max(int(versions[:, 0].max()) for _, versions in drawn) > 5


@pytest.mark.parametrize(("faults", "num_lost"), [
    ("kill shard.1 @ sample 5", 1), ("kill shard.2 @ add 8; kill col.1 @ step 50", 2), ("hang shard.1 @ add 9", 1)])
def test_the_ledger_balances_after_losses(make, check_ledger, collected, faults, num_lost):
    scheme = make(faults=faults, worker_timeout_s=1.0, costs={"grad": 0.1, "step": 0.02}, **SHARDS)
    make_updates(scheme, 10)
    while (scheme.metrics()["workers_restarted"] or 0) < num_lost:
        scheme.step()
        check_ledger(scheme)
        assert scheme.version < 300
    check_batches(collected)
    final = scheme.stop()
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert final["collected"] == places + sum(final["dropped"].values())
    assert final["dropped"]["worker_lost"] > 0


def test_architectures_accept_rollout_sequences():
    for make_named, routing in ((Scheme.r2d2, "by_stream"), (Scheme.apex, "round_robin")):
        scheme = make_named(*make_agent(), size=240, num_replay_workers=2, runtime="simulated", seed=1)
        assert kind_of(scheme.agent.storage_factory) == "batch"
        assert [scheme.settings[name] for name in ("routing", "train_batch_size", "learning_starts", "size")] == [
            routing, 5, 60, 240]
        make_updates(scheme, 3)
        shards = [handle.native.worker._storage
                  for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]
        assert [(type(storage), storage.options.size) for storage in shards] == [(RolloutSequenceBuffer, 120)] * 2
        scheme.stop()


def test_train_accepts_kind_and_kind_changes_training():
    def run(**settings):
        agent = train("r2d2", "pytorchrl/Recall-v0", preset="r2d2", num_replay_workers=2, runtime="simulated", seed=1,
                      progress=False,
                      num_steps=16, mini_batch_size=8, start_steps=100, max_replay_ratio=2.0, target_steps=400,
                      **settings)
        assert agent.summary["updates"] > 2
        return agent.agent.storage_factory.cls, agent.acting_state["q"].tolist()
    (storage, weights), again, (other, others) = run(kind="batch"), run(kind="batch"), run()
    assert (storage, weights) == again
    assert (storage, other) == (RolloutSequenceBuffer, SequenceBuffer)
    assert weights != others


def test_a_preset_omits_options_that_whole_rollouts_lack():
    sequences, rollouts = (compose("r2d2", "pytorchrl/Recall-v0",
                                   {"kind": kind})[0].storage_factory for kind in ("sequence", "batch"))
    assert (sequences.cls, rollouts.cls) == (SequenceBuffer, RolloutSequenceBuffer)
    assert (sequences.options.length, sequences.options.rollout_size, rollouts.options.rollout_size) == (16, 8, 16)
    assert (rollouts.options.size, rollouts.options.n_step) == (sequences.options.size, sequences.options.n_step)
    with pytest.raises(ConfigError, match="length, priority_epsilon would be ignored: whole rollouts are drawn "
                                          "uniformly; leave out kind"):
        compose("r2d2", "pytorchrl/Recall-v0", {"kind": "batch", "length": 7, "priority_epsilon": 0.1})


def test_the_agent_learns_to_recall_the_cue():
    """Check that the agent learns to recall the cue; without memory, only half of its answers would be right."""
    envs = VecEnv.create_factory("pytorchrl/Recall-v0", {"num_cues": 2, "delay": 2}, vec_env_size=4)
    agent = (R2D2.create_factory(lr=1e-2, adam_eps=1e-5, gamma=0.9, mini_batch_size=32, start_steps=200,
                                 target_update_interval=10),
             QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,), recurrent_net="gru",
                                   recurrent_size=16),
             RolloutSequenceBuffer.create_factory(4000, rollout_size=9, n_step=2), envs)
    scheme = Scheme.r2d2(*agent, envs, num_replay_workers=2, max_replay_ratio=8.0, runtime="simulated", seed=1)
    make_updates(scheme, 60)
    scheme.start_evaluation(20)
    evaluation = scheme.wait_evaluation(60.0)
    scheme.stop()
    assert np.mean(evaluation.returns) > 0.9


@pytest.mark.parametrize(("storage", "kind"), [(SequenceBuffer, "sequence"), (RolloutSequenceBuffer, "batch")])
def test_the_storage_determines_the_kind_of_batches(make, storage, kind):
    scheme = make(agent=make_agent(storage=storage), **SHARDS)
    assert kind_of(scheme.agent.storage_factory) == kind
    make_updates(scheme, 2)
    assert {type(handle.native.worker._storage) for handle in
            scheme.update_worker.local_worker.replay_workers.remote_workers()} == {storage}


@pytest.mark.parametrize(("storage", "settings", "text"), [
    (RolloutSequenceBuffer, {"alpha": 0.5}, "alpha would be ignored: RolloutSequenceBuffer has no such option"),
    (RolloutSequenceBuffer, {"prioritized": True},
     "prioritized=True is for ReplayBuffer, PERBuffer and their counterparts of sequences, but the storage is a "
     "RolloutSequenceBuffer; leave"),
    (RolloutSequenceBuffer, {"initial_priority": "worker"}, "initial_priority='worker' is for single transitions"),
    (RolloutSequenceBuffer, {"size": 20},
     "a shard must have space for a rollout of 12 steps, but size 20 divided among 2 shards is only 10 per shard"),
    (RolloutSequenceBuffer, {"size": 40}, "learning_starts 60 exceeds size 40"),
])
def test_unused_or_invalid_settings_are_refused(make, storage, settings, text):
    with pytest.raises(ConfigError, match=text):
        make(agent=make_agent(storage=storage), **SHARDS, **settings)


def test_algorithms_of_single_transitions_are_refused():
    parts = make_agent()
    with pytest.raises(ConfigError, match=r"DQN learns from single .*, but RolloutSequenceBuffer provides sequences "
                                          r".*; storages for DQN: "):
        Scheme(DQN.create_factory(), *parts[1:])
    assert not PERBuffer.draws_rollouts
