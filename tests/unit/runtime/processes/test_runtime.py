"""Tests of worker processes without Ray: order of calls, signals, errors, deaths, and what is left behind."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch

from pytorchrl.errors import ConfigError, EnvError, InsufficientResourcesError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime import CPU_RESOURCES, DEFAULT_RESOURCES, ProcessRuntime, ThreadRuntime, make_runtime
from pytorchrl.runtime.processes import remote_calls
from pytorchrl.runtime.processes import start as process_start
from pytorchrl.runtime.machine import Machine
from tests.conftest import result_of

pytestmark = pytest.mark.timeout(60)


class Worker:
    """A worker that answers about itself."""

    def __init__(self, start=0, seconds=0.0):
        time.sleep(seconds)
        if start is None:
            raise EnvError("no start")
        self.value, self.flag, self.order = start, False, []
        self.runtime = self.child = None

    def add(self, number, *, twice=False):
        self.order.append(number)
        self.value += number * (2 if twice else 1)
        return self.value

    def echo(self, value):
        return value

    def fail(self, error):
        raise error

    def wait_for_flag(self):
        deadline = time.monotonic() + 20
        while not self.flag and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.flag

    def set_flag(self, value=True):
        self.flag = value
        return threading.current_thread().name

    def about(self):
        draw = np.random.rand()  # noqa: NPY002 - the global generator
        return os.getpid(), threading.current_thread().name, torch.get_num_threads(), draw, os.getcwd()

    def sleep(self, seconds):
        time.sleep(seconds)

    def kill_itself(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def start_child(self, runtime):
        self.runtime = runtime
        self.child = runtime.start_actor(Worker, {"start": 7}, name="child", resources={})
        return runtime.get(self.child.submit(Worker.about), 20)[0], self.child

    def fork_child(self):
        if not (pid := os.fork()):
            time.sleep(100)
            os._exit(0)
        return pid

    def add_in(self, handle, number):
        return handle.runtime.get(handle.submit(Worker.add, number), 20)


@pytest.fixture
def runtime(quick_processes):
    runtime = ProcessRuntime()
    yield runtime
    runtime.close()


@pytest.fixture
def start(runtime):
    """Return a function that starts a worker."""
    def start(**params):
        return runtime.start_actor(Worker, params, name="GWorker 0/CWorker 1", resources={})
    return start


def ends(pid, timeout_s=5.0):
    """Return whether a process ends within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_calls_run_in_order_in_a_process_of_their_own(runtime, start):
    handle = start(start=5)
    calls = [handle.submit(Worker.add, number, twice=number == 2) for number in range(50)]
    total = 5
    for number, call in enumerate(calls):
        total += number * (2 if number == 2 else 1)
        assert runtime.get(call, 20) == total
    pid, thread, num_threads, _, folder = runtime.get(handle.submit(Worker.about), 20)
    assert pid != os.getpid()
    assert (thread, num_threads, folder) == ("GWorker 0/CWorker 1", 1, os.getcwd())


def test_processes_draw_different_global_random_numbers(runtime, start):
    draws = {runtime.get(start().submit(Worker.about), 20)[3] for _ in range(3)}
    assert len(draws) == 3


def test_a_worker_has_as_many_torch_threads_as_it_requests_cpus(runtime):
    handle = runtime.start_actor(Worker, {}, name="worker", resources={"num_cpus": 2})
    assert runtime.get(handle.submit(Worker.about), 20)[2] == 2


@pytest.mark.parametrize("size", [3, 100_000])
def test_values_cross_in_both_directions(runtime, start, size):
    value = {"a": np.arange(size), "b": (1, None, "c"), "tensor": torch.ones(2), "function": len}
    again = runtime.get(start().submit(Worker.echo, value), 20)
    assert (again["a"] == value["a"]).all()
    assert again["b"] == (1, None, "c")
    assert torch.equal(again["tensor"], value["tensor"])
    assert again["function"] is len


def test_a_signal_runs_during_a_call(runtime, start):
    handle = start()
    runtime.get(handle.submit(Worker.add, 0), 20)
    call = handle.submit(Worker.wait_for_flag)
    assert runtime.wait([call], 0.05) == []
    assert runtime.get(handle.signal(Worker.set_flag), 20) == "ReaderThread"
    assert runtime.get(call, 20) is True


def test_a_signal_before_the_worker_is_built_takes_effect(runtime, start):
    handle = start(seconds=0.2)
    answer = handle.signal(Worker.set_flag, 3)
    assert runtime.get(answer, 20) is None
    assert runtime.get(handle.submit(Worker.wait_for_flag), 20) == 3


def test_an_error_of_a_call_has_the_traceback_of_the_worker(runtime, start):
    handle = start()
    outcome = runtime.outcome(handle.submit(Worker.fail, EnvError("broken")), 20)
    assert type(outcome.error) is EnvError
    assert str(outcome.error) == "broken"
    assert [frame.name for frame in traceback.extract_tb(outcome.error.__traceback__)][-1] == "fail"
    assert outcome.error.__cause__ is None
    assert runtime.get(handle.submit(Worker.add, 1), 20) == 1


class PickyError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_an_error_or_a_value_that_cannot_be_sent_is_an_error(runtime, start):
    handle = start()
    outcome = runtime.outcome(handle.submit(Worker.fail, SystemExit(3)), 20)
    assert type(outcome.error) is SystemExit

    def raise_picky(self):
        raise PickyError(1, 2)

    def return_lock(self):
        return threading.Lock()
    for function, message in ((raise_picky, "PickyError: 1 2"), (return_lock, "cannot pickle")):
        cls = type("Own", (), {"method": function})
        own = runtime.start_actor(cls, {}, name="own", resources={})
        assert message in str(runtime.outcome(runtime.submit(own, "method", (), {}), 20).error)


def test_an_error_of_the_constructor_is_the_outcome_of_every_call(runtime, start):
    handle = start(start=None)
    for call in [handle.submit(Worker.add, 1), handle.submit(Worker.about)]:
        outcome = runtime.outcome(call, 20)
        assert type(outcome.error) is EnvError
        assert "no start" in str(outcome.error)


def test_wait_returns_all_calls_that_are_over(runtime, start):
    handles = [start() for _ in range(3)]
    for handle in handles:
        runtime.get(handle.submit(Worker.add, 0), 20)
    calls = [handles[0].submit(Worker.add, 1), handles[1].submit(Worker.sleep, 20), handles[2].submit(Worker.add, 2)]
    time.sleep(0.2)
    assert runtime.wait(calls, 0.0) == [calls[0], calls[2]]
    assert runtime.wait(calls[1:2], 0.05) == []
    assert runtime.wait(calls, 20) == [calls[0], calls[2]]


def test_many_threads_may_wait(runtime, start):
    """Check that each of several threads receives its own answers, although only one thread reads at a time."""
    handles, results = [start(start=number) for number in range(4)], {}

    def call_often(number):
        for count in range(60):
            results[number, count] = runtime.get(handles[number].submit(Worker.add, 1), 20)
    threads = [threading.Thread(target=call_often, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {(number, count): number + count + 1 for number in range(4) for count in range(60)}


def test_an_interrupt_that_skips_a_release_does_not_stop_the_thread(runtime, start, monkeypatch):
    """Check that a thread can still receive answers if Ctrl-C ended `wait` before it released the lock of readers."""
    handle, calls = start(), runtime._calls
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_read", lambda timeout_s: calls._reading.acquire())
        calls.wait(lambda: True, 0.0)
    assert runtime.get(handle.submit(Worker.add, 3), 20) == 3


def test_a_waiting_thread_does_not_delay_another(runtime, start):
    slow, quick = start(), start()
    runtime.get(slow.submit(Worker.add, 0), 20)
    waiting = threading.Thread(target=runtime.outcome, args=[slow.submit(Worker.sleep, 1.0), 20])
    waiting.start()
    begin = time.monotonic()
    assert runtime.get(quick.submit(Worker.add, 2), 20) == 2
    assert time.monotonic() - begin < 0.9
    waiting.join(20)


def test_stored_values_are_replaced_by_the_values(runtime, start):
    for size in (10, 100_000):
        stored = runtime.put([np.ones(size), "a"])
        for handle in (start(), start()):
            array, text = runtime.get(handle.submit(Worker.echo, stored), 20)
            assert (array.sum(), text) == (size, "a")


def test_an_answer_that_does_not_come_is_a_lost_worker(runtime, start):
    handle = start()
    call = handle.submit(Worker.sleep, 1.0)
    outcome = runtime.outcome(call, 0.1)
    assert type(outcome.error) is WorkerLostError
    assert "GWorker 0/CWorker 1 did not answer within 0.1 s" in str(outcome.error)
    assert runtime.outcome(call, 20).error is None


@pytest.mark.parametrize("how", ["kill", "SIGKILL", "itself"])
def test_pending_and_later_calls_of_a_dead_worker_fail_at_once(runtime, start, how):
    handle = start()
    pid = runtime.get(handle.submit(Worker.about), 20)[0]
    calls = [handle.submit(Worker.kill_itself if how == "itself" else Worker.sleep, *() if how == "itself" else [50]),
             handle.submit(Worker.add, 1)]
    begin = time.monotonic()
    if how == "kill":
        assert runtime.kill(handle)
    elif how == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    later = (lambda: handle.submit(Worker.add, 1), lambda: handle.signal(Worker.set_flag))
    for make in [*(lambda call=call: call for call in calls), *later]:
        outcome = runtime.outcome(make(), 20)
        assert type(outcome.error) is WorkerDiedError
        assert "GWorker 0/CWorker 1 is lost: its process has ended" in str(outcome.error)
    assert time.monotonic() - begin < 10
    assert ends(pid)


def test_a_stopped_worker_is_reported_and_can_be_killed(runtime, start, monkeypatch):
    monkeypatch.setattr(remote_calls, "_FULL_TIMEOUT_S", 0.1)
    handle = start()
    pid = runtime.get(handle.submit(Worker.about), 20)[0]
    os.kill(pid, signal.SIGSTOP)
    assert type(runtime.outcome(handle.submit(Worker.add, 1), 0.1).error) is WorkerLostError
    for _ in range(1000):  # more than fit into the connection
        call = handle.signal(Worker.set_flag, b"x" * 1000)
        if call.native.is_over:
            break
    assert "does not read its calls" in str(runtime.outcome(call, 0.1).error)
    assert runtime.kill(handle)
    assert ends(pid)


def test_a_worker_starts_workers_which_any_worker_can_call(runtime, start):
    parent, other = start(), start()
    pid, child = runtime.get(parent.submit(Worker.start_child, runtime), 20)
    assert pid not in (os.getpid(), runtime.get(parent.submit(Worker.about), 20)[0])
    assert runtime.get(other.submit(Worker.add_in, child, 3), 20) == 10
    assert runtime.get(parent.submit(Worker.add_in, child, 1), 20) == 11
    assert runtime.get(child.submit(Worker.add, 1), 20) == 12
    assert child.runtime is runtime


def test_processes_that_a_worker_has_started_end_with_it(runtime, start):
    parent = start()
    pids = [runtime.get(parent.submit(Worker.start_child, runtime), 20)[0],
            runtime.get(parent.submit(Worker.fork_child), 20)]
    assert runtime.kill(parent)
    assert all(map(ends, pids))


def test_close_ends_all_processes_and_leaves_no_file(quick_processes):
    ProcessRuntime().close()
    before = set(os.listdir("/proc/self/fd"))
    runtime = ProcessRuntime()
    handles = [runtime.start_actor(Worker, {}, name=f"worker {index}", resources={}) for index in range(3)]
    pids = [runtime.get(handle.submit(Worker.about), 20)[0] for handle in handles]
    pids.append(runtime.get(handles[0].submit(Worker.start_child, runtime), 20)[0])
    call = handles[1].submit(Worker.sleep, 50)
    runtime.close()
    runtime.close()
    assert all(ends(pid, 1.0) for pid in pids)
    assert type(runtime.outcome(call, 1).error) is WorkerDiedError
    del runtime, handles, call
    assert set(os.listdir("/proc/self/fd")) <= before


DRIVER = """
import os, sys, time
sys.executable = sys.argv[2]
from pytorchrl.runtime.processes.runtime import ProcessRuntime
class Worker:
    def start(self, runtime):
        self.child = runtime.start_actor(Worker, {}, name="child", resources={})
        return [os.getpid(), runtime.get(self.child.submit(Worker.pid), 20)]
    def pid(self):
        return os.getpid()
runtime = ProcessRuntime()
handle = runtime.start_actor(Worker, {}, name="parent", resources={})
pids = runtime.get(handle.submit(Worker.start, runtime), 20)
print("result:", pids + [runtime._server._process.pid], flush=True)
if sys.argv[1] == "forked" and not os.fork():
    time.sleep(5)  # this process keeps the driver's connections open
    os._exit(0)
os.kill(os.getpid(), 9) if sys.argv[1] != "exit" else None
"""


@pytest.mark.parametrize("how", ["killed", "exit"])
def test_nothing_is_left_when_the_driver_ends(run_forked, forked_python, how):
    """Check that all processes end, although the driver was killed, or did not close the runtime."""
    check_nothing_left(run_forked("-c", DRIVER, how, forked_python), how)


@pytest.mark.thorough
def test_nothing_is_left_although_a_fork_of_the_driver_lives(run_python):
    check_nothing_left(run_python("-c", DRIVER, "forked", sys.executable), "forked")


def check_nothing_left(done, how):
    assert done.returncode == (0 if how == "exit" else -signal.SIGKILL), done.stderr
    done.returncode = 0
    assert all(ends(pid) for pid in result_of(done))


def test_a_fork_server_that_is_killed_ends_all_workers_and_is_replaced(runtime, start, caplog):
    handle = start()
    pid = runtime.get(handle.submit(Worker.about), 20)[0]
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        server = int(file.read().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    error = runtime.outcome(handle.submit(Worker.sleep, 20), 20).error
    assert type(error) is WorkerDiedError
    assert re.fullmatch(r"GWorker 0/CWorker 1 is lost: its process has ended, because the fork server \(process \d+\) "
                        "has ended, and with it all workers", str(error))
    assert ends(pid)
    assert runtime.kill(handle)
    caplog.set_level("WARNING")
    later = start()
    assert runtime.get(later.submit(Worker.add, 1), 20) == 1
    assert [record.getMessage().split(") ")[1] for record in caplog.records] == [
        "has ended, and with it all workers; a new one is started"]


def test_connections_of_other_users_are_refused(monkeypatch):
    listener = process_start.listen(address := process_start.new_address())
    with listener, process_start.connect(address):
        accepted, _ = listener.accept()
        with accepted:
            assert process_start.is_own(accepted)
            own = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: own + 1)
            assert not process_start.is_own(accepted)


def test_copies_in_the_driver_are_new_runtimes():
    runtime = make_runtime(ProcessRuntime.Options(faults="kill col.1"), seed=3, is_recording=True)
    again = pickle.loads(pickle.dumps(runtime))
    assert type(again) is ProcessRuntime
    assert (again.options, again.is_recording, again.faults.text) == (runtime.options, True, "kill col.1")
    assert isinstance(runtime.in_process(), ThreadRuntime)
    assert runtime.in_process().faults is runtime.faults
    assert runtime.own_gpus() is None


def test_the_start_is_announced(runtime, start):
    told = []
    runtime.announce = told.append
    handles = [start(), start(seconds=0.3)]
    outcomes = runtime.get_started("collection workers", [handle.submit(Worker.add, 1) for handle in handles], 20)
    assert [outcome.value for outcome in outcomes] == [1, 1]
    assert told[:2] == ["starting worker processes ...", "started 0 of 2 collection workers ..."]
    assert told[-1] == "started 2 of 2 collection workers"


@pytest.mark.parametrize(("resources", "message"), [
    ({"num_cpus": 3}, "2 collection workers x num_cpus=3 were requested; this machine has 4"),
    ({"num_gpus": 1}, "num_gpus=1 were requested; this machine has 0"),
    ({"special": 1}, "special=1 each, 2 together; this machine has 0"),
    ({"memory": 8e9}, "memory=8e\\+09 each, 1.6e\\+10 together; this machine has 1e\\+10"),
    (DEFAULT_RESOURCES, "share of a GPU"),
], ids=str)
def test_resources_that_the_machine_lacks(monkeypatch, resources, message):
    monkeypatch.setattr("pytorchrl.runtime.processes.runtime.this_machine", lambda: Machine(4, 0, 10**10))
    with pytest.raises(InsufficientResourcesError, match=message):
        ProcessRuntime().fit_resources([("collection workers", 2, resources)])


def test_workers_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr("pytorchrl.runtime.processes.runtime.this_machine", lambda: Machine(4, 0, 10**9))
    with pytest.raises(InsufficientResourcesError, match=r"63 collection workers .* process of 16 MB .* enough for 62"):
        ProcessRuntime().fit_resources([("collection workers", 63, CPU_RESOURCES)])


def test_more_workers_than_cores_and_absent_workers_are_allowed(monkeypatch):
    monkeypatch.setattr("pytorchrl.runtime.processes.runtime.this_machine", lambda: Machine(2, 0, 10**10))
    requests = [("collection workers", 30, CPU_RESOURCES), ("gradient workers", 0, {"special": 1})]
    assert ProcessRuntime().fit_resources(requests) == [dict(CPU_RESOURCES), {"special": 1}]


def test_a_platform_without_anonymous_shared_memory_is_refused(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*got darwin; give runtime='ray' or runtime='threads'"):
        ProcessRuntime()
