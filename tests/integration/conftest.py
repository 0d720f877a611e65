"""Fixtures for schemes on a Ray cluster that all tests share; each test must stop all workers that it starts."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.forkserver import parents_of_forks


@pytest.fixture
def stop(shared_ray):
    """Return a list to which a test adds schemes; they are stopped after the test."""
    schemes = []
    yield schemes
    for scheme in schemes:
        scheme.stop()


@pytest.fixture(autouse=True)
def nothing_left():
    """Check that no actor process and no thread is left after a test."""
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while (left := actor_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    # Once a native thread of Ray has logged something, Python lists it forever as a dummy thread.
    threads = [t.name for t in set(threading.enumerate()) - before
               if t.is_alive() and not t.name.startswith("ray") and not isinstance(t, threading._DummyThread)]
    assert threads == []


def child_processes():
    """Return a map from process id to command line, for all descendants of this process.

    A fork of the fork server counts as a child of the process that waits for it.
    """
    parents, commands, waiting = {}, {}, parents_of_forks()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0",
                                                                                     b" ").decode(errors="replace")
            except OSError:  # the process has ended
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = waiting.get(int(entry.name), int(fields[1]))
    found, level = {}, {os.getpid()}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found |= {pid: commands[pid] for pid in level}
    return found


def actor_processes():
    """Return the command lines of this session's Ray processes that run an actor."""
    return [command for command in child_processes().values()
            if command.startswith("ray::Worker")]


@pytest.fixture(name="child_processes")
def child_processes_fixture():
    """Return the function `child_processes()`."""
    return child_processes


@pytest.fixture
def make_scheme(shared_ray):
    """Return a function that makes small schemes on Ray; they are stopped after the test."""
    import cloudpickle

    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import CountingEnv

    schemes = []

    def make(env_fn=CountingEnv, env_kwargs=None, *, num_envs=2, size=8, algo=None, storage=GAEBuffer, evaluates=False,
             **settings):
        for part in (env_fn, storage):  # the directory of the tests is not a package that workers can import
            module = sys.modules.get(getattr(part, "__module__", ""))
            if module is not None and module.__name__.startswith("tests"):
                cloudpickle.register_pickle_by_value(module)
        envs = VecEnv.create_factory(env_fn, env_kwargs, num_envs)
        scheme = Scheme(
            algo or PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-3),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            storage.create_factory(size), envs, envs if evaluates else None,
            **({"runtime": "ray", "seed": 1} | settings))
        schemes.append(scheme)
        return scheme
    yield make
    for scheme in schemes:
        scheme.stop()


@pytest.fixture
def stop_in_balance():
    """Return a function that stops a scheme within 10 seconds and checks that the ledger balances."""
    def stop(scheme):
        start = time.monotonic()
        ledger = scheme.stop()
        seconds = time.monotonic() - start
        assert ledger["in_flight"] == ledger["queued"] == 0
        assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values()), ledger
        assert seconds <= 10
        return ledger
    return stop


def resize_under_load(scheme, directory, numbers=(6, 3)):
    """Change the number of collection workers twice, and check the ledger against files of environments.

    Args:
        scheme: A scheme with central gradients and 2 collection workers, whose environments are `FiledEnv`s.
        directory: The directory of the environments' files.
        numbers: The numbers of collection workers.
    """
    for number in numbers:
        for _ in range(6):
            scheme.step()
        scheme.resize(num_col_workers=number)
        deadline = time.monotonic() + 60
        while len(scheme.update_worker.local_worker.remote_workers) != number and time.monotonic() < deadline:
            scheme.step()
        for _ in range(12):
            ledger = scheme.step() and scheme.ledger()
            assert ledger["collected"] == ledger["in_flight"] + ledger["queued"] + ledger["consumed_unique"] + sum(
                ledger["dropped"].values())
        assert len(scheme.update_worker.local_worker.remote_workers) == scheme.metrics()["workers"] == number
    if scheme.settings["col_communication"] == "synchronous":
        assert scheme.metrics()["policy_lag"]["max"] == 0
    final = scheme.stop()
    assert final["collected"] == sum(file.stat().st_size for file in directory.iterdir())
    assert final["collected"] == final["consumed_unique"] + final["dropped"]["shutdown"]
