"""Every option of `Scheme` changes something that can be seen from outside."""

from __future__ import annotations

import itertools
import json
import threading
import time
import types

import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, SYNC, GAEBuffer, OnPolicyActor, VecEnv, linear
from pytorchrl.envs.testing import CountingEnv, SleepEnv
from pytorchrl.errors import LearnerStarvedError
from pytorchrl.runtime import CPU_RESOURCES, Handle, Journal, Outcome, ThreadRuntime
from pytorchrl.scheme.settings import known_keywords
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.requests import Requests
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.updates.statistics import Statistics


def _parameters_after(scheme, num_updates):
    for _ in range(num_updates):
        scheme.step()
    return scheme.acting_state()["all"]


# Compression


def test_compress_data_to_send(make_scheme):
    plain, packed = make_scheme(num_col_workers=2), make_scheme(num_col_workers=2, compress_data_to_send=True)
    assert torch.equal(_parameters_after(plain, 6), _parameters_after(packed, 6))
    plain, packed = plain.metrics(), packed.metrics()
    assert plain["bytes_in"] == plain["bytes_in_raw"] > 0
    assert packed["bytes_in_raw"] == plain["bytes_in_raw"]
    assert packed["bytes_in"] != packed["bytes_in_raw"]


def test_compressed_data_is_smaller(make_scheme):
    scheme = make_scheme(num_col_workers=2, compress_data_to_send=True, size=256)
    scheme.step()
    metrics = scheme.metrics()
    assert metrics["bytes_in"] < 0.8 * metrics["bytes_in_raw"]


def test_compress_grads_to_send(make_scheme, monkeypatch):
    received = []
    receive = Requests.poll

    def poll(self, timeout_s):
        for index, answer in receive(self, timeout_s):
            received.extend(type(vector) for vector in getattr(answer, "vectors", ()))
            yield index, answer
    monkeypatch.setattr(Requests, "poll", poll)
    plain = _parameters_after(make_scheme(num_grad_workers=2), 4)
    assert set(received) == {np.ndarray}
    received.clear()
    packed = _parameters_after(make_scheme(num_grad_workers=2, compress_grads_to_send=True, size=32), 4)
    assert set(received) == {codecs.Packed}
    assert torch.equal(_parameters_after(make_scheme(num_grad_workers=2, size=32), 4), packed)
    assert not torch.equal(plain, packed)


# Early ends of synchronous rounds


class FirstIsSlow:
    """Makes environments of which the first made after the probe is slow."""

    def __init__(self, step_s):
        self._step_s, self._made, self._lock = step_s, itertools.count(-1), threading.Lock()

    def __call__(self):
        with self._lock:
            number = next(self._made)
        return SleepEnv(step_s=self._step_s if number == 0 else 0.0)


def _rounds(make_scheme, one_batch, **settings):
    """Lengths of the rollouts of three rounds of 3 workers, one of them slow: 20 ms a step of 40."""
    rounds = []

    class Watched(GAEBuffer):
        def insert_data_slice(self, rollouts):
            rounds.append(sorted(rollout.num_steps for rollout in rollouts))
            super().insert_data_slice(rollouts)
    scheme = make_scheme(FirstIsSlow(0.02), num_envs=1, size=40, storage=Watched, algo=one_batch, num_col_workers=3,
                         **settings)
    for _ in range(3):
        scheme.step()
    metrics, ledger = scheme.metrics(), scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] == sum(map(sum, rounds))  # what was held is used
    return rounds, metrics["rollouts_preempted"]


def test_col_fraction_workers_ends_rounds_early(make_scheme, one_batch):
    full, preempted = _rounds(make_scheme, one_batch)
    assert full == [[40, 40, 40]] * 3
    assert preempted == 0
    short, preempted = _rounds(make_scheme, one_batch, col_fraction_workers=0.6, fraction_samples=0.1)
    assert all(lengths[1:] == [40, 40] and 4 <= lengths[0] < 40 for lengths in short)
    assert preempted == 3


def test_fraction_samples_is_what_a_stopped_worker_collects_at_least(make_scheme, one_batch):
    few, _ = _rounds(make_scheme, one_batch, col_fraction_workers=0.6, fraction_samples=0.1)
    many, _ = _rounds(make_scheme, one_batch, col_fraction_workers=0.6, fraction_samples=0.75)
    assert all(30 <= lengths[0] < 40 for lengths in many)
    assert min(lengths[0] for lengths in few) < 30


class InstantRuntime(ThreadRuntime):
    """Calls are only written down; the test says which are done."""

    def __init__(self):
        super().__init__()
        self.calls, self.signals, self.done = [], [], []

    def submit(self, handle, method, args, kwargs):
        future = _FakeFuture(handle.name)
        self.calls.append((handle.name, method, future))
        return future

    def signal(self, handle, method, args, kwargs):
        self.signals.append((handle.name, method, args))

    def wait(self, futures, timeout_s):
        done = self.done.pop(0)
        return [future for future in futures if future.worker in done]

    def outcome(self, future, timeout_s):
        return Outcome(future.worker, Rollout(
            data=None, num_env_steps=1, size=1, collected_steps=1, weights_version=0, worker=int(future.worker),
            sequence=1))


class _FakeFuture:
    def __init__(self, worker):
        self.worker = worker


def _fake_workers(number):
    runtime = InstantRuntime()
    return runtime, [Handle(runtime, str(index), None) for index in range(number)]


def _supervisor(workers, runtime):
    return Supervisor(workers, lambda place: None, runtime, Supervisor.Options(on_worker_failure="raise"))


class _FakeWeights:
    """Weights that nobody is due; each time a request could carry new ones is written down."""

    def __init__(self, steps):
        storage = types.SimpleNamespace(rollout_size=6)
        self.local_worker = types.SimpleNamespace(journal=Journal(), storage=storage, num_envs=1)
        self.watch, self.num_rollouts_since, self._steps = Stopwatch(lambda: 0.0), 0, steps

    def attach_due(self, index=None):
        self._steps.append("refresh")

    def take(self, index):
        return None

    def delivered(self, index, num_steps):
        pass


def _collaborators(workers, runtime, steps):
    ledger = Ledger()
    return workers, runtime, _supervisor(workers, runtime), ledger, _FakeWeights(steps)


def _barrier(workers, runtime):
    options = Barrier.Options(col_fraction_workers=0.5, fraction_samples=0.5)  # half of a rollout: three steps
    return Barrier(*_collaborators(workers, runtime, []), options, 60.0)


def test_workers_that_finish_at_the_same_moment_end_a_round_too():
    """More than enough at once: the rest is told to stop all the same."""
    runtime, workers = _fake_workers(4)
    runtime.done = [["0", "2", "3"], [], ["1"]]
    rounds = []
    _barrier(workers, runtime).step(rounds.append)
    assert {(name, method, args) for name, method, args in runtime.signals} == {("1", "preempt", (1, 3))}
    assert [[rollout.worker for rollout in item] for item in rounds] == [[0, 1, 2, 3]]


def test_nobody_is_told_to_stop_before_enough_have_finished():
    runtime, workers = _fake_workers(4)
    runtime.done = [["0"], ["1", "2", "3"]]
    _barrier(workers, runtime).step(lambda item: None)
    assert runtime.signals == []


# Asynchronous collection


@pytest.mark.parametrize("col_in_flight", [1, 3])
def test_each_worker_has_that_many_requests(col_in_flight):
    runtime, workers = _fake_workers(2)
    runtime.done = [["0"]]
    steps = []
    strategy = OnArrival(*_collaborators(workers, runtime, steps), OnArrival.Options(col_in_flight=col_in_flight))
    strategy.step(lambda item: steps.append("item"))
    # All requests of worker 0 had come back, and each was asked for again after item and refresh.
    assert [name for name, *_ in runtime.calls].count("1") == col_in_flight
    assert [name for name, *_ in runtime.calls].count("0") == 2 * col_in_flight
    # New weights before the first requests, and between handing an item on and asking its worker again.
    assert steps[-2 * col_in_flight:] == ["item", "refresh"] * col_in_flight
    assert set(steps[:-2 * col_in_flight]) == {"refresh"}


@pytest.mark.parametrize("col_in_flight", [1, 3])
def test_col_in_flight_of_a_scheme(make_scheme, monkeypatch, col_in_flight):
    outstanding, most = {}, []
    submit = ThreadRuntime.submit

    def watch(self, handle, method, args, kwargs):
        future = submit(self, handle, method, args, kwargs)
        if method == "collect":
            calls = outstanding.setdefault(handle.name, [])
            calls[:] = [call for call in calls if not call.native.done()] + [future]
            most.append(len(calls))
        return future
    monkeypatch.setattr(ThreadRuntime, "submit", watch)
    scheme = make_scheme(
        SleepEnv, {"step_s": 0.002}, num_col_workers=2, col_communication=ASYNC, col_in_flight=col_in_flight)
    for _ in range(8):
        scheme.step()
    assert max(most) == col_in_flight


def _weight_pushes(scheme, num_updates=40):
    for _ in range(num_updates):
        scheme.step()
        time.sleep(0.002)  # let collectors come round
    return scheme.metrics()["weight_pushes"]


def test_broadcast_interval(make_scheme, one_batch):
    settings = {"algo": one_batch, "num_col_workers": 2, "col_communication": ASYNC, "queue_size": 1,
                "col_in_flight": 1}
    assert _weight_pushes(make_scheme(**settings)) > 15
    # Within 40 updates each of 2 workers can be 10 updates behind 4 times at most.
    assert 0 < _weight_pushes(make_scheme(broadcast_interval=10, **settings)) <= 8


@pytest.mark.parametrize("queue_size", [1, 5])
def test_a_full_queue_holds_collection_back(make_scheme, one_batch, recorder, queue_size):
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, algo=one_batch, num_envs=1, size=8,
                         num_col_workers=2, col_communication=ASYNC, col_in_flight=1, queue_size=queue_size)
    by_probe = len(recorder.made)
    scheme.step()
    number, deadline = -1, time.monotonic() + 10
    while number != len(recorder.made) and time.monotonic() < deadline:
        number = len(recorder.made)
        time.sleep(0.3)
    rollouts = (number - by_probe) / 8
    # Used, queued, in the collecting thread's hands, and one finished by each worker.
    assert queue_size + 1 < rollouts <= 1 + queue_size + 1 + 2


def test_queue_timeout_s(make_scheme):
    scheme = make_scheme(SleepEnv, {"step_s": 0.1}, num_envs=1, size=20, num_col_workers=2, col_communication=ASYNC,
                         queue_timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(LearnerStarvedError, match=r"0.3 s.*queue_timeout_s"):
        scheme.step()
    assert time.monotonic() - start < 1.5


# Gradients


@pytest.mark.parametrize("num_workers", [2, 3])
def test_distribute_gradients_keeps_all_ranks_equal(make_scheme, num_workers):
    scheme = make_scheme(num_grad_workers=num_workers, distribute_gradients=True)
    initial = scheme.acting_state()["all"]
    seen = [initial]
    for version in range(1, 8):
        scheme.step()
        ranks = [handle.native.worker for handle in scheme.update_worker.remote_workers]
        vectors = [rank.algo.acting_state()["all"] for rank in ranks]
        assert [rank.actor_version for rank in ranks] == [version] * num_workers
        assert all(torch.equal(vectors[0], vector) for vector in vectors[1:])
        assert not torch.equal(vectors[0], seen[-1])
        assert torch.equal(scheme.acting_state()["all"], vectors[0])
        seen.append(vectors[0])
    # The ranks' own data differ, so equal parameters come from averaging.
    rewards = [rank.storage._rollouts[0].obs["obs"] for rank in ranks]
    assert not torch.equal(rewards[0], rewards[1])
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] + ledger["dropped"]["shutdown"]


def test_distributed_gradients_never_reach_the_server(make_scheme, monkeypatch):
    received = []
    receive = Statistics.receive
    monkeypatch.setattr(Statistics, "receive", lambda self, gradients: (
        received.append(gradients.vectors), receive(self, gradients))[1])
    make_scheme(num_grad_workers=2, distribute_gradients=True).step()
    assert received == [None, None]


# Numbers of workers, places


def test_numbers_of_workers_and_executions(make_scheme):
    for num_col, num_grad in itertools.product((1, 3), (1, 2)):
        scheme = make_scheme(num_col_workers=num_col, num_grad_workers=num_grad)
        root = scheme.start()
        assert len(root.remote_workers) == (num_grad if num_grad > 1 else 0)
        workers = [handle.native.worker for handle in root.remote_workers] or [root.local_worker]
        assert [len(worker.remote_workers) for worker in workers] == [num_col if num_col > 1 else 0] * num_grad
        assert scheme.settings["col_execution"] == ("Parallel" if num_col > 1 else "Central")
        assert scheme.settings["grad_execution"] == ("Parallel" if num_grad > 1 else "Central")
        if num_grad > 1:
            assert root.local_worker.local_worker.envs is None  # serves parameters only


def test_resources_reach_the_workers(make_scheme, monkeypatch):
    asked = {}
    start_actor = ThreadRuntime.start_actor
    monkeypatch.setattr(ThreadRuntime, "start_actor", lambda self, cls, params, *, name, resources: (
        asked.__setitem__(name, dict(resources)), start_actor(self, cls, params, name=name, resources=resources))[1])
    make_scheme(num_col_workers=2, num_grad_workers=2, col_worker_resources={"num_cpus": 0.25},
                grad_worker_resources={"num_cpus": 0.5, "memory": 1000}).start()
    assert asked["GWorker 1"] == asked["GWorker 2"] == {"num_cpus": 0.5, "memory": 1000}
    collectors = [asked[f"GWorker {grad}/CWorker {col}"] for grad in (1, 2) for col in (1, 2)]
    assert collectors == [{"num_cpus": 0.25}] * 4
    asked.clear()
    make_scheme(num_col_workers=2).start()
    assert asked["GWorker 0/CWorker 1"] == dict(CPU_RESOURCES)


@pytest.mark.parametrize("num_col_workers", [1, 2])
def test_num_threads(make_scheme, num_col_workers):
    seen = set()

    class ThreadsSeen(CountingEnv):
        def step(self, action):
            seen.add(torch.get_num_threads())
            return super().step(action)
    scheme = make_scheme(ThreadsSeen, num_threads=2, num_col_workers=num_col_workers)
    seen.clear()  # that of the probe
    scheme.step()
    assert seen == {2}
    assert torch.get_num_threads() == 2
    scheme.stop()
    assert torch.get_num_threads() == 1


def test_device_reaches_actor_and_algorithm(make_scheme, monkeypatch):
    """On a machine with one device the option can only be followed on its way."""
    seen = []

    class Watched(OnPolicyActor):
        def __init__(self, options, *, device, seed):
            seen.append(device)
            super().__init__(options, device=device, seed=seed)
    envs = VecEnv.create_factory(CountingEnv)
    actor = Watched.create_factory(envs.observation_space, envs.action_space)
    make_scheme(envs=envs, actor=actor, device="cpu").start()
    assert [str(device) for device in seen] == ["cpu"]
    seen.clear()
    make_scheme(envs=envs, actor=actor, device="cpu", num_col_workers=2).start()
    assert [str(device) for device in seen] == ["cpu"] * 3


def test_seed(make_scheme):
    drawn = {make_scheme(seed=None).seed for _ in range(3)}
    assert len(drawn) == 3
    assert all(isinstance(seed, int) for seed in drawn)
    scheme = make_scheme(seed=5)
    assert scheme.seed == scheme.settings["seed"] == 5
    again = make_scheme(seed=make_scheme(seed=None).seed)
    assert torch.equal(_parameters_after(make_scheme(seed=again.seed), 2), _parameters_after(again, 2))


def test_workers_have_seeds_of_their_own(make_scheme, recorder):
    """No two environments of a tree play the same."""
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, num_envs=2, num_col_workers=2, num_grad_workers=2)
    scheme.step()
    assert len({seed for seed, *_ in recorder.inserted}) == 2 * 2 * 2


def test_runtime_is_where_workers_run(make_scheme):
    """Threads here; Ray in the integration tests."""
    scheme = make_scheme(num_col_workers=2, runtime="threads")
    scheme.start()
    names = {thread.name for thread in threading.enumerate()}
    assert {"GWorker 0/CWorker 1", "GWorker 0/CWorker 2"} <= names
    assert scheme.settings["runtime"] == "threads"


# What a scheme says


def test_settings_are_complete_and_json(make_scheme):
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, queue_size=3)
    settings = json.loads(json.dumps(scheme.settings))
    options = set(known_keywords())
    assert set(settings) == options
    assert settings["col_communication"] == "asynchronous"
    assert settings["grad_communication"] == SYNC == "synchronous"
    text = repr(scheme)
    assert all(f"{name}=" in text for name in options)
    assert "queue_size=3" in text
    assert "algo_factory=PPO.create_factory(" in text


def test_metrics_are_json_and_count(make_scheme):
    scheme = make_scheme(num_col_workers=2)
    for _ in range(4):
        scheme.step()
    metrics = json.loads(json.dumps(scheme.metrics()))
    assert metrics["updates"] == metrics["grads_received"] == scheme.version == 4
    assert metrics["rollouts"] == 2  # one round of two workers serves 2 epochs of 2 batches
    assert set(metrics["policy_lag"]) == {"mean", "max", "p50", "p90"}
    assert set(metrics["time_s"]) == {"collection", "gradients", "update"}
    assert scheme.env_steps == scheme.ledger()["collected"] == 2 * 2 * 8
    json.dumps(scheme.stop())


def test_episodes_are_told_once(make_scheme):
    scheme = make_scheme(CountingEnv, {"episode_length": 4}, num_envs=2, size=8)
    scheme.step()
    episodes = scheme.episodes()
    assert len(episodes) == 4
    assert {episode.length for episode in episodes} == {4}
    assert sorted(episode.env_return for episode in episodes) == [10, 10, 26, 26]
    assert scheme.episodes() == []


@pytest.mark.parametrize("settings", [
    {}, {"num_col_workers": 2}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True},
    {"num_grad_workers": 2, "grad_communication": ASYNC}, {"grad_communication": ASYNC}],
    ids=["central", "collectors", "gradients", "decentralised", "asynchronous", "thread"])
def test_update_algorithm_parameter_reaches_every_worker(make_scheme, settings):
    scheme = make_scheme(algo=A2C.create_factory(lr=1e-3), **settings)
    scheme.step()
    with pytest.raises(KeyError, match="lr"):
        scheme.update_algorithm_parameter("typo", 1)
    scheme.update_algorithm_parameter("entropy_coef", 0.25)
    scheme.update_algorithm_parameter("lr", 0.0)
    for _ in range(6):
        scheme.step()
    before = scheme.acting_state()["all"]
    scheme.step()
    assert torch.equal(scheme.acting_state()["all"], before)  # nothing learns at lr 0
    algorithms = [handle.native.worker.algo for handle in scheme.update_worker.remote_workers]
    # an asynchronous worker is told with its next request, which a busy machine may delay for many updates
    for _ in range(5000):
        if all(algo.parameters["entropy_coef"] == 0.25
               for algo in algorithms) or settings.get("grad_communication") is not ASYNC:
            break
        scheme.step()
    assert [algo.parameters["entropy_coef"] for algo in algorithms] == [0.25] * len(algorithms)


def test_schedules_follow_collected_steps(make_scheme):
    scheme = make_scheme(algo=A2C.create_factory(lr=linear(1e-2, 0.0)), num_envs=2, size=8)
    scheme.start(160)
    rates = [scheme.step()["lr"] for _ in range(12)]
    np.testing.assert_allclose(rates, [1e-2 * max(0.0, 1 - 16 * n / 160) for n in range(12)])


def test_schedules_follow_the_steps_that_updates_have_used_not_those_that_wait(make_scheme):
    """Collection is far ahead of a slow learner, whose items are rollouts of 16 steps."""
    scheme = make_scheme(algo=A2C.create_factory(lr=linear(1e-2, 0.0)), num_envs=2, size=8, num_col_workers=2,
                         col_communication=ASYNC,
                         runtime="simulated", costs={"grad": 1.0})
    scheme.start(160)
    rates = [scheme.step()["lr"] for _ in range(8)]
    np.testing.assert_allclose(rates, [1e-2 * (1 - 16 * n / 160) for n in range(8)])
    assert scheme.ledger()["collected"] > 2 * 8 * 16


# Evaluation and saving


def test_evaluation_runs_beside_training(make_scheme):
    may_step = threading.Event()

    class Waiting(CountingEnv):
        def step(self, action):
            assert may_step.wait(60)
            return super().step(action)
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
    scheme = make_scheme(envs=envs, test_envs=VecEnv.create_factory(Waiting, {"episode_length": 6}, 2))
    scheme.step()
    assert scheme.poll_evaluation() is None
    scheme.start_evaluation(5)
    scheme.step()  # were it to wait for the evaluation, that would fail after a minute
    assert scheme.poll_evaluation() is None
    may_step.set()
    evaluation = scheme.wait_evaluation(20.0)
    assert evaluation.version == 1
    assert sorted(evaluation.lengths) == [6] * 5
    assert len(evaluation.returns) == 5
    assert scheme.poll_evaluation() is None
    assert scheme.ledger()["collected"] == scheme.ledger()["consumed_unique"]  # its steps are no training steps


def test_save_model(make_scheme, tmp_path):
    scheme = make_scheme()
    for _ in range(3):
        scheme.step()
    path = scheme.save_model(str(tmp_path / "model.pt"))
    saved = torch.load(path, weights_only=True)
    assert saved["version"] == 3
    assert torch.equal(saved["acting_state"]["all"], scheme.acting_state()["all"])


def test_collect_worker_is_what_runs(make_scheme):
    """The class that collects can be named and driven alone, as documented."""
    scheme = make_scheme(num_col_workers=2)
    handle = scheme.update_worker.local_worker.remote_workers[0]
    rollout = handle.runtime.get(handle.submit(CWorker.collect), 10.0)
    assert rollout.num_env_steps == 16
    assert rollout.sequence == 1
