"""Tests of `drain()`: afterwards nothing is in flight or queued, no step is lost, and the scheme can continue."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pytorchrl import ASYNC, PPO, SYNC, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, DrainingError, InjectedFault, StoppedError
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.counters import WorkerCounters
from tests.conftest import pairwise, seeds
from tests.unit.scheme.conftest import PATTERNS

LEARNER_THREAD = {"num_col_workers": 3, "col_communication": ASYNC, "grad_communication": ASYNC}
SHARDS = {**LEARNER_THREAD, "num_replay_workers": 2, "train_batch_size": 8}


@pytest.fixture
def make():
    """Return a function that makes simulated schemes of the synthetic agent; all schemes are stopped after the test."""
    schemes = []

    def make_(agent=None, **settings):
        parts = synthetic_agent(**{"size": 4, "num_epochs": 2, "num_mini_batch": 2,
                                   "capacity": 400 if "num_replay_workers" in settings else None} | (agent or {}))
        schemes.append(Scheme(*parts, **{"seed": 1, "runtime": "simulated"} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def drained(scheme, check_ledger):
    """Drain the scheme, check that no worker still has pending steps, and return the ledger."""
    ledger = scheme.drain()
    assert ledger == check_ledger(scheme)
    assert ledger["in_flight"] == ledger["queued"] == 0
    root = scheme.update_worker
    for worker in [root.local_worker, *(handle.native.worker for handle in root.remote_workers)]:
        if worker is None:  # the worker was lost, and is not replaced yet
            continue
        assert worker.collector.queue.empty()
        counters = WorkerCounters()
        worker.collector.count(counters)
        worker.batch_source.count(counters)
        assert counters.requests_in_flight == 0
        assert worker.shards is not None or counters.queued_batches == 0
        assert worker.shards is None or worker.shards.is_idle
    return ledger


def go_on(scheme, count):
    target = scheme.version + count
    while scheme.version < target:
        scheme.step()


def made_by(scheme):
    """Return the number of env steps that all collectors have taken."""
    root = scheme.update_worker
    total = 0
    for worker in [root.local_worker, *(handle.native.worker for handle in root.remote_workers)]:
        for collector in [worker.local_worker, *(handle.native.worker for handle in worker.remote_workers)]:
            total += collector.envs._num_steps if collector.envs is not None else 0
    return total


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_every_pattern_can_be_drained(make, check_ledger, pattern, seed):
    rng = random.Random(f"{seed} {pattern}")
    costs = {name: ("exponential", 10 ** rng.uniform(-4, -1)) for name in ("step", "message", "grad", "update")}
    scheme = make(schedule_seed=seed, costs=costs, **pattern)
    for _ in range(4):
        go_on(scheme, rng.randint(1, 7))
        version = scheme.version
        ledger = drained(scheme, check_ledger)
        in_thread = pattern["grad_communication"] is ASYNC and pattern["num_grad_workers"] == 1
        assert version <= scheme.version <= version + in_thread
        assert ledger["collected"] == made_by(scheme)  # the environments counted the same number of steps
        assert drained(scheme, check_ledger) == ledger  # a second drain changes nothing
        assert made_by(scheme) == ledger["collected"]
    final = scheme.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    assert {name for name, steps in final["dropped"].items() if steps} <= {"shutdown"}


@pytest.mark.parametrize("settings", [
    *pairwise(PATTERNS), pytest.param(SHARDS, id="shards"),
    pytest.param({**LEARNER_THREAD, "inference": "central"}, id="central inference")])
def test_a_scheme_can_be_drained_before_its_first_update(make, check_ledger, settings):
    """Check that collection starts after a drain, as for a checkpoint, although it has never run before."""
    scheme = make(**settings)
    scheme.start()
    drained(scheme, check_ledger)
    go_on(scheme, 2)
    drained(scheme, check_ledger)


@pytest.mark.parametrize("settings", [
    {**LEARNER_THREAD, "queue_size": 1, "costs": {"grad": 1.0}},
    {**LEARNER_THREAD, "train_batch_size": 10, "minibatch_buffer_size": 2, "num_passes": 3},
    {**LEARNER_THREAD, "max_policy_lag": 4, "on_policy_lag": "wait"},
    {**LEARNER_THREAD, "buffer": "circular", "num_passes": 2},
    {"num_col_workers": 2, "train_batch_size": 40},
    {"num_grad_workers": 3, "grad_communication": ASYNC, "aggregate": 2},
    {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "distribute_gradients": True},
    {"num_grad_workers": 2, "distribute_gradients": True}, {"num_col_workers": 3, "col_fraction_workers": 0.6},
], ids=["slow-learner", "train-batches", "wait", "circular", "rounds", "aggregate", "rapid", "decentralized",
        "preemptive"])
def test_other_settings_can_be_drained(make, check_ledger, settings):
    scheme = make(**settings)
    for _ in range(4):
        go_on(scheme, 3)
        drained(scheme, check_ledger)


def test_microbatches_can_be_drained(make_scheme, check_ledger, one_batch):
    scheme = make_scheme(algo=one_batch, runtime="simulated", num_col_workers=2, train_batch_size=96,
                         microbatch_size=16,
                         norm_over="microbatch", prefetch=1)
    for _ in range(3):
        scheme.step()
        drained(scheme, check_ledger)


@pytest.mark.parametrize("settings", [
    {}, {"num_replay_workers": 1}, {"num_col_workers": 1}, {"grad_communication": "synchronous"},
    {"num_grad_workers": 2},
    {"min_replay_ratio": 4.0, "costs": {"grad": 1.0}}, {"max_replay_ratio": 0.5},
    {"add_in_flight": 1, "costs": {"add": 0.1}}],
    ids=["apex", "one-shard", "one-collector", "learner-in-turn", "gorila", "collection-waits", "learning-waits",
         "slow-shards"])
def test_replay_keeps_its_steps_and_accepts_arriving_ones(make, check_ledger, settings):
    scheme = make(**{**SHARDS, **settings})
    for _ in range(3):
        go_on(scheme, 5)
        before = scheme.ledger()
        ledger = drained(scheme, check_ledger)
        assert ledger["resident"] >= before["resident"] > 0
        assert ledger["dropped"]["shutdown"] == 0
        assert ledger["collected"] == made_by(scheme)


@pytest.mark.parametrize("num_grad_workers", [1, 2])
def test_drain_does_not_wait_for_a_learner_that_waits_for_data(make, check_ledger, num_grad_workers):
    """Check that `drain` takes less than 100 s of virtual time, and does not wait until learning starts."""
    scheme = make(**{**SHARDS, "learning_starts": 300, "queue_timeout_s": 1e5, "num_grad_workers": num_grad_workers,
                     "costs": {"step": 10.0}})
    if num_grad_workers == 1:
        scheme.start()
        root = scheme.update_worker
        scheme.runtime.start_thread(root.updater)
    else:
        root = scheme.start()
        root.strategy.start()
        root.strategy.send_requests()
    scheme.runtime.sleep(100.0)
    start = scheme.runtime.now()
    ledger = scheme.drain(200.0)
    assert scheme.runtime.now() - start < 100.0
    assert ledger["in_flight"] == ledger["queued"] == 0 < ledger["resident"]
    assert scheme.version == 0
    if num_grad_workers == 2:
        assert scheme.metrics()["grads_empty"] == 2


def test_draining_does_not_discard_samples_of_a_learners_replay(make, check_ledger):
    scheme = make({"capacity": 50, "num_epochs": 1, "num_mini_batch": 3})
    go_on(scheme, 1)
    ledger = drained(scheme, check_ledger)
    scheme.step()
    # The second update needs no new steps, because the first rollout provides three batches.
    assert scheme.ledger()["collected"] == ledger["collected"] == 4
    assert ledger["dropped"]["shutdown"] == 0


def test_rollouts_that_miss_the_deadline_are_lost(make, check_ledger):
    scheme = make(**LEARNER_THREAD, faults="hang col.2 @ step 30", worker_timeout_s=1e4)
    while scheme.ledger()["collected"] < 200:
        scheme.step()
    start = scheme.runtime.now()
    ledger = scheme.drain(5.0)
    assert 5.0 <= scheme.runtime.now() - start < 7.0
    assert ledger["in_flight"] == ledger["queued"] == 0
    go_on(scheme, 200)
    while scheme.metrics()["workers_restarted"] < 1:
        scheme.step()
    check_ledger(scheme)


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [LEARNER_THREAD, SHARDS, {"num_grad_workers": 2, "grad_communication": ASYNC},
                                      {"num_grad_workers": 2, "num_col_workers": 2}],
                                      ids=["learner", "shards", "a3c", "sync"])
@pytest.mark.parametrize("seed", range(5))
def test_workers_may_be_lost_while_draining(make, check_ledger, settings, seed):
    faults = {"num_replay_workers": "kill shard.* p=0.01; kill col.* p=0.002"}.get(
        next(iter(settings.keys() & {"num_replay_workers"}), ""), "kill col.* p=0.003")
    scheme = make(**settings,
                  **({"faults": faults} if settings.get("num_col_workers") else {"faults": "kill grad.* p=0.01"}),
                  schedule_seed=seed)
    for _ in range(5):
        go_on(scheme, 6)
        drained(scheme, check_ledger)
    final = scheme.stop()
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert final["collected"] == places + sum(final["dropped"].values())


def test_drain_raises_the_error_of_a_worker(make):
    scheme = make(**LEARNER_THREAD, faults="raise col.2 @ step 2")
    scheme.start()
    scheme.runtime.start_thread(scheme.update_worker.updater)
    scheme.runtime.sleep(30.0)
    with pytest.raises(InjectedFault):
        scheme.drain()


def test_drain_works_on_threads(make_scheme, check_ledger, some_pattern):
    scheme = make_scheme(**some_pattern)
    for _ in range(2):
        scheme.step()
        ledger = scheme.drain(30.0)
        assert ledger["in_flight"] == ledger["queued"] == 0
        assert ledger == check_ledger(scheme)
    scheme.step()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("communication", [ASYNC, SYNC])
def test_normalizers_do_not_count_observations_of_dropped_batches(make_scheme, num_steps, communication):
    """Check that a train batch of which a drain drops the second half does not change the normalizer later."""
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=1)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, normalize_obs=True)
    scheme = make_scheme(envs=envs, actor=actor, algo=PPO.create_factory(num_epochs=1, num_mini_batch=2),
                         num_grad_workers=2, grad_communication=communication, runtime="simulated",
                         costs={"step": 0.01, "grad": 0.1, "message": 0.001, "update": 0.01})
    go_on(scheme, num_steps)
    scheme.drain()
    for _ in range(8):
        scheme.step()
        assert scheme.acting_state()["obs_moments.0.count"] <= scheme.ledger()["consumed_unique"]
    assert scheme.acting_state()["obs_moments.0.count"] > 0


def test_drain_before_the_start_has_no_effect_and_after_the_end_is_refused(make):
    scheme = make()
    assert scheme.drain()["collected"] == 0
    scheme.step()
    final = scheme.stop()
    with pytest.raises(StoppedError, match=r"has been stopped, .* ledger\(\) returns its final ledger"):
        scheme.drain()
    assert scheme.ledger() == final


@pytest.mark.parametrize("timeout_s", [0, -1.0, True, "60", float("inf")])
def test_invalid_timeouts_are_refused(make, timeout_s):
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds > 0"):
        make().drain(timeout_s)


def test_a_recorded_run_cannot_be_drained(make_scheme, tmp_path):
    scheme = make_scheme(algo=PPO.create_factory(), record=str(tmp_path / "run.jsonl"))
    scheme.step()
    with pytest.raises(ConfigError, match="a run that is recorded or replayed cannot be drained"):
        scheme.drain()


def test_announcements_that_arrive_late_change_nothing():
    """Check the numbers of announced and completed drains, of which a new worker may have missed some."""
    thread = SimpleNamespace(_drain_announced=0, _drains=0)

    def announced(number):
        CollectorThread.announce_drain(thread, number)
        return CollectorThread.is_draining.fget(thread)
    assert not CollectorThread.is_draining.fget(thread)
    assert announced(2)
    thread._drains = 2
    assert not announced(1)
    assert announced(4)
    assert announced(2)  # does not revoke drain 4


@pytest.fixture
def local_thread():
    """Return a collector thread that is not started, and whose local worker collects."""
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))
    worker = CWorker(0, CWorkerSet.create_factory(1, PPO.create_factory(), actor, GAEBuffer.create_factory(4), envs))
    yield CollectorThread(0, worker, [])
    worker.close()


def test_a_drain_of_any_number_ends_the_finished_collection(local_thread):
    for number in (3, 5):
        local_thread.finish_collection()
        with pytest.raises(DrainingError, match="has used all its data"):
            local_thread.check_remaining()
        assert local_thread.is_used_up
        local_thread.drain(number, 5.0)
        assert not local_thread.is_draining
        assert not local_thread.is_used_up
        local_thread.check_remaining()
        local_thread.step()
        local_thread.check_remaining()


def test_an_interruption_and_an_error_of_the_thread_end_a_replay():
    """Check the calls of the journal: otherwise, threads would wait for their turns in the record."""
    called, failure = [], ValueError("a worker failed")

    def fail():
        raise failure
    journal = SimpleNamespace(release=lambda: called.append("released"), fail=called.append)
    closing = SimpleNamespace(set=lambda: called.append("closing"))
    thread = SimpleNamespace(
        _journal=journal, _closing=closing, stopped=False, step=fail, failure=None, remote_workers=[],
        local_worker=SimpleNamespace(interrupt=lambda: called.append("local")),
        _pause_point=SimpleNamespace(pause_if_requested=lambda is_stopped: None))
    CollectorThread.interrupt(thread)
    assert called == ["closing", "released", "local"]
    CollectorThread.run(thread)
    assert (called[3:], thread.failure) == ([failure], failure)
