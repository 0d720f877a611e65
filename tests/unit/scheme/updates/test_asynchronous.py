"""Check asynchronous gradients: the order of requests, lags, and gradients that are late, pending, bad or lost.

The synthetic agent has one parameter: each gradient is 1, and an update adds it. A chain is the repeated work of one
gradient worker: a rollout (4 steps of 0.25 s) and its gradient.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from pytorchrl import A2C, ASYNC, SYNC, Scheme
from pytorchrl.agent.synthetic import SyntheticAlgorithm, SyntheticStorage, synthetic_agent
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import EnvError, NonFiniteUpdateError, WorkerLostError
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates
from tests.conftest import seeds

FREE = {"start": 0, "message": 0, "step": 0.25, "grad": 0, "update": 0}
# Results that are due at the same virtual time arrive in any order; MOMENT_S later, all of them have arrived.
MOMENT_S = 2.0**-10
APART = "; ".join(f"delay grad.{worker} {0.25 * (worker - 1)}s @ grad 1" for worker in (2, 3, 4))


class Watched:
    """A scheme, with lists of the gradients that its statistics counted as applied or dropped."""

    def __init__(self, scheme):
        self.scheme, self.applied, self.lags, self.senders, self.dropped = scheme, [], [], [], []
        statistics = scheme.start(10**6).statistics
        apply, drop = statistics.apply, statistics.drop

        def watch_apply(gradients, version, info):
            self.applied.append(version)
            self.senders.append([part.worker for part in gradients])
            self.lags += [version - part.weights_version for part in gradients]
            apply(gradients, version, info)

        def watch_drop(gradients, reason):
            self.dropped.append((gradients.worker, reason.value))
            drop(gradients, reason)
        statistics.apply, statistics.drop = watch_apply, watch_drop

    @property
    def in_flight(self):
        return sorted(self.scheme.update_worker.strategy.in_flight.owners())

    @property
    def parameter(self):
        return float(self.scheme.acting_state()["count"])


@pytest.fixture
def make(check_ledger):
    """Return a function that starts watched schemes in the simulated runtime; the test ends with a check of their
    statistics."""
    schemes = []

    def start(num_grad_workers=4, *, agent=None, together=True, costs=None, **settings):
        agent = agent or synthetic_agent(4)
        scheme = Scheme(*agent, num_grad_workers=num_grad_workers, runtime="simulated", seed=1,
                        costs=FREE | (costs or {}), **({"grad_communication": ASYNC} | settings))
        schemes.append(scheme)
        watched = Watched(scheme)
        if together:
            wait = scheme.runtime.wait

            def wait_a_moment_more(futures, timeout_s):
                if wait(futures, timeout_s) and timeout_s > 0:
                    scheme.runtime.sleep(MOMENT_S)
                return wait(futures, 0.0)
            scheme.runtime.wait = wait_a_moment_more
        return watched
    yield start
    for scheme in schemes:
        check_ledger(scheme)
        final = scheme.stop()
        check_ledger(scheme)
        assert final["in_flight"] == final["queued"] == 0
        metrics = scheme.metrics()
        assert metrics["grads_received"] == metrics["grads_applied"] + metrics["grads_held"] + metrics["grads_dropped"]
        assert metrics["grads_held"] == 0
        assert sum(metrics["grads_by_worker"].values()) == metrics["grads_received"]


# updates_per_step


@pytest.mark.parametrize("updates", [10, 2])
def test_a_step_makes_its_updates_and_keeps_every_worker_busy(make, updates):
    watched = make(5, updates_per_step=updates)
    watched.scheme.step()
    assert watched.parameter == watched.scheme.version == updates
    # Every worker has a gradient that is in flight or waits to be used.
    ready = watched.scheme.update_worker.strategy.ready
    assert sorted(watched.in_flight + ready) == list(range(5))
    assert len(ready) == (0 if updates == 10 else 3)
    watched.scheme.step()
    assert watched.parameter == watched.scheme.version == 2 * updates


@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True},
    {"num_col_workers": 2, "col_communication": ASYNC},
], ids=["central", "parallel", "decentralized", "async-collection"])
def test_updates_per_step_is_exact_in_schemes_without_a_thread(make_scheme, settings):
    scheme = make_scheme(updates_per_step=3, runtime="simulated", **settings)
    for number in range(1, 4):
        scheme.step()
        assert scheme.version == 3 * number


def test_updates_of_a_thread_are_awaited(make_scheme):
    scheme = make_scheme(updates_per_step=5, grad_communication=ASYNC)
    for number in range(1, 4):
        scheme.step()
        assert scheme.version >= 5 * number


def test_statistics_are_means_over_the_updates_of_a_step(make_scheme):
    one, five = make_scheme(), make_scheme(updates_per_step=5)
    singles = [one.step() for _ in range(5)]
    means = five.step()
    assert torch.equal(one.acting_state()["all"], five.acting_state()["all"])
    assert means.keys() == singles[0].keys()
    for name in means:  # a plain mean, because all batches have the same size
        assert means[name] == pytest.approx(sum(info[name] for info in singles) / 5, rel=1e-6)
    assert means["loss"] != singles[-1]["loss"]


# Order and lag


def test_lags_of_workers_that_start_together(make):
    watched = make(updates_per_step=12)
    watched.scheme.step()
    assert watched.lags == [0, 1, 2, 3] * 3
    assert watched.senders == [[1], [2], [3], [4]] * 3


def test_lags_of_staggered_workers(make):
    watched = make(updates_per_step=12, faults=APART, together=False)
    watched.scheme.step()
    assert watched.lags == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    assert watched.scheme.metrics()["grad_lag"] == {"mean": 2.5, "max": 3, "p50": 3, "p90": 3}


def test_the_oldest_request_is_handled_first(make):
    watched = make(updates_per_step=31, costs={"step@GWorker 4/*": (10 + 9.5 * MOMENT_S) / 4})
    watched.scheme.step()
    assert watched.scheme.runtime.now() == pytest.approx(10 + 10 * MOMENT_S)
    assert watched.scheme.metrics()["grads_by_worker"] == {"1": 10, "2": 10, "3": 10, "4": 1}
    assert watched.senders[27] == [4]
    assert watched.lags[27] == 27
    assert max(watched.lags[:27] + watched.lags[28:]) == 3


def test_weights_are_stored_once_for_simultaneous_requests(make):
    watched = make(updates_per_step=12)
    puts, put = [], watched.scheme.runtime.put
    watched.scheme.runtime.put = lambda value: (puts.append(value.version), put(value))[1]
    watched.scheme.step()
    assert puts == [0, 4, 8, 12]
    assert watched.scheme.metrics()["weight_pushes"] == 16


# Limits on lag


def late(max_grad_lag, lag_policy):
    return AsynchronousUpdates.Options(max_grad_lag=max_grad_lag, lag_policy=lag_policy)


@pytest.mark.parametrize(("options", "lags", "factors"), [
    (late(0, "scale"), (0, 1, 3), (1, 0.5, 0.25)), (late(2, "scale"), (2, 5), (1, 0.5)),
    (late(0, "drop"), (0, 1, 3), (1, 0, 0)), (late(0, "apply"), (0, 1, 3), (1, 1, 1)),
    (late(None, "apply"), (0, 1, 300), (1, 1, 1)),
])
def test_lag_policies_give_the_documented_factors(options, lags, factors):
    assert tuple(map(options.factor, lags)) == factors


def test_late_gradients_are_scaled(make):
    watched = make(updates_per_step=4, max_grad_lag=0, lag_policy="scale")
    watched.scheme.step()
    assert watched.lags == [0, 1, 2, 3]
    assert watched.parameter == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4, abs=1e-6)
    assert watched.scheme.metrics()["grads_late"] == 3


def test_late_gradients_that_are_applied_are_counted(make):
    watched = make(updates_per_step=8, max_grad_lag=1)
    watched.scheme.step()
    assert watched.parameter == 8
    assert watched.scheme.metrics()["grads_late"] == 4


def test_late_gradients_are_dropped_and_training_continues(make):
    watched = make(updates_per_step=10, max_grad_lag=0, lag_policy="drop")
    watched.scheme.step()
    assert watched.parameter == watched.scheme.version == 10
    assert set(watched.lags) == {0}
    metrics, ledger = watched.scheme.metrics(), watched.scheme.ledger()
    assert metrics["grad_lag"]["max"] == 0
    assert metrics["grads_applied"] == 10
    assert metrics["grads_dropped"] == metrics["grads_late"] == len(watched.dropped) >= 27
    assert ledger["dropped"]["gradient_lag"] == 4 * metrics["grads_dropped"]
    assert ledger["consumed_unique"] == 40


# Aggregates


class BySender(SyntheticAlgorithm):
    """An algorithm with gradient 4 on worker 1 and gradient 0 on worker 2; an update adds the mean."""

    def compute_gradients(self, batch):
        worker = int(batch.action[0]) >> 52
        return [torch.full((1,), 4.0 if worker == 1 else 0.0, dtype=torch.float64)], {"loss": float(worker)}


class UnequalStorage(SyntheticStorage):
    """A storage whose batches count as one sample on worker 1, and as three samples on worker 2."""

    def generate_batches(self, *args, **kwargs):
        for batch in super().generate_batches(*args, **kwargs):
            yield dataclasses.replace(batch, num_samples=1 if int(batch.action[0]) >> 52 == 1 else 3)


def test_an_aggregate_is_the_mean_over_samples(make):
    _, actor, _, envs = synthetic_agent(4)
    agent = (BySender.create_factory(), actor, UnequalStorage.create_factory(4), envs)
    watched = make(2, agent=agent, aggregate=2)
    info = watched.scheme.step()
    assert watched.parameter == 1.0  # (1 * 4 + 3 * 0) / 4
    assert info["loss"] == (1 * 1 + 3 * 2) / 4
    assert watched.senders == [[1, 2]]


def test_the_sender_of_a_pending_gradient_waits(make):
    """Check that a worker whose gradient is not yet applied receives no new request.

    Workers 1 and 2 are fast, and worker 3 is slow.
    """
    watched = make(3, aggregate=3, updates_per_step=1, costs={"step@GWorker 3/*": 2.5})
    watched.scheme.start()
    watched.scheme.step()
    assert watched.scheme.metrics()["grads_by_worker"] == {"1": 1, "2": 1, "3": 1}
    assert watched.scheme.runtime.now() >= 10
    pairs = make(3, aggregate=2, updates_per_step=9, costs={"step@GWorker 3/*": 2.5})
    pairs.scheme.step()
    assert pairs.senders[0] == [1, 2]
    assert set(pairs.lags[:4]) == {0}
    assert pairs.scheme.version == 9


def test_an_aggregate_of_scaled_gradients(make):
    """Check that an update is sum(n s g) / sum(n) for samples n, scales s and gradients g.

    The first two gradients have lag 0. The other two have lag 1, which exceeds the maximum of 0, so their scale is 0.5.
    """
    watched = make(4, aggregate=2, updates_per_step=2, max_grad_lag=0, lag_policy="scale")
    watched.scheme.step()
    assert watched.lags == [0, 0, 1, 1]
    assert watched.parameter == 1.5


@pytest.mark.parametrize("schedule_seed", seeds(2, 4))
def test_an_aggregate_of_all_equals_synchronous_updates_bit_for_bit(make_scheme, schedule_seed):
    settings = {"algo": A2C.create_factory(lr=1e-2), "num_grad_workers": 3, "runtime": "simulated",
                "env_fn": "CartPole-v1"}
    sync = make_scheme(**settings)
    aggregated = make_scheme(grad_communication=ASYNC, aggregate=3, schedule_seed=schedule_seed, **settings)
    for _ in range(12):
        sync_info, info = sync.step(), aggregated.step()
        assert info == sync_info
        assert torch.equal(sync.acting_state()["all"], aggregated.acting_state()["all"])
    single = make_scheme(grad_communication=ASYNC, **settings)
    while single.version < 12:
        single.step()
    assert not torch.equal(sync.acting_state()["all"], single.acting_state()["all"])


# Faults


def test_steps_of_a_killed_worker_are_lost_and_others_continue(make):
    with_loss = make(3, updates_per_step=1, faults="kill grad.3 @ grad 3", together=False, schedule_seed=5)
    without = make(3, updates_per_step=1, together=False, schedule_seed=5)
    counts = []
    for watched in (with_loss, without):
        while watched.scheme.runtime.now() < 30:
            watched.scheme.step()
        counts.append(watched.scheme.metrics()["grads_by_worker"])
    assert counts[0]["1"] == pytest.approx(counts[1]["1"], abs=1)
    assert counts[0]["2"] == pytest.approx(counts[1]["2"], abs=1)
    assert counts[0]["3"] >= 2 + 24
    metrics = with_loss.scheme.metrics()
    assert metrics["workers_restarted"] == 1
    # The ledger lacks the steps that the lost worker had not yet reported; `make` checks that the ledger balances.
    assert metrics["grad_lag"]["max"] <= 5  # the replacement started with the current version, not with 0


@pytest.mark.parametrize("policy", ["restart", "ignore"])
def test_an_aggregate_of_all_after_a_lost_worker(make, policy):
    """Check that an update waits for a replaced worker, but not for an ignored worker."""
    watched = make(3, aggregate=3, faults="kill grad.3 @ grad 2", on_worker_failure=policy)
    for _ in range(4):
        watched.scheme.step()
    assert watched.senders == [[1, 2, 3]] + [[1, 2, 3] if policy == "restart" else [1, 2]] * 3


def test_an_error_is_raised_after_other_results_are_used(make):
    watched = make(3, updates_per_step=1, faults="kill grad.1 @ grad 2", on_worker_failure="raise")
    for _ in range(5):
        watched.scheme.step()
    assert watched.senders == [[1], [2], [3], [2], [3]]
    assert watched.in_flight == [1, 2]
    with pytest.raises(WorkerLostError, match="GWorker 1"):
        watched.scheme.step()


def test_an_environment_error_is_raised_while_an_aggregate_waits(make_scheme):
    scheme = make_scheme(
        env_fn=FaultyEnv, env_kwargs={"fault": "step", "at": 20}, algo=A2C.create_factory(), runtime="simulated",
        num_grad_workers=2, grad_communication=ASYNC, aggregate=2, updates_per_step=20)
    with pytest.raises(EnvError):
        scheme.step()


def test_an_aggregate_with_a_non_finite_gradient_is_skipped(make):
    watched = make(2, aggregate=2, updates_per_step=2, faults="nan grad.2 @ grad 2")
    watched.scheme.step()  # one update is made, and one is skipped
    assert watched.scheme.version == 1
    assert watched.dropped == [(1, "nan"), (2, "nan")]
    watched.scheme.step()
    assert watched.parameter == watched.scheme.version == 3


def test_too_many_consecutive_non_finite_gradients_end_a_step(make):
    watched = make(2, updates_per_step=100, faults="nan grad.* p=1.0")
    with pytest.raises(NonFiniteUpdateError):
        watched.scheme.step()


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_the_ledger_is_exact_with_drops_and_faults(make, check_ledger, seed):
    rng = random.Random(seed)
    workers = rng.randint(2, 5)
    watched = make(workers, together=False, schedule_seed=seed, aggregate=rng.randint(1, workers),
                   agent=synthetic_agent(4, num_epochs=rng.choice((1, 2)), num_mini_batch=rng.choice((1, 2))),
                   updates_per_step=rng.choice((1, 3)), max_grad_lag=rng.choice((0, 1, 2)), lag_policy="drop",
                   on_worker_failure=rng.choice(("restart", "restart", "ignore")),
                   costs={"step": ("exponential", 0.1), "grad": ("exponential", 0.1)},
                   faults=f"kill grad.1 @ grad {rng.randint(1, 9)}; kill grad.2 @ grad {rng.randint(3, 9)}"
                   if workers > 2 else f"kill grad.2 @ grad {rng.randint(1, 9)}")
    for _ in range(30):
        watched.scheme.step()
        check_ledger(watched.scheme)
    late = watched.scheme.metrics()["grads_late"]
    assert all(lag <= watched.scheme.settings["max_grad_lag"] for lag in watched.lags)
    assert len([reason for _, reason in watched.dropped if reason == "gradient_lag"]) == late


# Recording


def test_a_run_with_drops_is_replayed(make_scheme, tmp_path):
    """Check the replay of requests that are sent as soon as a gradient is dropped, before other answers arrive.

    The replay must send them at the same point and with the same weights.
    """
    settings = {"num_grad_workers": 4, "grad_communication": ASYNC, "aggregate": 2, "max_grad_lag": 0,
                "lag_policy": "drop", "algo": A2C.create_factory(), "size": 4, "updates_per_step": 5}
    num_asked = 0
    for seed in range(3):
        path = tmp_path / f"{seed}.jsonl"
        first = make_scheme(runtime="simulated", schedule_seed=seed, record=path, **settings)
        for _ in range(4):
            first.step()
        state, dropped = first.acting_state()["all"], first.metrics()["grads_dropped"]
        first.stop()
        num_asked += path.read_text().count('"asked"')
        again = make_scheme(runtime=None, replay=path, **settings)
        while not again.replay_is_over:
            again.step()
        assert torch.equal(again.acting_state()["all"], state)
        assert again.metrics()["grads_dropped"] == dropped > 0
        again.stop()
    assert num_asked > 0


def test_times_of_the_update_worker(make):
    watched = make(2, updates_per_step=8, costs={"update": 0.125})
    watched.scheme.step()
    metrics = watched.scheme.metrics()
    assert metrics["apply_time_ms"] == pytest.approx(125)
    assert metrics["wait_time_ms"] > 0
    assert metrics["push_time_ms"] == 0  # pushing weights takes no virtual time
    central = make(1, updates_per_step=1, grad_communication=SYNC, together=False)
    central.scheme.step()
    # The time in which the local worker computes its gradient counts as waiting time
    assert central.scheme.metrics()["wait_time_ms"] >= 1000
