"""Check that a killed gradient worker leaves no thread, no page-locked memory and no tensors on its GPU."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from pytorchrl import ASYNC, IMPALA, SAC, OffPolicyActor, OnPolicyActor, ReplayBuffer, Scheme, VecEnv, VTraceBuffer
from pytorchrl.scheme.gradients.staging import CudaCopier

pytestmark = pytest.mark.gpu

WAIT_S = 20.0


def impala():
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    return (IMPALA.create_factory(), OnPolicyActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(8,)), VTraceBuffer.create_factory(8), envs)


def sac():
    envs = VecEnv.create_factory("Pendulum-v1", vec_env_size=2)
    return (SAC.create_factory(start_steps=16, mini_batch_size=8), OffPolicyActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(8,)), ReplayBuffer.create_factory(100, rollout_size=4),
        envs)


@pytest.fixture
def kept(monkeypatch):
    """Return a function that returns the page-locked buffers that are not free, and those that were ever allocated."""
    allocated, allocate = [], CudaCopier.allocate

    def watched(copier, num_bytes):
        buffer = allocate(copier, num_bytes)
        allocated.append(weakref.ref(buffer))
        return buffer
    monkeypatch.setattr(CudaCopier, "allocate", watched)

    def found():
        gc.collect()
        return [buffer() for buffer in allocated if buffer() is not None], len(allocated)
    return found


@pytest.fixture
def start():
    """Return a function that starts a scheme with two gradient workers on GPUs, which is stopped after the test."""
    schemes = []

    def make(agent, runtime, **settings):
        scheme = Scheme(*agent, runtime=runtime, seed=1, num_grad_workers=2, grad_device="cuda", **settings)
        schemes.append(scheme)
        return scheme
    yield make
    gc.enable()
    for scheme in schemes:
        scheme.stop()


def names():
    return sorted(thread.name for thread in threading.enumerate())


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("agent", [impala, sac])
@pytest.mark.parametrize("communication", ["synchronous", ASYNC])
def test_a_killed_worker_frees_its_memory(start, kept, runtime, agent, communication):
    """Kill a worker while its replacement is forbidden, so that only the other worker keeps buffers."""
    before, is_loader = names(), agent is impala
    scheme = start(agent(), runtime, grad_communication=communication, on_worker_failure="ignore",
                   col_communication=ASYNC if is_loader else "synchronous")
    while scheme.version < 8:
        scheme.step()
    assert kept()[1] >= 4
    assert scheme.runtime.kill(scheme.update_worker.grad_workers.remote_workers()[0])
    last = scheme.version
    while scheme.version < last + 6:
        scheme.step()
    assert len(kept()[0]) <= 2
    scheme.stop()
    assert wait_for(lambda: set(names()) <= set(before))


@pytest.mark.parametrize("settings", [{}, {"num_col_workers": 2}, {"num_col_workers": 2, "inference": "central"},
                                      {"distribute_gradients": True}, {"grad_communication": ASYNC}], ids=str)
def test_a_worker_that_dies_within_an_update_leaves_no_thread(start, kept, settings):
    """Check that threads end with their worker, not only when garbage is collected."""
    before = names()
    gc.disable()
    scheme = start(impala(), "simulated", col_communication=ASYNC, faults="kill grad.2 @ grad 3", **settings)
    while scheme.version < 12 or not scheme.metrics()["workers_restarted"]:
        scheme.step()
    scheme.stop()
    assert wait_for(lambda: names() == before)
    assert len(kept()[0]) <= 4
