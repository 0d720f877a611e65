"""Check that code that hangs is named with its stack in every runtime, and that training goes on or ends as asked."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time

import pytest

from pytorchrl import ASYNC, DQN, PPO, GAEBuffer, OnPolicyActor, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs import testing
from pytorchrl.envs.testing import FaultyEnv, SleepEnv
from pytorchrl.errors import CrashLoopError, EnvError, LearnerStarvedError, NoWorkersLeft, WorkerLostError

LIMIT_S = 0.3
RUNTIMES = {
    "central": {},
    "collector thread": {"col_communication": ASYNC},
    "threads": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "threads"},
    "processes": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "processes"},
    "ray": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "ray",
            "col_worker_resources": {"num_cpus": 0}},
}
ALL = [pytest.param(name, marks=[pytest.mark.ray, pytest.mark.slow] if name == "ray" else []) for name in RUNTIMES]


class HangingEnv(testing.HangingEnv):
    """An environment of which one call hangs: in a thread until the end of the test, else until its process ends."""

    is_over = False  # no event, which could not be sent to processes with the class

    def hang(self):
        end = time.monotonic() + 30
        while not type(self).is_over and time.monotonic() < end:
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_environment_left(request):
    """End the calls that hang, and wait for their threads. Make processes forks of a process that has imported torch.
    """
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("runtime") == "processes":
        request.getfixturevalue("quick_processes")
    HangingEnv.is_over = False
    yield
    HangingEnv.is_over = True
    for thread in threading.enumerate():
        if thread.name == "environment":
            thread.join(30)


def make(env_fn, env_kwargs, envs=None, **settings):
    factory = VecEnv.create_factory(env_fn, env_kwargs, 2, **(envs or {}))
    return Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(factory.observation_space, factory.action_space, hidden_sizes=(4,)),
        GAEBuffer.create_factory(8), factory, seed=1, **settings)


def train(scheme):
    """Make so many updates that the fault of each test is certain to occur."""
    for _ in range(10**4):
        scheme.step()


@pytest.mark.parametrize(("runtime", "call"), [
    *[(name, "reset") for name in RUNTIMES if name != "ray"],
    *[pytest.param(*p.values, "step", marks=p.marks) for p in ALL]])
def test_an_environment_that_hangs_ends_the_run_with_its_stack(runtime, call):
    scheme = make(HangingEnv, {"call": call, "at": 30 if call == "step" else 6},
                  {"env_timeout_s": LIMIT_S, "on_env_error": "raise"}, **RUNTIMES[runtime])
    scheme.start()
    start = time.monotonic()
    with pytest.raises(EnvError, match=rf"env [01]: {call} raised[\s\S]*has not returned within 0\.3 s[\s\S]*in hang"):
        train(scheme)
    assert time.monotonic() - start < 25  # before the call returns
    scheme.stop()


@pytest.mark.parametrize("runtime", ALL)
def test_an_environment_that_hangs_is_replaced_and_training_goes_on(runtime):
    scheme = make(HangingEnv, {"at": 30}, {"env_timeout_s": LIMIT_S, "on_env_error": "restart",
                                           "max_env_restarts": 1000}, **RUNTIMES[runtime])
    while not scheme.metrics().get("envs_restarted"):
        scheme.step()
    before = scheme.version
    while scheme.version < before + 2:
        scheme.step()
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())


@pytest.mark.parametrize(("runtime", "reaction"), [
    ("central", "raise"), ("collector thread", "restart"), ("threads", "restart"), ("processes", "raise")])
def test_a_close_that_hangs_is_named_with_its_stack_and_has_no_effect(runtime, reaction, capfd, caplog):
    scheme = make(HangingEnv, {"call": "close", "at": 1}, {"env_timeout_s": LIMIT_S, "on_env_error": reaction},
                  **RUNTIMES[runtime])
    caplog.clear()  # the environment that found the spaces hung, too
    scheme.step()
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    text = caplog.text + capfd.readouterr().err
    for worker, index in itertools.product([1, 2] if "num_col_workers" in RUNTIMES[runtime] else [0], [0, 1]):
        named = text.partition(f"GWorker 0/CWorker {worker}, env {index}: close raised TimeoutError")[2]
        assert re.search(r"close has not returned within 0\.3 s; it is in\n[\s\S]*in hang", named)


# A worker that hangs again and again


def hanging(**settings):
    """Return a simulated scheme, the first worker of which takes a day for each step."""
    return Scheme(*synthetic_agent(4), seed=1, runtime="simulated", num_col_workers=2, col_communication=ASYNC,
                  worker_timeout_s=5.0, queue_timeout_s=1e7,
                  costs={"step": 0.1, "step@*/CWorker 1": 86400.0}, **settings)


def test_a_worker_that_hangs_again_and_again_ends_the_run_with_its_history():
    scheme = hanging(on_worker_failure="restart")
    with pytest.raises(CrashLoopError, match=r"CWorker 1 was lost 3 times in a row without a result, and replaced 2 "
                                             r"times in 10 minutes; before each loss, it had returned 0, 0, "
                                             r"0 results; the last time: GWorker 0/CWorker 1 hangs: no "
                                             r"result for 25\.\d s; before: GWorker 0/CWorker 1 hangs: no result for "
                                             r"25\.\d s \(5\d s ago\); GWorker 0/CWorker 1 hangs: .* \(2\d s ago\)"):
        train(scheme)
    assert scheme.runtime.now() < 120
    scheme.stop()


def test_a_worker_that_hangs_is_ignored_if_asked(caplog):
    scheme = hanging(on_worker_failure="ignore")
    while scheme.runtime is None or scheme.runtime.now() < 100:
        scheme.step()
    assert scheme.metrics()["workers_missing"] == 1
    assert "CWorker 1 hangs: no result for" in caplog.text
    scheme.stop()


def test_a_worker_that_hangs_ends_the_run_at_once_if_asked():
    scheme = hanging(on_worker_failure="raise")
    with pytest.raises(WorkerLostError, match=r"CWorker 1 hangs: no result for") as caught:
        train(scheme)
    assert not isinstance(caught.value, CrashLoopError)
    assert scheme.runtime.now() < 60
    scheme.stop()


def test_if_all_workers_hang_no_worker_is_left():
    scheme = Scheme(*synthetic_agent(4), seed=1, runtime="simulated", num_col_workers=2, col_communication=ASYNC,
                    worker_timeout_s=5.0, queue_timeout_s=1e7, on_worker_failure="ignore", costs={"step": 86400.0})
    with pytest.raises(NoWorkersLeft, match=r"all 2 workers are lost.*hangs"):
        scheme.step()
    scheme.stop()


@pytest.mark.slow
def test_a_process_that_hangs_again_and_again_ends_the_run(quick_processes, caplog):
    """Check a real process, which hangs without a time limit of its environment."""
    caplog.set_level(logging.WARNING)
    scheme = make(FaultyEnv, {"fault": "hang"}, num_col_workers=2, col_communication=ASYNC, runtime="processes",
                  worker_timeout_s=0.2, queue_timeout_s=120.0)
    with pytest.raises(CrashLoopError, match=r"lost 3 times in a row .* the last time: .* hangs: no result for"):
        train(scheme)
    assert caplog.text.count("hangs: no result for") >= 2  # the replacements
    scheme.stop()


# Learners that wait


def test_a_learner_that_waits_names_the_workers():
    scheme = make(SleepEnv, {"step_s": 0.2}, num_col_workers=2, col_communication=ASYNC, runtime="threads",
                  queue_timeout_s=0.5)
    with pytest.raises(LearnerStarvedError, match=r"waiting for GWorker 0/CWorker 1 \(0\.\d s\), GWorker 0/CWorker 2"):
        scheme.step()
    scheme.stop()


def test_a_learner_with_replay_that_waits_names_the_workers():
    envs = VecEnv.create_factory(SleepEnv, {"step_s": 0.2}, 2)
    scheme = Scheme(
        DQN.create_factory(start_steps=0, mini_batch_size=4),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
        ReplayBuffer.create_factory(64, rollout_size=8), envs, seed=1, num_col_workers=2, num_replay_workers=2,
        col_communication=ASYNC, runtime="threads", queue_timeout_s=0.5)
    with pytest.raises(LearnerStarvedError, match=r"collection waits for GWorker 0/CWorker 1 \(0\.\d s\)"):
        scheme.step()
    scheme.stop()
