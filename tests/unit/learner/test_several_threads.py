"""Test that several threads may use one learner, and that a learner that is dropped leaves no threads behind."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytorchrl import ASYNC, PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import StoppedError

KINDS = {"in process": {}, "collector thread": {"col_communication": ASYNC},
         "threads": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "threads"},
         "processes": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "processes"}}


def make(**settings):
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
    scheme = Scheme(
        PPO.create_factory(num_epochs=2, num_mini_batch=2),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
        GAEBuffer.create_factory(8), envs, seed=1, **settings)
    return Learner(scheme, target_steps=10**6, progress=False)


def in_threads(number, function):
    """Return the results of calls that begin at the same time in several threads."""
    gate = threading.Barrier(number)

    def call(_):
        gate.wait()
        return function()

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(call, range(number)))


@pytest.mark.parametrize("kind", ["in process", "collector thread", "threads"])
def test_all_threads_that_stop_receive_the_final_ledger(kind):
    learner = make(**KINDS[kind])
    for _ in range(5):
        learner.step()
    ledgers = in_threads(8, learner.stop)
    assert all(ledger == ledgers[0] for ledger in ledgers)
    assert ledgers[0]["in_flight"] == ledgers[0]["queued"] == 0
    assert ledgers[0]["collected"] == ledgers[0]["consumed_unique"] + sum(ledgers[0]["dropped"].values())


def test_all_threads_that_stop_a_scheme_receive_the_final_ledger():
    learner = make(num_col_workers=2, col_communication=ASYNC, runtime="threads")
    learner.step()
    ledgers = in_threads(8, learner.scheme.stop)
    assert all(ledger == ledgers[0] for ledger in ledgers)
    assert ledgers[0]["in_flight"] == 0


@pytest.mark.parametrize("kind", ["in process", "collector thread", "threads"])
@pytest.mark.parametrize("of", ["learner", "scheme"])
def test_several_threads_step_in_turn(kind, of):
    learner = make(**KINDS[kind])
    step = learner.step if of == "learner" else learner.scheme.step
    in_threads(3, lambda: [step() for _ in range(20)])
    assert learner.updates == 60
    learner.stop()


def test_a_thread_that_waits_for_its_turn_does_not_delay_stop():
    learner = make()
    learner.step()
    ended = threading.Event()

    def step_until_stopped():
        try:
            while True:
                learner.step()
        except StoppedError:
            ended.set()

    threads = [threading.Thread(target=step_until_stopped) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    learner.stop()
    for thread in threads:
        thread.join(30)
    assert ended.is_set()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("kind", ["collector thread", "threads", "processes"])
def test_a_learner_that_is_dropped_is_stopped(kind, request):
    if kind == "processes":
        request.getfixturevalue("quick_processes")
    before = set(threading.enumerate())
    learner = make(**KINDS[kind])
    learner.step()
    assert set(threading.enumerate()) - before
    deadline = time.monotonic() + 30
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del learner
        generation = 1  # of the oldest objects that are new; the collection of all objects takes much longer
        while not caught and time.monotonic() < deadline:
            gc.collect(generation)  # returns at once if another thread is collecting garbage
            generation = 2
    assert ["dropped while its workers were running" in str(warning.message) for warning in caught] == [True]
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize("kind", ["in process", "threads"])
def test_a_learner_that_was_stopped_is_dropped_without_a_warning(kind):
    learner = make(**KINDS[kind])
    learner.step()
    learner.stop()
    dropped, generation = weakref.ref(learner), 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del learner
        while dropped() is not None:
            gc.collect(generation)  # the collection of all objects takes much longer
            generation = 2
