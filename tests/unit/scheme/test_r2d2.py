"""Check R2D2 in the worker tree: its sequences, their stored states, step counts, and the ledger when workers are lost.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl import ASYNC, R2D2, QActor, Scheme, SequenceBuffer, VecEnv
from pytorchrl.agent.data import map_tensors
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError

LENGTH, BURN_IN, N_STEP = 5, 3, 2
SHARDS = {"num_col_workers": 3, "num_replay_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC}


class Watched(R2D2):
    """R2D2 that stores its batches for the tests; all workers run in the process of the tests."""

    seen = []  # noqa: RUF012 - one list for all workers

    def compute_gradients(self, batch):
        self.seen.append((map_tensors(batch, torch.Tensor.cpu), self))
        return super().compute_gradients(batch)


@pytest.fixture
def make_r2d2(stopped):
    """Return a function that makes a scheme from settings; all schemes are stopped after the test."""
    Watched.seen = []

    def make(size=2000, env_kwargs=None, storage=None, algo=None, num_envs=2, **settings):
        envs = VecEnv.create_factory(CountingEnv, {"episode_length": 14, "truncate": True, **(env_kwargs or {})},
                                     num_envs)
        return stopped(Scheme(
            Watched.create_factory(**{"start_steps": 100, "mini_batch_size": 8, "update_every": 16, "num_updates": 1,
                                      "lr": 1e-3,
                                      **(algo or {})}),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,), recurrent_net="gru",
                                  recurrent_size=5),
            SequenceBuffer.create_factory(size, **{
                "rollout_size": 4, "length": LENGTH, "burn_in": BURN_IN, "period": 2, "n_step": N_STEP,
                **(storage or {})}),
            envs, **{"seed": 1, "runtime": "simulated", **settings}))
    return make


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


def check_sequences(episode_length=14):
    """Check that each sequence is from one environment and episode, is in order, and has the action taken at each
    observation."""
    for batch, _ in Watched.seen:
        obs = batch.obs["obs"].numpy()
        for b in range(len(batch.ids)):
            count = int(batch.valid[:, b].sum())
            done = batch.done[:, b].nonzero().flatten().tolist()
            first = done[0] if done else 0
            rows = obs[first:batch.burn_in + count + 1, b]
            assert len({(row[0], row[1]) for row in rows}) == 1
            steps = rows[:, 2].astype(int)
            assert (np.diff(steps) == 1).all()
            assert (steps[0] == 0) == bool(done)
            assert batch.burn_in - first <= BURN_IN
            actions = rows[1:, 3][batch.burn_in - first:]
            assert actions.tolist() == batch.action[:count, b].tolist()
            assert count == LENGTH or steps[-1] == episode_length
            ahead = batch.next_row[:count, b] - batch.burn_in - torch.arange(count)
            assert obs[batch.next_row[:count, b].numpy(), b, 2].tolist() == [
                min(steps[0] + batch.burn_in - first + t + int(m), episode_length) for t, m in enumerate(ahead)]
            assert ahead.tolist() == [min(N_STEP,
                                          episode_length - (steps[0] + batch.burn_in - first + t))
                                          for t in range(count)]


PLACES = {
    "in-learner": {}, "async-collection": {"num_col_workers": 3, "col_communication": ASYNC},
    "separate-thread": {"col_communication": ASYNC, "grad_communication": ASYNC},
    "in-rounds": {"num_col_workers": 3}, "parallel": {"num_grad_workers": 2},
    "one-shard": {**SHARDS, "num_replay_workers": 1},
    "shards": SHARDS, "gorila": {**SHARDS, "num_grad_workers": 2}, "threads": {**SHARDS, "runtime": "threads"}}


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
def test_r2d2_learns_from_whole_sequences_for_any_replay_location(make_r2d2, check_ledger, settings):
    scheme = make_r2d2(**settings)
    make_updates(scheme, 4)
    ledger = check_ledger(scheme)
    assert ledger["resident"] > 0
    assert ledger["consumed_unique"] == 0
    check_sequences()
    # Full sequences are longer than a rollout, so successive rollouts of a worker were joined.
    assert any(batch.valid.all(0).any() for batch, _ in Watched.seen)
    final = scheme.stop()
    assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


@pytest.mark.parametrize("settings", [{}, SHARDS], ids=["in-learner", "shards"])
def test_consumed_steps_exclude_warm_up_and_padding(make_r2d2, settings):
    scheme = make_r2d2(**settings)
    make_updates(scheme, 6)
    consumed = scheme.ledger()["consumed"]
    scheme.stop()
    batches = [batch for batch, _ in Watched.seen]
    assert any(not batch.valid.all() for batch in batches)
    counts = np.cumsum([int(batch.valid.sum()) for batch in batches])
    assert consumed in counts
    assert [batch.num_samples for batch in batches] == np.diff(counts, prepend=0).tolist()


def test_stored_states_equal_those_of_a_new_unroll(make_r2d2):
    """Check that stored states equal those of a new unroll from the start of the episode.

    The learning rate is 0, so the actor's parameters never change.
    """
    scheme = make_r2d2(algo={"lr": 0.0, "mini_batch_size": 32, "start_steps": 300}, **SHARDS)
    make_updates(scheme, 3)
    known = {}  # (seed, episode) -> step -> observation, from all sequences
    for batch, _ in Watched.seen:
        for row in batch.obs["obs"].flatten(0, 1).numpy():
            known.setdefault((row[0], row[1]), {})[int(row[2])] = row
    num_checked = 0
    for batch, algorithm in Watched.seen:
        for b in (~batch.done.any(0)).nonzero().flatten().tolist():
            seed, episode, t, _ = batch.obs["obs"][0, b].numpy()
            steps, count = known[seed, episode], int(t)
            if not all(step in steps for step in range(count)):
                continue
            obs = torch.as_tensor(np.stack([steps[step] for step in range(count)]))[:, None].to(algorithm.device)
            with torch.no_grad():
                _, states = algorithm.actor.unroll(
                    {"obs": obs}, algorithm.actor.initial_states(1),
                    torch.arange(count, device=algorithm.device)[:, None] == 0)
            torch.testing.assert_close(batch.rhs["q"][b], states["q"][0].cpu(), rtol=0.0, atol=1e-6)
            num_checked += 1
    assert num_checked >= 10


@pytest.mark.every(2)
@pytest.mark.parametrize(("faults", "num_lost"), [
    ("kill shard.1 @ sample 5", 1), ("kill col.2 @ step 30", 1), ("kill shard.2 @ add 12; kill col.1 @ step 50", 2),
    ("kill shard.* p=0.005; kill col.* p=0.003", 2), ("hang shard.1 @ priorities 3", 1),
    ("delay shard.2 0.5s p=0.3", 0)])
def test_the_ledger_balances_after_losses_and_no_sequence_is_torn(make_r2d2, check_ledger, faults, num_lost):
    scheme = make_r2d2(faults=faults, worker_timeout_s=1.0, costs={"grad": 0.1, "step": 0.02}, **SHARDS)
    make_updates(scheme, 10)
    shards = scheme.update_worker.local_worker.shards
    while (scheme.metrics()["workers_restarted"] or 0) < num_lost or not all(state.resident for state in shards.states):
        scheme.step()
        check_ledger(scheme)
        assert scheme.version < 300
    assert (check_ledger(scheme)["dropped"]["worker_lost"] > 0) == ("@" in faults
                                                                    and "shard" in faults) or "p=" in faults
    check_sequences()
    storages = [handle.native.worker for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]
    final = scheme.stop()
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert final["collected"] == places + sum(final["dropped"].values())
    assert "@" not in faults or final["resident"] == sum(
        worker._storage.counters["resident"] for worker in storages if worker is not None
        and worker._storage is not None)


def test_remaining_shards_replace_a_lost_one(make_r2d2, check_ledger):
    scheme = make_r2d2(faults="kill shard.1 @ add 16", on_worker_failure="ignore", max_replay_ratio=2.0, **SHARDS)
    make_updates(scheme, 15)
    assert check_ledger(scheme)["dropped"]["worker_lost"] > 0
    check_sequences()
    assert scheme.metrics()["workers_missing"] == 1


def test_equal_seeds_give_equal_runs(make_r2d2):
    def run(seed):
        scheme = make_r2d2(schedule_seed=seed, **SHARDS)
        make_updates(scheme, 4)
        ledger, digest = scheme.ledger(), scheme.runtime.simulation.digest
        weights = scheme.acting_state()["q"]
        scheme.stop()
        return str(ledger), digest, weights.tolist()
    assert run(3) == run(3) != run(4)


def test_ratios_count_trained_steps(make_r2d2):
    scheme = make_r2d2(costs={"grad": 1e-4, "step": 1e-2}, max_replay_ratio=0.5, **SHARDS)
    make_updates(scheme, 12)
    ledger = scheme.ledger()
    assert 0.25 < ledger["consumed"] / (ledger["resident"] + ledger["evicted"] - 100) <= 0.5


@pytest.mark.parametrize(("queue_size", "most"), [(2, 2), (4, 4), (16, 8)])
def test_no_more_batches_are_requested_than_the_queue_holds(make_r2d2, monkeypatch, queue_size, most):
    from pytorchrl.scheme.replay.sampler import Sampler
    levels, ask = [], Sampler._request

    def watched(shards, parameters):
        ask(shards, parameters)
        levels.append(shards.num_requested)
    monkeypatch.setattr(Sampler, "_request", watched)
    scheme = make_r2d2(queue_size=queue_size, **SHARDS)
    make_updates(scheme, 6)
    assert max(levels) == most


def test_each_collectors_rollouts_stay_in_one_shard(make_r2d2):
    scheme = make_r2d2(**SHARDS)
    assert scheme.settings["routing"] == "by_stream"
    make_updates(scheme, 10)
    sources = [set(handle.native.worker._storage._episodes)
               for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]
    assert sources == [{(2, 0)}, {(1, 0), (3, 0)}]


@pytest.mark.parametrize(("settings", "text"), [
    ({"routing": "least_loaded", **SHARDS}, "routing='least_loaded' would split sequences"),
    ({"routing": "random", **SHARDS}, "routing='random' would split sequences"),
    ({"size": 12, **SHARDS}, r"a replay of sequences must store at least burn_in \+ length = 8 steps, got 6"),
    ({"size": 60, **SHARDS}, "2 collectors x 2 environments x 3 rollouts of 4 steps need 48"),
    ({"size": 60, "num_col_workers": 3}, "3 collectors x 2 environments x 3 rollouts of 4 steps need 72"),
])
def test_replay_without_complete_sequences_is_refused(make_r2d2, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_r2d2(**settings)


def test_parts_that_do_not_fit_are_refused_before_anything_starts():
    envs = VecEnv.create_factory(CountingEnv)
    actor = QActor.create_factory(envs.observation_space, envs.action_space)
    with pytest.raises(ConfigError,
                       match="R2D2 needs QActor with recurrent_net='gru' or 'lstm', got recurrent_net=None"):
        Scheme(R2D2.create_factory(), actor, SequenceBuffer.create_factory(1000, rollout_size=10), envs)
