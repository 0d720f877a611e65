from __future__ import annotations

import pickle
import threading
import time
import weakref

import pytest

from pytorchrl.errors import ConfigError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime import (
    DEFAULT_RESOURCES,
    RUNTIMES,
    Outcome,
    Runtime,
    SimulatedRuntime,
    ThreadRuntime,
    make_runtime,
    options_of_runtime,
)


class Counter:
    def __init__(self, start=0):
        if start is None:
            raise ValueError("no start")
        self.value, self.flag, self.thread = start, False, threading.current_thread()

    def add(self, number, *, twice=False):
        self.value += number * (2 if twice else 1)
        return self.value

    def fail(self):
        raise KeyError("failed")

    def wait_for_flag(self):
        deadline = time.monotonic() + 10
        while not self.flag and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.flag

    def set_flag(self):
        self.flag = True
        return threading.current_thread()

    def where(self):
        return self.thread, threading.current_thread()


@pytest.fixture
def runtime():
    runtime = ThreadRuntime()
    yield runtime
    runtime.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


def _start(runtime, name="actor", **params):
    return runtime.start_actor(Counter, params, name=name, resources={})


def test_calls_are_made_in_order_on_the_workers_own_thread(runtime):
    worker = _start(runtime, start=10)
    futures = [worker.submit(Counter.add, number, twice=number == 2) for number in (1, 2, 3)]
    assert [runtime.get(future, 5.0) for future in futures] == [11, 15, 18]
    built, called = runtime.get(worker.submit(Counter.where), 5.0)
    assert built is called is not threading.current_thread()
    assert built.name == "actor"


def test_the_largest_number_of_calls_is_recorded(runtime):
    worker = _start(runtime)
    futures = [worker.submit(Counter.wait_for_flag), *(worker.submit(Counter.add, 1) for _ in range(3))]
    while worker.native.worker is None:
        time.sleep(0.001)
    worker.signal(Counter.set_flag)
    runtime.get_all(futures, 5.0)
    assert 3 <= worker.native.peak <= len(futures)  # the thread may take the first call before the others arrive


def test_errors_are_returned_as_values_until_unwrapped(runtime):
    worker = _start(runtime)
    outcome = runtime.outcome(worker.submit(Counter.fail), 5.0)
    assert (outcome.worker, outcome.value, type(outcome.error)) == ("actor", None, KeyError)
    with pytest.raises(KeyError, match="failed") as caught:
        outcome.unwrap()
    assert any(entry.name == "fail" for entry in caught.traceback)
    assert runtime.get(worker.submit(Counter.add, 1), 5.0) == 1  # the worker survives the error


def test_an_error_in_the_constructor_is_raised_by_every_call(runtime):
    worker = _start(runtime, start=None)
    for _ in range(2):
        with pytest.raises(ValueError, match="no start"):
            runtime.get(worker.submit(Counter.add, 1), 5.0)


def test_a_signal_runs_concurrently_with_a_call(runtime):
    worker = _start(runtime)
    waiting = worker.submit(Counter.wait_for_flag)
    while worker.native.worker is None:
        time.sleep(0.001)
    worker.signal(Counter.set_flag)
    assert runtime.get(waiting, 5.0) is True


def test_a_missed_deadline_is_returned_as_an_outcome(runtime):
    worker = _start(runtime)
    future = worker.submit(Counter.wait_for_flag)
    start = time.monotonic()
    outcome = runtime.outcome(future, 0.05)
    assert isinstance(outcome.error, WorkerLostError)
    assert "actor did not answer within 0.1 s" in str(outcome.error)
    assert time.monotonic() - start < 1
    worker.native.worker.flag = True


def test_wait_returns_all_done_futures_in_the_given_order(runtime):
    slow, fast = _start(runtime, "actor 1"), _start(runtime, "actor 2")
    pending = slow.submit(Counter.wait_for_flag)
    done = [fast.submit(Counter.add, 1) for _ in range(3)]
    runtime.get_all(done, 5.0)
    assert runtime.wait([pending, *reversed(done)], 1.0) == list(reversed(done))
    assert runtime.wait([pending], 0.01) == []
    slow.native.worker.flag = True
    assert runtime.wait([pending], 5.0) == [pending]


def test_get_all_has_one_deadline_for_all_futures(runtime):
    workers = [_start(runtime, f"actor {index}") for index in range(3)]
    futures = [worker.submit(Counter.wait_for_flag) for worker in workers]
    start = time.monotonic()
    outcomes = runtime.get_all(futures, 0.2)
    assert time.monotonic() - start < 0.5
    assert all(isinstance(outcome.error, WorkerLostError) for outcome in outcomes)
    for worker in workers:
        worker.native.worker.flag = True


def test_kill_settles_calls_and_refuses_more(runtime):
    worker = _start(runtime)
    running, queued = worker.submit(Counter.wait_for_flag), worker.submit(Counter.add, 1)
    assert runtime.kill(worker, 0.05) is False  # a thread cannot be interrupted
    for future in (running, queued, worker.submit(Counter.add, 1)):
        with pytest.raises(WorkerLostError, match="actor has been killed"):
            runtime.get(future, 0.5)
    worker.native.worker.flag = True
    assert runtime.kill(worker) is True


@pytest.mark.parametrize("make", [ThreadRuntime, SimulatedRuntime])
def test_a_killed_worker_is_freed_although_its_handle_is_kept(make):
    runtime = make()
    handle = _start(runtime)
    runtime.get(handle.submit(Counter.add, 1), 5.0)
    worker = weakref.ref(handle.native.worker)
    assert runtime.kill(handle)
    assert worker() is None
    assert isinstance(runtime.outcome(handle.signal(Counter.set_flag), 5.0).error, WorkerDiedError)
    runtime.close()


def test_close_ends_all_threads_and_is_idempotent():
    runtime = ThreadRuntime()
    workers = [_start(runtime, f"actor {index}") for index in range(3)]
    runtime.close()
    runtime.close()
    assert not any(worker.native.is_alive() for worker in workers)
    with pytest.raises(WorkerLostError):
        runtime.get(workers[0].submit(Counter.add, 1), 1.0)


def test_an_outcome_may_be_none():
    assert Outcome("worker", None).unwrap() is None


def test_the_runtime_provides_threads_queues_events_and_the_clock(runtime):
    done = runtime.make_event()
    thread = threading.Thread(target=done.wait, name="helper")
    runtime.start_thread(thread)
    assert runtime.join_thread(thread, 0.02) is False
    done.set()
    assert runtime.join_thread(thread, 5.0) is True
    assert runtime.join_thread(threading.Thread(target=print), 0.1) is True  # the thread was never started
    first = runtime.now()
    assert runtime.now() >= first
    assert runtime.make_queue(3).maxsize == 3
    assert runtime.put("value") == "value"
    assert runtime.in_process() is runtime
    assert runtime.fit_resources([("workers", 2, DEFAULT_RESOURCES)]) == [dict(DEFAULT_RESOURCES)]


def test_make_runtime():
    assert make_runtime(options_of_runtime("threads", {"num_threads": 3})).name == "threads"
    with pytest.raises(ConfigError, match=r"'ray', 'processes', 'threads'.*got 'process'"):
        options_of_runtime("process", {})
    with pytest.raises(ConfigError, match=r"'ray', 'processes', 'threads'.*got Runtime\.Options\(faults=None\)"):
        make_runtime(Runtime.Options())


def test_a_runtime_keeps_its_options():
    settings = {"schedule_seed": 3, "costs": {"step": 1.0}, "faults": "delay col.1 2s p=0.5", "address": "a:1",
                "placement": "colocate"}
    for name, kind in RUNTIMES.items():
        runtime = make_runtime(options_of_runtime(name, settings), seed=5, is_recording=True)
        assert type(runtime) is kind
        assert runtime.name == name
        assert runtime.is_recording
        assert runtime.faults.__reduce__()[1] == ("delay col.1 2s p=0.5", 5)
        assert {field: getattr(runtime.options, field) for field in vars(runtime.options)} == {
            field: settings[field] for field in vars(runtime.options)}
    assert vars(options_of_runtime("ray", {})) == {"faults": None, "address": None, "placement": None}


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("threads", {"faults": "kill col.1"}, "a thread cannot be killed; use runtime='ray', runtime='processes' or"),
    ("threads", {"faults": "stab col.1"}, "the action must be one of"),
    ("ray", {"faults": 3}, "faults must be a string or None, got 3"),
    ("ray", {"placement": "spread"}, "placement must be one of .*'colocate'.*, got 'spread'"),
    ("ray", {"address": 1}, "address must be"),
    ("simulated", {"costs": {"sleep": 1}}, "costs has the key 'sleep'"), ("simulated", {"costs": 3}, "costs must be"),
    ("simulated", {"schedule_seed": -1}, "schedule_seed must be .*0"),
    ("simulated", {"schedule_seed": 2**63}, "schedule_seed must be"),
])
def test_wrong_options_are_refused_before_a_runtime_is_created(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        options_of_runtime(name, settings)


def test_only_the_simulated_runtime_replays_a_record():
    with pytest.raises(ConfigError, match=r"replayed in the simulated runtime only, got ThreadRuntime\.Options"):
        make_runtime(ThreadRuntime.Options(), replay={})


def test_default_resources_cannot_be_changed():
    assert dict(DEFAULT_RESOURCES) == {
        "memory": 5368709120, "num_cpus": 1, "num_gpus": 0.2, "object_store_memory": 2147483648}
    with pytest.raises(TypeError):
        DEFAULT_RESOURCES["num_cpus"] = 2


def test_a_handle_prints_its_name(runtime):
    assert repr(_start(runtime)) == "Handle(actor)"


def test_a_pickled_ray_runtime_has_no_connection():
    from pytorchrl.runtime.ray.runtime import RayRuntime

    runtime = RayRuntime(RayRuntime.Options(address="somewhere:1", placement="colocate", faults="kill col.1"), seed=3,
                         is_recording=True)
    again = pickle.loads(pickle.dumps(runtime))
    assert type(again) is RayRuntime
    assert again.options == RayRuntime.Options(placement="colocate", faults="kill col.1")
    assert again.is_recording
    assert again.faults.__reduce__() == runtime.faults.__reduce__()
    # A thread runtime normally refuses faults that kill workers. This one accepts the plan, because it runs only local
    # workers, and the plan affects only remote workers.
    assert again.in_process().faults is again.faults
