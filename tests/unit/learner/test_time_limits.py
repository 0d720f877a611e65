"""Test that callbacks and evaluations that hang are named with their stack, and that runs go on or end as asked."""

from __future__ import annotations

import signal
import threading
import time

import pytest

import pytorchrl
from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv
from pytorchrl.callbacks import Callback
from pytorchrl.callbacks.time_limit import time_limit
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import CallbackError, ConfigError, WorkerLostError

OPTIONS = {"num_envs": 1, "num_steps": 8, "num_mini_batch": 1, "hidden_sizes": (4,), "target_steps": 32,
           "progress": False, "tensorboard": False, "seed": 1}


class Waits(Callback):
    """A callback of which one method waits for a minute."""

    def __init__(self, hook, seconds=60.0):
        self._seconds, self.calls = seconds, 0
        setattr(self, hook, self._wait)

    def _wait(self, *_):
        self.calls += 1
        time.sleep(self._seconds)


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_record", "on_end"])
def test_a_callback_that_hangs_ends_the_run(hook, caplog):
    start = time.monotonic()
    with pytest.raises(CallbackError, match=rf"Waits\.{hook} raised TimeoutError: it has not returned within 0\.2 s; "
                                            r"it is in\n[\s\S]*in _wait\n"):
        pytorchrl.train("ppo", CountingEnv, callbacks=[Waits(hook)], callback_timeout_s=0.2, **OPTIONS)
    assert time.monotonic() - start < 50
    assert f"Waits.{hook} hangs: it has not returned within 0.2 s" in caplog.text
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL or callable(signal.getsignal(signal.SIGALRM))


def test_training_goes_on_after_a_callback_that_hangs_if_asked(caplog):
    callback = Waits("on_step")
    agent = pytorchrl.train("ppo", CountingEnv, callbacks=[callback], callback_timeout_s=0.1, on_callback_error="warn",
                            **OPTIONS)
    assert agent.summary["env_steps"] == 32
    assert callback.calls >= 4
    assert caplog.text.count("training continues, because on_callback_error='warn'") == callback.calls


def test_callbacks_within_the_limit_are_not_affected():
    callback = Waits("on_step", 0.0)
    pytorchrl.train("ppo", CountingEnv, callbacks=[callback], callback_timeout_s=60.0, **OPTIONS)
    assert callback.calls >= 4


def test_in_another_thread_the_error_follows_the_call(caplog):
    errors = []

    def run():
        try:
            with time_limit(0.1, "code"):
                time.sleep(0.5)
                errors.append("has returned")
        except TimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert errors[0] == "has returned"
    assert errors[1].startswith("it has not returned within 0.1 s; it is in\n")
    assert "in run\n" in errors[1]
    assert "code hangs" in caplog.text


def test_the_alarm_of_another_library_still_works():
    alarms = []
    found = signal.signal(signal.SIGALRM, lambda number, frame: alarms.append(number))
    try:
        with time_limit(60.0, "code"):
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, found)
    assert alarms == [signal.SIGALRM]


@pytest.mark.parametrize(("options", "text"), [
    ({"callback_timeout_s": 1.0}, "callback_timeout_s needs callbacks"),
    ({"callback_timeout_s": 0.0, "callbacks": [Waits("on_end")]}, "callback_timeout_s must be a number > 0"),
    ({"eval_timeout_s": 1.0}, "eval_timeout_s needs eval_every"),
    ({"eval_timeout_s": -1.0, "eval_every": 8}, "eval_timeout_s must be a number > 0")])
def test_wrong_limits_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        pytorchrl.train("ppo", CountingEnv, **OPTIONS, **options)


class HangingTest(CountingEnv):
    """A `CountingEnv` whose steps hang until the test has ended."""

    gate = None  # an event that ends the hang; None in other processes, which are killed

    def step(self, action):
        self._hang()
        return super().step(action)

    def _hang(self):
        (self.gate or threading.Event()).wait(60)


@pytest.fixture
def make_learner(request):
    """Return a function that makes a learner whose evaluations hang."""
    gate = threading.Event()

    def make(runtime=None, target_steps=10**6, timeout_s=0.3, **settings):
        if runtime == "processes":
            request.getfixturevalue("quick_processes")  # sends the class by value, which an event cannot be
        HangingTest.gate = None if runtime == "processes" else gate
        envs = VecEnv.create_factory(CountingEnv, {}, 2)
        tests = VecEnv.create_factory(HangingTest, {}, 2)
        scheme = Scheme(
            PPO.create_factory(num_epochs=1, num_mini_batch=1),
            OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
            GAEBuffer.create_factory(8), envs, tests, seed=1, runtime=runtime,
            **{} if runtime is None else {"num_col_workers": 2}, **settings)
        return Learner(scheme, target_steps, progress=False, eval_every=16, eval_timeout_s=timeout_s, eval_episodes=1)

    yield make
    gate.set()


@pytest.mark.parametrize("runtime", [None, "threads", "processes"])
def test_an_evaluation_that_hangs_is_named_and_training_goes_on(make_learner, caplog, runtime):
    learner = make_learner(runtime, timeout_s=2.0 if runtime == "processes" else 0.3)  # includes the worker's start
    deadline = time.monotonic() + 150
    while "the evaluation has not ended in time; its worker is in" not in caplog.text:
        learner.step()
        time.sleep(0.1)  # leave the processor to other tests
        assert time.monotonic() < deadline
    assert "in _hang" in caplog.text
    assert "an evaluation failed, so there is no result" in caplog.text
    if runtime != "processes":
        HangingTest.gate.set()
    learner.stop()


def test_an_evaluation_that_hangs_ends_the_run_if_asked(make_learner):
    learner = make_learner(on_worker_failure="raise", runtime="threads")
    with pytest.raises(WorkerLostError, match=r"the evaluation has not ended in time; its worker is in\n[\s\S]*_hang"):
        learner.train()


def test_the_last_evaluation_raises_if_it_hangs(make_learner):
    with pytest.raises(WorkerLostError, match=r"the evaluation has not ended in time"):
        make_learner(target_steps=16).train()
