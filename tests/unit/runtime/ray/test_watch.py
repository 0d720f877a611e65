"""Tests of the watch over Ray's parts; processes with the names of Ray's parts take their place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytorchrl.errors import RayDiedError, WorkerDiedError
from pytorchrl.runtime import Future, Handle
from pytorchrl.runtime.ray.runtime import RayRuntime
from pytorchrl.runtime.ray.watch import Watch, parts_of
from pytorchrl.runtime.threads import ThreadRuntime
from pytorchrl.scheme.supervision.supervisor import Supervisor

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes by their descriptors")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a process with the name of a part of Ray."""
    started = []

    def run(name):
        shutil.copy(shutil.which("sleep"), tmp_path / name)
        process = subprocess.Popen([str(tmp_path / name), "100"])
        started.append(process)
        deadline = time.monotonic() + 30
        while process.pid not in parts_of(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return process
    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def watching():
    """Return a function that starts a watch, with an event that the loss of a part sets."""
    watches = []

    def begin():
        lost, told = threading.Event(), []
        watches.append(Watch(lambda problem: (told.append(problem), lost.set())))
        return watches[-1], lost, told
    yield begin
    for watch in watches:
        watch.close()


@pytest.mark.parametrize(("name", "part"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_a_part_that_ends_is_named(start, watching, name, part):
    process = start(name)
    watch, lost, told = watching()
    time.sleep(0.2)
    assert watch.problem == ""
    process.kill()
    assert lost.wait(30)
    assert told == [watch.problem]
    assert watch.problem.startswith(f"Ray's {part} (process {process.pid}) has ended unexpectedly")


def test_a_part_that_starts_later_is_watched(start, watching):
    watch, lost, _ = watching()
    time.sleep(0.1)
    process = start("raylet")
    deadline = time.monotonic() + 30
    while process.pid not in {pid for pid, _ in watch._files.values()} and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert lost.wait(30)


def test_a_stopped_part_is_continued(start, watching, caplog):
    process = start("raylet")
    _, lost, _ = watching()
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.05)
    assert caplog.messages == [f"Ray's raylet (process {process.pid}) was stopped (SIGSTOP); it was continued"]
    while _state(process.pid) == "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _state(process.pid) != "T"
    assert not lost.is_set()


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_of_another_name_is_not_watched(start):
    before = parts_of(os.getpid())  # not empty if earlier tests of this process have started Ray
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        process = start("raylet")
        assert parts_of(os.getpid()) == {**before, process.pid: "raylet"}
    finally:
        other.kill()
        other.wait()


def test_a_worker_that_the_raylet_starts_is_not_a_part(tmp_path):
    """Check that a child of the raylet with the raylet's name is not watched.

    A process has the name of its parent until it executes another program, and the worker in it may end at any time.
    """
    before = parts_of(os.getpid())
    shutil.copy(shutil.which("bash"), tmp_path / "raylet")
    raylet = subprocess.Popen(
        [str(tmp_path / "raylet"), "-c", "(read -t 100 <> <(:)) & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(raylet.stdout.readline())
        assert Path(f"/proc/{worker}/comm").read_text() == "raylet\n"
        assert parts_of(os.getpid()) == {**before, raylet.pid: "raylet"}
    finally:
        os.kill(worker, signal.SIGKILL)
        raylet.kill()
        raylet.communicate()


@pytest.fixture
def broken():
    """Return a runtime whose Ray instance has lost a part; any call of Ray fails the test."""
    runtime = RayRuntime()
    runtime._ray = SimpleNamespace(exceptions=None, cloudpickle=SimpleNamespace(dumps=lambda value, **options: value))
    runtime._connection = SimpleNamespace(problem="Ray's GCS has ended", is_watched=True, leave=lambda ray: None)
    return runtime


def test_without_a_part_of_ray_all_calls_are_over(broken):
    handle = Handle(broken, "GWorker 0/CWorker 1", None)
    futures = [Future("GWorker 0/CWorker 1", object()), broken.submit(handle, "step", (), {}),
               broken.signal(handle, "stop", (), {})]
    assert broken.wait(futures, 100.0) == futures
    for outcome in [broken.outcome(future, 100.0) for future in futures] + broken.get_started("workers", futures, 9.0):
        assert isinstance(outcome.error, RayDiedError)
        assert str(outcome.error) == "Ray's GCS has ended"
    assert broken.kill(handle)
    assert broken.lacks_room(handle) == ""
    with pytest.raises(RayDiedError, match="GCS"):
        broken.start_actor(object, {}, name="GWorker 0/CWorker 1", resources={})
    with pytest.raises(RayDiedError, match="GCS"):
        broken.put(bytes(200_000))
    broken.close()


@pytest.mark.parametrize("policy", ["restart", "ignore", "raise"])
def test_a_supervisor_does_not_replace_workers_without_ray(policy):
    runtime = ThreadRuntime()
    workers = [Handle(runtime, f"CWorker {index}", None) for index in range(2)]
    supervisor = Supervisor(workers, lambda index: None, runtime, Supervisor.Options(on_worker_failure=policy))
    error = RayDiedError("Ray's raylet has ended")
    with pytest.raises(RayDiedError) as caught:
        supervisor.lost(0, error)
    assert caught.value is error
    assert not isinstance(error, WorkerDiedError)
    assert not supervisor.is_replacing
