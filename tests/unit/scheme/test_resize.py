"""Tests of `Scheme.resize`: the number of collection workers changes under load, and no step or lag is miscounted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pytorchrl import (
    ASYNC,
    DQN,
    PARALLEL,
    PPO,
    Learner,
    OnPolicyActor,
    QActor,
    ReplayBuffer,
    Scheme,
    VecEnv,
)
from pytorchrl.agent.algorithms.epsilon import ladder_epsilon
from pytorchrl.callbacks import Callback
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, InsufficientResourcesError, StoppedError
from tests.conftest import seeds
from tests.unit.scheme.checkpointed import go_on
from tests.unit.scheme.resizing import (  # noqa: F401 - fixtures
    CASES,
    NUMBERS,
    account_fixture,
    make_fixture,
    num_workers,
)


def costs(rng):
    return {name: ("exponential", 10 ** rng.uniform(-3, -1)) for name in ("step", "message", "grad", "update", "add",
                                                                          "sample")}


def step_until(scheme, numbers, check, most=1500):
    """Make updates until the gradient workers have these numbers of collection workers, and a few more."""
    for _ in range(most):
        scheme.step()
        check(scheme)
        if num_workers(scheme) == numbers:
            break
    assert num_workers(scheme) == numbers
    for _ in range(5):
        scheme.step()
        check(scheme)


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", seeds(1, 12))
@pytest.mark.parametrize("case", CASES)
def test_no_step_is_lost_or_used_twice(make, account, check_ledger, case, seed):
    rng = random.Random(f"{case} {seed}")
    scheme = make(schedule_seed=seed, costs=costs(rng), **CASES[case])
    scheme.start()
    account.watch(scheme)
    grads = CASES[case].get("num_grad_workers", 1)
    for number in (*NUMBERS, *rng.sample(range(1, 7), 2)):
        for _ in range(rng.randint(1, 6)):
            scheme.step()
        scheme.resize(num_col_workers=number)
        step_until(scheme, [number] * grads, check_ledger)
        assert scheme.settings["num_col_workers"] == number
        before, expected = len(account.made), set(range(1, number + 1))
        for _ in range(300 if case == "on demand" else 1500):
            if account.collectors(before) == expected:
                break
            scheme.step()
        found = account.collectors(before)
        assert found <= expected
        if case != "on demand":  # these requests go to the first free worker, so some workers may never get one
            assert found == expected
    scheme.drain()
    assert scheme.ledger()["collected"] == len(account.made)
    final = scheme.stop()
    assert check_ledger(scheme) == final
    assert final["collected"] == len(account.made) == len(set(account.made))
    too_old = {"policy_lag"} & {name.removeprefix("max_") for name in CASES[case]}
    assert {reason for reason, steps in final["dropped"].items() if steps} <= {"shutdown", "queue_full"} | too_old
    if "num_passes" not in CASES[case]:
        assert max(Counter(account.used).values()) == 1
    assert set(account.used) <= set(account.made)
    if "num_replay_workers" not in CASES[case]:
        assert len(set(account.used)) >= final["consumed_unique"] > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("case", [name for name, settings in CASES.items() if not settings.keys() & {
    "inference", "num_replay_workers", "distribute_gradients"}])
def test_lags_are_exact(make, account, check_ledger, case):
    scheme = make(costs=costs(random.Random(case)), **CASES[case])
    scheme.start()
    account.watch(scheme)
    for number in NUMBERS:
        scheme.resize(num_col_workers=number)
        step_until(scheme, [number] * CASES[case].get("num_grad_workers", 1), check_ledger)
    for _ in range(40):
        scheme.step()
    while len(account.lags) <= 20:
        scheme.step()
    scheme.drain()  # a gradient that has not been received yet is missing from the metrics
    lags, measured = account.lags, scheme.metrics()["policy_lag"]
    assert len(lags) > 20
    assert measured["max"] == max(lags)
    assert CASES[case].get("col_communication") is ASYNC or max(lags) == 0
    if CASES[case].get("num_grad_workers", 1) == 1:
        assert measured["mean"] == pytest.approx(sum(lags) / len(lags))


@pytest.mark.parametrize("case", ["async, 1 sync", "sync, 1 sync", "async, 2 async", "central inference", "shards"])
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_workers_may_be_lost_during_a_resize(make, account, check_ledger, caplog, case, seed):
    scheme = make(schedule_seed=seed, costs=costs(random.Random(seed)), faults="kill col.* p=0.02", **CASES[case])
    for number in (*NUMBERS, 6, 2):
        scheme.resize(num_col_workers=number)
        step_until(scheme, [number] * CASES[case].get("num_grad_workers", 1), check_ledger)
    assert "has been killed" in caplog.text
    ledger = scheme.drain()
    assert ledger["in_flight"] == ledger["queued"] == 0
    final = scheme.stop()
    assert check_ledger(scheme) == final
    assert final["collected"] <= len(account.made)
    assert max(Counter(account.used).values()) == 1


@pytest.mark.parametrize("case", ["async, 1 sync", "sync, 1 async", "async, 2 async", "ranks"])
def test_resize_on_threads(make_scheme, check_ledger, recorder, case):
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, num_col_workers=2, **CASES[case])
    recorder.made.clear()
    for number in NUMBERS:
        scheme.step()
        scheme.resize(num_col_workers=number)
        step_until(scheme, [number] * CASES[case].get("num_grad_workers", 1), check_ledger)
    final = scheme.stop()
    assert final["collected"] == len(recorder.made) == len(set(recorder.made))
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    inserted = Counter(recorder.inserted)
    assert max(inserted.values()) == 1
    assert inserted.keys() <= set(recorder.made)


def test_an_index_that_comes_back_has_new_random_numbers(make_scheme, all_collectors):
    """The third worker leaves twice and comes back twice; it never has the seeds of another worker."""
    def seeds_of(scheme):
        return {(handle.native.worker.index_worker, handle.native.worker.incarnation):
                (tuple(handle.native.worker.envs.seeds), handle.native.worker.algo.generator.initial_seed())
                for _, handle in all_collectors(scheme)}

    def run():
        scheme, found = make_scheme(num_col_workers=3), {}
        for number in (3, 2, 3, 2, 3):
            scheme.resize(num_col_workers=number)
            step_until(scheme, [number], lambda scheme: None)
            found |= seeds_of(scheme)
        scheme.stop()
        return found

    found = run()
    assert set(found) == {(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)}
    assert len({number for numbers, _ in found.values() for number in numbers}) == 2 * len(found)
    assert len({seed for _, seed in found.values()}) == len(found)
    assert run() == found


def test_a_new_worker_has_the_present_weights_and_moments(make_scheme, all_collectors):
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,),
                                         normalize_obs=True)
    scheme = make_scheme(envs=envs, actor=actor, num_col_workers=2, algo=PPO.create_factory(
        num_epochs=1, num_mini_batch=1, lr=1e-2))
    for _ in range(5):
        scheme.step()
    before = scheme.acting_state()
    scheme.resize(num_col_workers=4)
    scheme.step()
    for _, handle in all_collectors(scheme)[2:]:
        worker = handle.native.worker
        assert worker.version == 5
        for name, value in worker.algo.acting_state().items():
            assert (value == before[name]).all()
    assert scheme.metrics()["policy_lag"]["max"] == 0


def test_workers_that_leave_get_no_more_requests(make, account):
    """The learner is so slow that all rollouts are finished, and wait for the queue, when the workers are to leave."""
    scheme = make(num_col_workers=8, col_communication=ASYNC, queue_size=1, costs={"grad": 1.0, "step": 0.01})
    for _ in range(30):
        scheme.step()
    for number in (9, 3):
        scheme.resize(num_col_workers=number)
    before = len(account.made)
    step_until(scheme, [3], lambda scheme: None)
    assert scheme.update_worker.local_worker.collector.resizing.peak == 2
    for _ in range(40):  # one worker at a time gets a request
        scheme.step()
    later = Counter(number >> 40 & 0xFFF for number in account.made[before:])
    assert max(later[index] for index in range(4, 9)) == 0
    assert min(later[index] for index in range(1, 4)) > 0


def test_exploration_follows_the_number(make_scheme, all_collectors):
    envs = VecEnv.create_factory("CartPole-v1", None, 2)
    actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,))
    scheme = Scheme(DQN.create_factory(epsilon_per_worker=True, start_steps=8, mini_batch_size=4), actor,
                    ReplayBuffer.create_factory(100, rollout_size=4), envs, num_col_workers=2, num_grad_workers=2,
                    runtime="threads", seed=1)
    try:
        for numbers in ((3, 1), (1, 4), 2):
            scheme.resize(num_col_workers=numbers)
            total = sum(numbers) if isinstance(numbers, tuple) else 2 * numbers
            for _ in range(20):
                scheme.step()
            scheme.drain()
            used = [handle.native.worker.algo._ladder_epsilon for _, handle in all_collectors(scheme)]
            assert used == [ladder_epsilon(place, total) for place in range(total)]
    finally:
        scheme.stop()


def test_batches_follow_the_number(make_scheme):
    scheme = make_scheme(num_col_workers=2, algo=PPO.create_factory(num_epochs=1, mini_batch_size=16))
    sizes = []
    for number in (2, 4, 1):
        scheme.resize(num_col_workers=number)
        before, updates = scheme.ledger()["consumed_unique"], scheme.version
        go_on(scheme, 1)
        sizes.append((scheme.ledger()["consumed_unique"] - before, scheme.version - updates))
    assert sizes == [(32, 2), (64, 4), (16, 1)]


def test_rounds_that_were_requested_ahead(make_scheme, check_ledger):
    scheme = make_scheme(algo=PPO.create_factory(num_epochs=1, num_mini_batch=1, advantage_normalization="none"),
                         runtime="simulated", num_col_workers=2, train_batch_size=96, microbatch_size=16, prefetch=1)
    for number in (2, *NUMBERS, 5):
        scheme.resize(num_col_workers=number)
        step_until(scheme, [number], check_ledger)
    final = scheme.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())


def test_a_tuple_has_one_number_for_each_gradient_worker(make):
    scheme = make(num_grad_workers=2)
    scheme.step()
    scheme.resize(num_col_workers=(3, 1))
    step_until(scheme, [3, 1], lambda scheme: None)
    assert scheme.settings["num_col_workers"] == [3, 1]
    with pytest.raises(ConfigError, match="num_col_workers has 3 numbers for 2 gradient workers"):
        scheme.resize(num_col_workers=(1, 2, 3))


def test_a_replaced_gradient_worker_has_the_new_number(make, check_ledger):
    scheme = make(num_grad_workers=2, faults="kill grad.1 @ grad 30")
    scheme.resize(num_col_workers=4)
    step_until(scheme, [4, 4], check_ledger)
    scheme.resize(num_col_workers=3)
    for _ in range(60):
        scheme.step()
    assert scheme.metrics()["workers_restarted"] == 1
    assert num_workers(scheme) == [3, 3]


def test_resize_before_the_start_and_after_the_end(make):
    scheme = make()
    scheme.resize(num_col_workers=5)
    scheme.step()
    assert num_workers(scheme) == [5]
    scheme.stop()
    with pytest.raises(StoppedError, match="number of workers cannot change"):
        scheme.resize(num_col_workers=2)


def test_one_remote_worker_can_become_several(make):
    scheme = make(num_col_workers=1, col_execution=PARALLEL)
    for number in (1, 3, 1):
        scheme.resize(num_col_workers=number)
        step_until(scheme, [number], lambda scheme: None)


@pytest.mark.parametrize(("settings", "number", "text"), [
    ({"num_col_workers": 1}, 4, "collection is central.*col_execution='Parallel'"),
    ({"num_col_workers": 1, "col_communication": ASYNC}, 4, "collection is central"),
    ({}, 0, "num_col_workers must be"), ({}, True, "num_col_workers must be"), ({}, 2.5, "num_col_workers must be"),
    ({"inference": "central", "inference_batch": 2, "col_communication": ASYNC}, 1, "inference_batch must not exceed"),
])
def test_numbers_that_make_no_sense_are_refused(make, settings, number, text):
    scheme = make(**settings)
    scheme.step()
    before = scheme.settings["num_col_workers"]
    with pytest.raises(ConfigError, match=text):
        scheme.resize(num_col_workers=number)
    assert scheme.settings["num_col_workers"] == before
    scheme.step()


def test_too_few_workers_for_the_batches_are_refused(make_scheme):
    scheme = make_scheme(num_col_workers=3, num_envs=1, size=4, algo=PPO.create_factory(num_mini_batch=12))
    with pytest.raises(ConfigError, match="num_mini_batch must not exceed the batch: batch 8 = 2 collection workers"):
        scheme.resize(num_col_workers=2)


def test_colocated_workers_cannot_become_more(make):
    scheme = make(runtime="ray", placement="colocate", num_grad_workers=2, num_col_workers=3)
    scheme.resize(num_col_workers=2)
    with pytest.raises(ConfigError, match="can only become smaller: it is 4 in total, got 6"):
        scheme.resize(num_col_workers=3)
    make(runtime="ray", num_grad_workers=2, num_col_workers=2).resize(num_col_workers=3)


def test_missing_resources_leave_everything_as_it_is(make, monkeypatch):
    scheme = make()
    scheme.step()

    def fit(requests):
        assert [(name, count) for name, count, _ in requests] == [("collection workers", 3)]
        raise InsufficientResourcesError("too few CPUs")
    monkeypatch.setattr(scheme.runtime, "fit_resources", fit)
    with pytest.raises(InsufficientResourcesError, match="too few CPUs"):
        scheme.resize(num_col_workers=5)
    scheme.resize(num_col_workers=1)
    assert scheme.settings["num_col_workers"] == 1
    step_until(scheme, [1], lambda scheme: None)


def test_a_recorded_run_cannot_be_resized(make, tmp_path):
    scheme = make(col_communication=ASYNC, record=str(tmp_path / "run.jsonl"))
    scheme.step()
    with pytest.raises(ConfigError, match=r"recorded or replayed cannot change.*leave record and replay out"):
        scheme.resize(num_col_workers=3)


def test_a_gradient_worker_of_central_collection_refuses_a_number(make):
    with pytest.raises(ConfigError, match="collection is central"):
        make(num_col_workers=1).update_worker.local_worker.resize(2)


def test_a_callback_can_resize(make_scheme):
    class Grow(Callback):
        def on_step(self, learner, info):
            if learner.updates == 4:
                learner.scheme.resize(num_col_workers=4)

    scheme = make_scheme(num_col_workers=2)
    learner = Learner(scheme, target_steps=600, callbacks=[Grow()], progress=False)
    learner.train()
    assert len(scheme.metrics()["by_worker"]) == 1 + 4
    learner.stop()
