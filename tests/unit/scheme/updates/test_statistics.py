"""Check that each documented statistic is reported by a run that it applies to, and has its documented meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytorchrl import (
    A2C,
    ASYNC,
    DQN,
    PPO,
    GAEBuffer,
    Learner,
    MultiAgentVecEnv,
    OnPolicyActor,
    PERBuffer,
    QActor,
    Scheme,
    VecEnv,
    multi_agent,
)
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import CountingEnv, MatchingGame

PAGE = Path(__file__).parents[4] / "docs" / "statistics.md"
TABLES = [re.findall(r"^\| (?!name|elsewhere|---)(.*?) \| (.*) \|$", part, re.MULTILINE) for part in
          re.split(r"^\|---\|---\|$", PAGE.read_text(), flags=re.MULTILINE)[1:]]
NAMES, LEARNERS_NAMES = ([name for table in tables for names, _ in table for name in re.findall(r"`([^`]+)`", names)]
                         for tables in (TABLES[:-2], TABLES[-2:-1]))
OF_SOME_ONLY = {"agent_steps/<policy>"}  # reported only with several policies; see test_multi_agent.py


@pytest.fixture
def make_apex():
    """Return a function that makes Ape-X with a small DQN agent in the simulated runtime."""
    schemes = []

    def make(**settings):
        envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
        schemes.append(Scheme.apex(
            DQN.create_factory(start_steps=0, mini_batch_size=8, epsilon_per_worker=True),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            PERBuffer.create_factory(60, rollout_size=7, alpha=0.5, epsilon=0.1), envs,
            **{"seed": 1, "runtime": "simulated", "num_replay_workers": 2, "max_weight_sync_delay": 10} | settings))
        return schemes[-1]
    yield make
    for scheme in schemes:
        scheme.stop()


@pytest.fixture
def make():
    """Return a function that makes a simulated scheme of the synthetic agent from settings."""
    schemes = []

    def make_(agent=None, **settings):
        schemes.append(Scheme(*synthetic_agent(4, **(agent or {})), **{"seed": 1, "runtime": "simulated"} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def run(scheme, updates=30):
    while scheme.version < updates:
        scheme.step()
    return json.loads(json.dumps(scheme.metrics()))


def test_the_page_has_tables():
    assert len(TABLES) == 7
    assert len(NAMES) > 50
    assert len(TABLES[-1]) == 29


def test_every_name_on_the_page_is_reported(make_apex):
    metrics = run(make_apex())
    assert [name for name in NAMES if name not in metrics and not name.startswith("compress/")] == [*OF_SOME_ONLY]


def test_compression_statistics_are_reported_after_encoding(make_scheme):
    kinds = ("data", "weights", "grads")
    scheme = make_scheme(num_col_workers=2, num_grad_workers=2, **{f"compress_{kind}_to_send": "lz4" for kind in kinds},
                         size=64)
    found = {name for name in run(scheme, 2) if name.startswith("compress/")}
    names = {name for name in NAMES if name.startswith("compress/grads/")}
    assert len(names) == 8
    assert found == {name.replace("grads", kind) for name in names for kind in kinds}


def test_every_reported_name_is_on_the_page(make_apex):
    names = {re.sub(r"^shard/\d/", "shard/1/", name) for name in run(make_apex())}
    assert names - set(NAMES) == set()


def test_names_written_by_a_learner_are_on_the_page(tmp_path):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, vec_env_size=2, policy_of="independent")
    agent = multi_agent(envs, PPO.create_factory(num_epochs=1, num_mini_batch=1), OnPolicyActor.create_factory,
                        GAEBuffer.create_factory(8))
    scheme = Scheme(*agent, envs, test_envs_factory=envs, runtime="simulated", seed=1)
    with Learner(scheme, 64, tmp_path, progress=False, tensorboard=False, eval_every=32,
                 checkpoint_every=16) as learner:
        learner.train()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(last) == set(LEARNERS_NAMES) - {"batch_lag"}  # synchronous collection has no lag


def test_names_of_other_libraries_have_equivalents(make_apex):
    scheme = make_apex()
    metrics, ledger, statistics = run(scheme, 12), scheme.ledger(), scheme.step()
    for _, here in TABLES[-1]:
        # Names that contain a policy are checked in test_multi_agent.py.
        for name in re.findall(r"`([^`]+)`", here.replace("/<policy>", "")):
            if name == "step()":
                assert "loss" in statistics
            elif (found := re.fullmatch(r'ledger\(\)\["(\w+)"\]', name)) is not None:
                assert found[1] in ledger
            else:
                assert name in metrics


def test_each_gradient_is_counted_once(make):
    scheme = make(num_grad_workers=3, grad_communication=ASYNC, max_grad_lag=0, lag_policy="drop")
    metrics = run(scheme)
    assert metrics["grads_dropped"] > 0
    assert metrics["grads_received"] == sum(metrics[f"grads_{name}"] for name in ("applied", "held", "dropped",
                                                                                  "empty"))


def test_times_match_the_costs(make):
    costs = {"start": 0, "message": 0, "step": 0.5, "grad": 2.0, "update": 0.25}
    metrics = run(make(costs=costs), 20)
    assert metrics["collect_time_ms"] == pytest.approx(4 * 500.0)
    assert metrics["grad_time_ms"] == pytest.approx(2000.0)
    assert metrics["dequeue_time_ms"] == pytest.approx(4 * 500.0)  # the local collector works while the learner waits
    assert metrics["collect_peak_steps_per_s"] == pytest.approx(2.0)
    assert metrics["grad_peak_steps_per_s"] == pytest.approx(4 / 2.0)
    # A rollout of 4 steps takes 2 s, its gradient 2 s, its update 0.25 s.
    assert metrics["updates_per_s"] == pytest.approx(1 / 4.25)
    for name in ("collected_steps", "consumed_steps", "unique_consumed_steps"):
        assert metrics[f"{name}_per_s"] == pytest.approx(4 / 4.25)


def test_passes_increase_the_rate_of_consumed_steps_only(make):
    metrics = run(make({"num_epochs": 3}, costs={"start": 0, "message": 0, "step": 0.5, "grad": 1.0, "update": 0.0}),
                  60)
    assert metrics["consumed_steps_per_s"] > 2.5 * metrics["unique_consumed_steps_per_s"]
    assert metrics["replay_ratio"] == pytest.approx(3.0)


def test_lag_is_the_sum_of_two_phases(make):
    metrics = run(make(num_col_workers=2, col_communication=ASYNC, queue_size=4, costs={"grad": 0.1}), 60)
    assert metrics["policy_lag_queue_mean"] > 1.0
    assert metrics[
        "policy_lag_collect_mean"] + metrics["policy_lag_queue_mean"] == pytest.approx(metrics["policy_lag"]["mean"])


def test_bytes_out_count_pushed_weights(make, make_scheme):
    metrics = run(make(num_col_workers=2, num_grad_workers=2))  # the weights are one number of 8 bytes
    assert metrics["bytes_out"] == 8 * metrics["weight_pushes"] > 0
    central = make_scheme(algo=A2C.create_factory(), runtime="threads")
    central.step()
    assert central.metrics()["bytes_out"] == 0


def test_shard_metrics_match_their_storages(make_apex):
    scheme = make_apex(costs={"sample": 0.3, "add": 0.2, "priorities": 0.1})
    metrics = run(scheme, 40)
    scheme.drain()
    scheme.step()
    metrics = scheme.metrics()
    storages = [handle.native.worker._storage
                for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]
    for index, storage in enumerate(storages, start=1):
        shard = {name: metrics[f"shard/{index}/{name}"] for name in (
            "added", "sampled", "items", "bytes", "mass", "min_priority", "add_time_ms", "sample_time_ms",
            "priority_time_ms",
            "evicted_unused")}
        assert 0.5 * storage.counters["inserted"] < shard["added"] <= storage.counters["inserted"]
        assert 0 < shard["items"] <= 30
        assert shard["bytes"] == storage.num_bytes
        assert shard["mass"] == pytest.approx(sum(storage.priority_sums.get([i])[0] for i in range(30)), rel=0.5)
        assert 0.1 <= shard["min_priority"] < 1e4
        assert shard["min_priority"] ** 0.5 * shard["items"] <= shard["mass"] * 1.001
        assert shard["sample_time_ms"] == pytest.approx(300.0)
        assert shard["add_time_ms"] == pytest.approx(200.0)
        assert shard["priority_time_ms"] == pytest.approx(100.0)
    assert metrics["stale_priorities"] > 0  # shards of 30 transitions are overwritten while priorities are in flight


def test_shards_of_several_gradient_workers_have_different_names(make_apex):
    metrics = run(make_apex(num_grad_workers=2))
    places = {name.split("/")[1] for name in metrics if name.startswith("shard/")}
    assert places == {"1.1", "1.2", "2.1", "2.2"}


@pytest.mark.parametrize(("costs", "waiting", "underway"), [
    ({"grad": 1.0}, 2, 1), ({"sample": 1.0}, 0, 3)], ids=["slow learner", "slow shard"])
def test_queue_statistics_count_batches_with_shards(make_apex, costs, waiting, underway):
    """Check that three other batches are queued or in flight when the learner takes a batch.

    If the learner is slow, only one of the three is in flight; if the shard is slow, all three are.
    """
    scheme = make_apex(num_replay_workers=1, costs={"message": 0.0, "step": 0.2} | costs)
    metrics = run(scheme, 80)
    assert metrics["queue_size"] == waiting
    assert metrics["draws_in_flight"] == underway
    assert metrics["queue"]["count"] == metrics["grads_received"]
    assert (metrics["queue"]["mean"], metrics["queue"]["std"]) == (waiting, 0.0)
    scheme.drain()
    metrics = run(scheme, scheme.version + 1)
    assert metrics["queue_size"] + metrics["draws_in_flight"] == 3  # the drain dropped all earlier batches


@pytest.mark.parametrize("settings", [
    {"col_communication": ASYNC}, {"col_communication": ASYNC, "num_grad_workers": 2}, {}])
def test_requests_of_collection_workers_are_counted(make, settings):
    """Check the number of requests that are in flight when a gradient is ready.

    In asynchronous collection, each worker always has two requests in flight. In synchronous collection, no request is
    in flight when a gradient is ready.
    """
    in_flight = {"col_in_flight": 2, "queue_size": 16} if settings else {}
    metrics = run(make(num_col_workers=3, costs={"step": 0.5}, **settings, **in_flight))
    assert metrics["requests_in_flight"] == (2 * 3 * settings.get("num_grad_workers", 1) if settings else 0)
    assert metrics["draws_in_flight"] == 0


def test_time_to_add_rollouts_includes_waiting_for_a_shard(make):
    """Check `receive_time_ms` if a shard takes 1 s to add a rollout, and accepts only one rollout at a time."""
    costs = {"start": 0.0, "message": 0.0, "step": 0.0, "add": 1.0, "sample": 0.0, "priorities": 0.0, "grad": 0.5,
             "update": 0.0}
    scheme = make({"capacity": 400}, num_col_workers=2, col_communication=ASYNC, num_replay_workers=1, add_in_flight=1,
                  train_batch_size=8, costs=costs)
    metrics = run(scheme, 300)
    assert metrics["rollouts"] > 101
    assert metrics["receive_time_ms"] == pytest.approx(1000.0)
    assert metrics["step_time_ms"] == pytest.approx(500.0)
    assert metrics["draw_time_ms"] == metrics["fetch_time_ms"] == metrics["push_time_ms"] == 0.0


def test_a_step_is_timed_from_its_start_to_the_next_start(make):
    metrics = run(make(costs={"start": 0, "message": 0, "step": 0.5, "grad": 2.0, "update": 0.25}), 20)
    assert metrics["step_time_ms"] == pytest.approx(4250.0)
    assert metrics["receive_time_ms"] == 0.0


def test_weights_for_collection_workers_are_timed(make):
    assert run(make(num_col_workers=2))["push_time_ms"] == 0.0
    assert run(make())["push_time_ms"] is None  # the local worker uses the learner's own weights


def test_the_replay_path_takes_time_on_the_real_clock(make_apex):
    metrics = run(make_apex(runtime="threads"), 15)
    names = ("receive", "push", "draw", "fetch", "priorities", "step", "dequeue", "grad", "apply", "wait", "collect")
    assert [name for name in names if not metrics[f"{name}_time_ms"] > 0.0] == []
    assert metrics["step_time_ms"] > metrics["grad_time_ms"] > metrics["fetch_time_ms"] / 100


def test_a_drain_drops_prefetched_batches(make_apex):
    scheme = make_apex()
    run(scheme)
    assert scheme.metrics()["replay_batches_dropped"] == 0
    scheme.drain()
    run(scheme, scheme.version + 1)
    assert 0 < scheme.metrics()["replay_batches_dropped"] <= 8


def test_a_loop_of_steps_keeps_a_limited_number_of_episodes(make_apex, monkeypatch):
    monkeypatch.setattr("pytorchrl.scheme.updates.statistics._MAX_EPISODES", 3)
    scheme = make_apex()
    run(scheme)
    assert len(scheme.episodes()) == 3
    assert len(scheme.episodes()) == 0
