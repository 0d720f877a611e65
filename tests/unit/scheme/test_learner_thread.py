"""Tests of a learner with asynchronous collection: when, how often and with which lag it uses rollouts."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from pytorchrl import ASYNC, PPO
from pytorchrl.agent.synthetic import SyntheticStorage, synthetic_agent
from pytorchrl.errors import LearnerStarvedError
from pytorchrl.scheme.gradients.sample_queue import SampleQueue
from tests.conftest import seeds

FAST = {"start": 0, "message": 0, "step": 0.001, "grad": 0, "update": 0}
SLOW_LEARNER = FAST | {"grad": 1.0}


@pytest.fixture
def learner(make_scheme):
    """Return a function that makes simulated schemes with asynchronous collection by synthetic workers."""
    def make(size=50, epochs=1, **settings):
        algo, actor, _, envs = synthetic_agent(size=size, num_epochs=epochs)
        return make_scheme(algo=algo, actor=actor, envs=envs, storage=SyntheticStorage, size=size, **({
            "runtime": "simulated", "num_col_workers": 2, "col_communication": ASYNC,
            "grad_communication": ASYNC} | settings))
    return make


@pytest.fixture
def train(check_ledger):
    """Return a function that makes updates, and returns the metrics and the ledger after them."""
    def run(scheme, updates):
        while scheme.version < updates:
            scheme.step()
            check_ledger(scheme)
        return scheme.metrics(), scheme.ledger()
    return run


# Train batches


@pytest.mark.parametrize(("size", "expected"), [(50, 500), (60, 540), (512, 512)])
def test_train_batch_size(learner, train, size, expected):
    scheme = learner(size, train_batch_size=500)
    _, ledger = train(scheme, 5)
    assert ledger["consumed"] == ledger["consumed_unique"] == scheme.version * expected
    storage = scheme.update_worker.local_worker.storage
    assert len(np.unique(np.concatenate(storage.inserted))) == sum(map(len, storage.inserted))


def test_rollouts_of_a_train_batch_have_separate_lags(learner, train):
    """Check that, within a train batch, rollouts of a slow worker have larger lags than the other rollouts."""
    scheme = learner(train_batch_size=300, costs=FAST | {"step@*/CWorker 2": 0.01, "grad": 0.05}, col_in_flight=1)
    metrics, _ = train(scheme, 40)
    assert metrics["policy_lag"]["max"] > metrics["policy_lag"]["p50"]


def test_the_open_train_batch_is_queued(learner):
    """Check that the rollouts of an incomplete train batch count as queued."""
    scheme = learner(train_batch_size=500, costs=FAST, queue_timeout_s=0.2, col_in_flight=1)
    with pytest.raises(LearnerStarvedError):
        scheme.step()
    snapshot = scheme.update_worker.local_worker.ledger.snapshot()
    assert (snapshot.collected, snapshot.in_flight) == (snapshot.queued, 0)
    assert 0 < snapshot.queued < 500
    assert scheme.stop()["dropped"]["shutdown"] >= snapshot.queued


# The queue


def test_queue_policies(learner, train):
    costs = SLOW_LEARNER | {"step": 0.01}
    results = {policy: train(learner(costs=costs, queue_policy=policy, queue_size=8), 60)
               for policy in ("block", "drop_oldest", "drop_newest")}
    for policy, (metrics, ledger) in results.items():
        assert ledger["dropped"]["queue_full"] == 50 * metrics["dropped_train_batches"]
        assert (metrics["dropped_train_batches"] > 100) == (policy != "block")
        assert metrics["queue"]["count"] in (metrics["updates"], metrics["updates"] + 1)
        assert metrics["queue"]["quantiles"][-1] == 7  # the queue of 8 is full, and one train batch was just taken
    lags = {policy: metrics["policy_lag"]["p50"] for policy, (metrics, _) in results.items()}
    assert lags["drop_oldest"] < lags["block"] == 8 < lags["drop_newest"]  # with "block", requests count, too


def test_a_full_queue_blocks_collectors(learner, train):
    metrics, ledger = train(learner(costs=SLOW_LEARNER, queue_size=16), 50)
    assert ledger["collected"] <= 50 * (metrics["updates"] + 1 + 16 + 1 + 2 * 2)
    assert metrics["queue"]["mean"] > 14


def test_a_starved_learner_raises(learner):
    scheme = learner(size=5, costs=FAST | {"step": 1.0}, queue_timeout_s=1.0, col_in_flight=2)
    with pytest.raises(LearnerStarvedError, match=r"^no train batch for 1.0 s: 2 of 2 collection workers alive, 4 "
                                                  r"requests in flight; waiting for GWorker 0/CWorker 1 \(1.1 s\), "
                                                  r"GWorker 0/CWorker 2 \(1.1 s\); raise"):
        scheme.step()
    assert scheme.runtime.now() < 2.0
    assert issubclass(LearnerStarvedError, TimeoutError)


@pytest.mark.parametrize(("on_starved", "warnings"), [("warn", 1), ("wait", 0)])
def test_a_starved_learner_may_keep_waiting(learner, caplog, on_starved, warnings):
    scheme = learner(size=5, costs=FAST | {"step": 1.0}, queue_timeout_s=1.0, on_starved=on_starved,
                     col_in_flight=2)
    scheme.step()
    assert scheme.runtime.now() >= 5.0
    assert [record.getMessage() for record in caplog.records
            if "no train batch for" in record.getMessage()] == warnings * [
        "GWorker 0 is still waiting: no train batch for 1.0 s: 2 of 2 collection workers alive, 4 requests in flight; "
        "waiting for GWorker 0/CWorker 1 (1.1 s), GWorker 0/CWorker 2 (1.1 s)"]


# Several uses


@pytest.mark.parametrize(("settings", "epochs"), [
    ({"num_passes": 3}, 1), ({"num_passes": 2}, 2), ({"num_passes": 4, "minibatch_buffer_size": 3, "ramp": False}, 1)])
def test_only_the_first_use_is_unique(learner, train, settings, epochs):
    scheme = learner(epochs=epochs, costs=SLOW_LEARNER, **settings)
    metrics, ledger = train(scheme, 48)
    assert ledger["consumed"] == 50 * metrics["updates"]
    assert ledger["consumed_unique"] == pytest.approx(ledger["consumed"] / settings["num_passes"] / epochs, abs=100)
    storage = scheme.update_worker.local_worker.storage
    numbers = [tuple(part) for part in storage.inserted]
    assert max(map(numbers.count, numbers)) == settings["num_passes"]


def test_uses_of_a_ring_do_not_count_as_new(learner):
    """Check that 10 train batches of 100 steps, each used several times, count as only 1000 unique steps."""
    scheme = learner(costs=SLOW_LEARNER, train_batch_size=100, minibatch_buffer_size=10, num_passes=10, ramp=False)
    while scheme.ledger()["consumed"] < 8000:
        scheme.step()
    assert scheme.ledger()["consumed_unique"] == 1000
    assert scheme.ledger()["collected"] <= 2900


@pytest.mark.parametrize(("ramp", "first"), [(True, [1, 2, 2]), (None, [1, 2, 2]), (False, [2, 2, 2])])
def test_ramp(learner, train, ramp, first):
    scheme = learner(costs=SLOW_LEARNER, minibatch_buffer_size=2, num_passes=2, ramp=ramp)
    train(scheme, 12)
    numbers = [part[0] for part in scheme.update_worker.local_worker.storage.inserted]
    assert [len(list(group)) for _, group in itertools.groupby(sorted(numbers[:8], key=numbers.index))][:3] == first


def test_a_circular_buffer_holds_the_newest(learner, train):
    """Check that new train batches replace older ones, some before their last use, and some before their first use."""
    settings = {"costs": SLOW_LEARNER | {"step": 0.005}, "minibatch_buffer_size": 4, "num_passes": 8}
    ring, _ = train(learner(**settings), 64)
    scheme = learner(buffer="circular", **settings)
    metrics, ledger = train(scheme, 64)
    assert metrics["policy_lag"]["p50"] < ring["policy_lag"]["p50"]
    assert ledger["dropped"]["queue_full"] == 50 * metrics["dropped_train_batches"] > 0
    assert metrics["passes_cancelled"] > 0
    numbers = [part[0] for part in scheme.update_worker.local_worker.storage.inserted]
    assert all(a != b for a, b in itertools.pairwise(numbers))


def test_old_rollouts_are_mixed_in(learner, train):
    scheme = learner(train_batch_size=150, replay_proportion=0.5, replay_slots=5)
    metrics, ledger = train(scheme, 30)
    # The first three rollouts are new; later, every third rollout is old.
    assert ledger["consumed"] == 150 * metrics["updates"]
    assert ledger["consumed_unique"] == pytest.approx(100 * metrics["updates"], abs=150)
    assert sum(ledger["dropped"].values()) == 0
    assert metrics["rollouts"] == ledger["consumed_unique"] / 50


def test_a_train_batch_with_a_non_finite_gradient_is_not_reused(make_scheme, train):
    scheme = make_scheme(runtime="simulated", col_communication=ASYNC, faults="nan grad.0 p=0.2", num_passes=3,
                         algo=PPO.create_factory(num_epochs=1, num_mini_batch=1))
    metrics, ledger = train(scheme, 40)
    assert metrics["updates_skipped_nan"] > 2
    assert 0 < metrics["passes_cancelled"] <= 2 * metrics["updates_skipped_nan"]
    assert ledger["dropped"]["nan"] > 0


def test_early_stopping_also_cancels_later_uses(make_scheme, train):
    algo = PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=0.1, target_kl=1e-6)
    metrics, ledger = train(make_scheme(runtime="simulated", col_communication=ASYNC, num_passes=3, algo=algo), 20)
    assert metrics["passes_cancelled"] > 0
    assert ledger["dropped"]["early_stop"] > 0


def test_rollouts_are_reported_once(make_scheme, train):
    scheme = make_scheme(runtime="simulated", col_communication=ASYNC, num_passes=3, minibatch_buffer_size=2)
    metrics, ledger = train(scheme, 60)
    assert 16 * metrics["rollouts"] >= ledger["consumed_unique"] > 16 * (metrics["rollouts"] - 3)


@pytest.mark.parametrize("settings", [{}, {"grad_communication": ASYNC}, {"distribute_gradients": True}],
                         ids=["sync", "async", "ranks"])
def test_several_learners_each_have_a_buffer(make_scheme, train, settings):
    scheme = make_scheme(runtime="simulated", num_grad_workers=2, col_communication=ASYNC, num_passes=3,
                         minibatch_buffer_size=2, train_batch_size=32, max_policy_lag=30, queue_policy="drop_oldest",
                         **settings)
    metrics, ledger = train(scheme, 32)
    assert ledger["consumed"] > 2 * ledger["consumed_unique"] > 0
    assert metrics["queue"]["count"] > 8
    final = scheme.stop()
    assert final["in_flight"] == final["queued"] == 0
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())


# Lag


@pytest.mark.parametrize(("workers", "settings", "bound"), [
    (2, {}, 1), (8, {}, 1), (1, {}, 1), (1, {"queue_size": 3}, 3), (3, {"queue_size": 2}, 2),
    (3, {"train_batch_size": 150, "epochs": 4}, 4), (8, {"col_in_flight": 3, "epochs": 2}, 2),
    (3, {"num_passes": 2, "minibatch_buffer_size": 3, "ramp": False, "queue_size": 2}, (2 + 3 - 1) * 2),
], ids=str)
def test_queue_size_bounds_the_lag_of_a_slow_learner(learner, train, workers, settings, bound):
    """Check the bound (queue_size + slots - 1) x updates per train batch, once the rollouts of the start are used."""
    scheme = learner(num_col_workers=workers, costs=SLOW_LEARNER, **settings)
    train(scheme, 60)
    lags = scheme.update_worker.statistics._lags
    lags._policy.clear()
    _, ledger = train(scheme, 100)
    assert 0 < max(lags._policy) <= bound
    assert sum(ledger["dropped"].values()) == 0


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_short_queue_delays_no_worker_while_the_learner_waits(learner, train, workers):
    """Check that collection is as fast as with a long queue if it is slower than the learner."""
    times = []
    for queue_size in (1, 16):
        scheme = learner(num_col_workers=workers, costs=FAST | {"grad": 0.0001}, queue_size=queue_size, col_in_flight=1)
        train(scheme, 100)
        times.append(scheme.runtime.now())
    assert times[0] < 1.03 * times[1]


def test_a_short_queue_requests_rollouts_of_all_workers(learner, train):
    scheme = learner(num_col_workers=5, costs=SLOW_LEARNER)
    train(scheme, 60)
    counts = [histogram.total() for histogram in scheme.update_worker.statistics._lags._by_worker.values()]
    assert len(counts) == 5
    assert max(counts) - min(counts) <= 1


def test_max_policy_lag_drops_at_first_use(learner, train):
    settings = {"costs": SLOW_LEARNER, "queue_size": 16}
    free, _ = train(learner(**settings), 60)
    metrics, ledger = train(learner(**settings, max_policy_lag=5, on_policy_lag="drop"), 60)
    assert free["policy_lag"]["max"] > 5 >= metrics["policy_lag"]["max"] > 0
    assert ledger["dropped"]["policy_lag"] >= 50 * metrics["dropped_train_batches"] > 0


@pytest.mark.parametrize(("policy", "warnings"), [("drop", 1), ("wait", 0), (None, 0)])
def test_a_learner_that_drops_most_steps_warns_once(learner, train, caplog, policy, warnings):
    _, ledger = train(learner(costs=SLOW_LEARNER, queue_size=16, max_policy_lag=1, on_policy_lag=policy), 60)
    assert (ledger["dropped"]["policy_lag"] > ledger["collected"] / 2) == bool(warnings)
    assert [record.getMessage().split(" env steps ")[1] for record in caplog.records if "dropped" in record.getMessage()
            ] == warnings * ["were dropped, because their policy lag exceeded max_policy_lag=1 updates; raise "
                             "max_policy_lag, or give on_policy_lag='wait', which delays collection instead"]


def test_only_old_rollouts_are_dropped_from_a_train_batch(learner, train):
    metrics, ledger = train(learner(train_batch_size=300, costs=FAST | {"step@*/CWorker 2": 0.01, "grad": 0.1},
                                    col_in_flight=1, max_policy_lag=2, queue_size=1), 60)
    assert ledger["dropped"]["policy_lag"] > 0 == metrics["dropped_train_batches"]
    assert ledger["consumed"] % 300 > 0 or ledger["consumed"] < 300 * metrics["updates"]


def test_later_uses_of_an_old_train_batch_are_cancelled(learner, train):
    metrics, ledger = train(learner(num_passes=10, queue_size=1, col_in_flight=1, max_policy_lag=6), 60)
    assert metrics["passes_cancelled"] > 0
    assert ledger["consumed"] < 9 * ledger["consumed_unique"]


# The unmarked ones contain each pair of values.
@pytest.mark.parametrize(("train_batch_size", "grad", "limit"), [
    pytest.param(size, grad, limit, marks=[pytest.mark.thorough] if (i + j + k) % 2 else [])
    for i, size in enumerate((None, 200)) for j, grad in enumerate((0.001, 0.02, 0.5)) for k, limit in enumerate((0, 2))
])
def test_waiting_limits_the_lag_without_drops(learner, train, train_batch_size, grad, limit):
    scheme = learner(num_col_workers=4, train_batch_size=train_batch_size, costs=FAST | {"grad": grad},
                     max_policy_lag=limit,
                     on_policy_lag="wait")
    metrics, ledger = train(scheme, 25)
    assert ledger["dropped"]["policy_lag"] == 0
    assert metrics["policy_lag"]["max"] == limit or (train_batch_size and metrics["policy_lag"]["max"] < limit)


def test_rollouts_of_a_straggler_are_dropped_despite_waiting(learner, train):
    scheme = learner(num_col_workers=4, costs=FAST | {"step@*/CWorker 3": 0.02}, max_policy_lag=2, on_policy_lag="wait")
    metrics, ledger = train(scheme, 60)
    assert metrics["policy_lag"]["max"] <= 2
    assert ledger["dropped"]["policy_lag"] > 0


def test_waiting_sends_requests_in_turn_to_all_workers(learner, train):
    scheme = learner(num_col_workers=4, train_batch_size=400, max_policy_lag=3, on_policy_lag="wait", costs=FAST,
                     queue_size=4, col_in_flight=2)
    scheme.start()
    gather, asked = scheme.update_worker.local_worker.collector.strategy, []
    right = gather._request
    gather._request = lambda index: (asked.append(index), right(index))
    train(scheme, 3)
    assert asked[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_queue_serves_the_oldest_version_first(learner, train, monkeypatch):
    """Check that rollouts with the oldest weights are taken first, even if others were queued earlier."""
    settings = {"num_col_workers": 3, "costs": FAST | {"step@*/CWorker 1": 0.003, "grad": 0.06}, "max_policy_lag": 8,
                "queue_size": 16}
    scheme = learner(on_policy_lag="wait", **settings)
    scheme.start()
    right, taken = SampleQueue.take, []

    def take(samples, timeout_s):
        waiting = [batch.version for batch in samples.queue.queue]
        batch = right(samples, timeout_s)
        if waiting:  # if the queue was empty, there is no version to compare with
            assert batch.version == min(waiting)
            taken.append(batch.version != waiting[0])
        return batch
    monkeypatch.setattr(SampleQueue, "take", take)
    train(scheme, 80)
    assert any(taken)


def test_max_weight_sync_delay(learner, train):
    """Check that a worker receives new weights only once per 200 collected steps (four rollouts)."""
    often, _ = train(learner(costs=FAST | {"grad": 0.02}), 60)
    seldom, ledger = train(learner(costs=FAST | {"grad": 0.02}, max_weight_sync_delay=200), 60)
    assert often["weight_pushes"] > 48
    assert ledger["collected"] / 200 - 4 <= seldom["weight_pushes"] - 2 <= ledger["collected"] / 200
    assert seldom["policy_lag"]["mean"] > often["policy_lag"]["mean"]


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_in_flight_budget_and_lag_have_bounds(learner, check_ledger, seed):
    """Check bounds on the unused steps and on the lag, for random sizes and workers of similar speed."""
    rng = random.Random(f"bounds {seed}")
    workers, in_flight, rollout = rng.choice((2, 3)), rng.choice((1, 2, 3)), rng.choice((5, 10))
    item = rollout * rng.choice((1, 2, 4))
    queue_size, slots, passes, epochs = rng.choice((1, 4)), rng.choice((1, 3)), rng.choice((1, 3)), rng.choice((1, 2))
    scheme = learner(rollout, epochs, num_col_workers=workers, col_in_flight=in_flight, train_batch_size=item,
                     queue_size=queue_size, minibatch_buffer_size=slots, num_passes=passes, schedule_seed=seed,
                     costs={"start": 0, "grad": 10 ** rng.uniform(-4, 0)})
    workers_of = scheme.start().local_worker
    most, updates = 0, passes * epochs

    def look():
        nonlocal most
        made = sum(handle.native.worker.collected_steps for handle in workers_of.remote_workers if handle.native.worker)
        snapshot = workers_of.ledger.snapshot()
        most = max(most, made - snapshot.sent)
    scheme.runtime.simulation.after_event = look
    while scheme.version < 60 * updates:
        scheme.step()
        check_ledger(scheme)
    assert 0 < most <= workers * in_flight * rollout + (1 + queue_size + slots) * item
    lag = scheme.metrics()["policy_lag"]["max"]
    assert lag <= updates * (math.ceil(workers * in_flight * rollout / item) + 2 + queue_size + slots)
