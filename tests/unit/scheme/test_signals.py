"""Tests of Ctrl-C in a user's own loop of `Scheme.step`: it takes effect between two updates."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from pytorchrl import DQN, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.support import signals as module
from pytorchrl.support.signals import interrupt_as_usual, undivided
from pytorchrl.scheme.updates.statistics import Statistics


@pytest.fixture(autouse=True)
def usual_handler():
    """Start and end each test with Python's own handler of SIGINT; a background process would ignore the signal."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    interrupt_as_usual()
    assert signal.signal(signal.SIGINT, found) is signal.default_int_handler


def press(times=1):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


class InterruptedEnv(CountingEnv):
    """A `CountingEnv` that counts its steps and sends SIGINT after one of them."""

    steps = 0
    interrupted_after = 0

    def step(self, action):
        result = super().step(action)
        InterruptedEnv.steps += 1
        if InterruptedEnv.steps == InterruptedEnv.interrupted_after:
            press()
        return result


def dqn():
    envs = VecEnv.create_factory(InterruptedEnv, None, 2)
    actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))
    algorithm = DQN.create_factory(start_steps=8, update_every=4, mini_batch_size=8)
    return Scheme(algorithm, actor, ReplayBuffer.create_factory(200, rollout_size=4), envs, seed=1)


def step_forever(scheme):
    while scheme.version < 100:
        scheme.step()


@pytest.mark.parametrize("name", ["ppo", "dqn"])
@pytest.mark.parametrize("after", [17, 24, 31])
def test_all_steps_of_a_local_rollout_are_in_the_ledger(make_scheme, monkeypatch, name, after):
    """Interrupt the beginning, the middle and the end of a rollout."""
    monkeypatch.setattr(InterruptedEnv, "steps", 0)
    monkeypatch.setattr(InterruptedEnv, "interrupted_after", after)
    scheme = dqn() if name == "dqn" else make_scheme(InterruptedEnv)
    scheme.start()
    with pytest.raises(KeyboardInterrupt):
        step_forever(scheme)
    ledger = scheme.stop()
    assert ledger["collected"] == InterruptedEnv.steps >= after
    assert ledger["collected"] == sum(ledger[name] for name in ("consumed_unique", "resident", "evicted")) + sum(
        ledger["dropped"].values())


@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True}], ids=["central", "workers",
                                                                                              "decentralized"])
def test_weights_are_those_of_the_version(make_scheme, monkeypatch, settings):
    """Interrupt an update when its gradient arrives; decentralized workers have applied it already."""
    whole = make_scheme(**settings)
    for _ in range(3):
        whole.step()
    receive, num_received = Statistics.receive, 0

    def receive_and_press(self, gradients):
        nonlocal num_received
        num_received += 1
        if num_received == 2 * settings.get("num_grad_workers", 1) + 1:
            press()
        receive(self, gradients)
    monkeypatch.setattr(Statistics, "receive", receive_and_press)
    scheme = make_scheme(**settings)
    with pytest.raises(KeyboardInterrupt):
        step_forever(scheme)
    scheme.stop()
    assert scheme.version == 3
    for name, value in whole.acting_state().items():
        assert torch.equal(scheme.acting_state()[name], value), name


def test_an_error_of_the_update_does_not_hide_the_interrupt():
    def fail():
        press()
        raise ValueError("fault")
    with pytest.raises(KeyboardInterrupt) as caught:
        undivided(fail)
    assert str(caught.value.__context__) == "fault"


def test_the_second_interrupt_is_not_delayed():
    done = []

    def call():
        press()
        done.append("first")
        press()
        done.append("second")
    with pytest.raises(KeyboardInterrupt):
        undivided(call)
    assert done == ["first"]
    assert undivided(lambda: 5) == 5


def test_an_update_that_does_not_end_is_abandoned(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.05)

    def wait():
        press()
        threading.Event().wait(60)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        undivided(wait)
    assert time.monotonic() - start < 30


def test_an_interrupt_between_two_calls_is_not_delayed():
    undivided(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_call_within_a_call_does_not_end_the_delay():
    done = []
    with pytest.raises(KeyboardInterrupt):
        undivided(lambda: (undivided(press), done.append("outer call")))
    assert done == ["outer call"]


def test_another_handler_and_other_threads_are_left_alone():
    received = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    assert undivided(lambda: (press(), len(received))) == (None, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=undivided, args=(lambda: received.append(signal.getsignal(signal.SIGINT)),))
    thread.start()
    thread.join()
    assert received[1:] == [signal.default_int_handler]


def test_stop_restores_the_usual_handler(make_scheme):
    scheme = make_scheme()
    scheme.step()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    scheme.stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
