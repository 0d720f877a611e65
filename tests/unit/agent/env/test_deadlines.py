"""Tests of environments that hang: each call, both ways of stepping single environments, and what follows."""

from __future__ import annotations

import threading
import time

import gymnasium as gym
import numpy as np
import pytest

import pytorchrl
from pytorchrl import VecEnv
from pytorchrl.agent.env.deadlines import Calls, TimedEnv
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import ConfigError, EnvError, StoppedError

LIMIT_S = 0.3


class Hanging(gym.Env):
    """An environment in which one call hangs, until the test ends, or for a number of seconds."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium defines it so
    render_mode = "rgb_array"
    built = closed = 0
    gate = threading.Event()

    def __init__(self, call="step", at=3, number=1, seconds=None):
        type(self).built += 1
        self._call, self._at, self._seconds, self._count = call, at, seconds, 0
        self._hangs = type(self).built <= number
        self._maybe_hang("constructor")

    def _maybe_hang(self, call):
        if call == self._call and self._hangs:
            self._count += 1
            if self._count >= (1 if call == "constructor" else self._at):
                self._block()

    def _block(self):
        type(self).gate.wait() if self._seconds is None else time.sleep(self._seconds)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._maybe_hang("reset")
        return np.zeros(2, np.float32), {}

    def step(self, choice):  # the parameter may have any name
        self._maybe_hang("step")
        return np.full(2, 0.5, np.float32), 1.0, bool(self.np_random.random() < 0.3), False, {}

    def render(self):
        self._maybe_hang("render")
        return np.zeros((4, 4, 3), np.uint8)

    def close(self):
        type(self).closed += 1
        self._maybe_hang("close")


@pytest.fixture(autouse=True)
def gate():
    """Open the gate after the test, so that abandoned threads end."""
    Hanging.built = Hanging.closed = 0
    Hanging.gate = threading.Event()
    yield Hanging.gate
    Hanging.gate.set()
    for thread in threading.enumerate():
        if thread.name == "environment":
            thread.join(10)
            assert not thread.is_alive()


def timed(call="step", at=1, **kwargs):
    return TimedEnv(lambda: Hanging(call, at, **kwargs), LIMIT_S)


@pytest.mark.parametrize("call", ["step", "reset", "render", "close"])
def test_a_call_that_hangs_is_named_with_its_stack(call):
    env = timed(call)
    env_call = {"step": lambda: env.step(0), "reset": env.reset, "render": env.render, "close": env.close}[call]
    with pytest.raises(TimeoutError, match=rf"^{call} has not returned within 0\.3 s; it is in\n[\s\S]*in _block"):
        env_call()
    with pytest.raises(TimeoutError, match="was called although an earlier call has not returned"):
        env.step(0)
    env.close()
    Hanging.gate.set()
    deadline = time.monotonic() + 10
    while Hanging.closed < (2 if call == "close" else 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Hanging.closed >= 1


def test_the_late_result_of_a_call_that_timed_out_is_dropped():
    env = timed(seconds=LIMIT_S + 0.3)
    with pytest.raises(TimeoutError, match="step has not returned"):
        env.step(0)
    assert env._state is Calls.TIMED_OUT
    env._results.put(env._results.get(timeout=10))  # the late result has arrived
    for name, call in (("step", lambda: env.step(0)), ("reset", env.reset)):
        with pytest.raises(TimeoutError, match=f"{name} was called although an earlier call has not returned"):
            call()
    env.close()


def test_calls_after_close_are_refused():
    env = timed("none")
    env.reset()
    env.close()
    with pytest.raises(StoppedError, match=r"step was called after close\(\); build a new environment"):
        env.step(0)
    env.close()
    assert (env._state, Hanging.closed) == (Calls.CLOSED, 1)


def test_a_constructor_that_hangs_is_an_error():
    with pytest.raises(EnvError, match=r"env 0: TimeoutError: the constructor has not returned within 0\.1 s"):
        VecEnv.create_factory(Hanging, {"call": "constructor"}, env_timeout_s=0.01)


def test_results_and_errors_of_calls_pass_through():
    env = TimedEnv(lambda: gym.make("CartPole-v1", render_mode="rgb_array"), 30.0)
    same = gym.make("CartPole-v1", render_mode="rgb_array")
    assert np.array_equal(env.reset(seed=3)[0], same.reset(seed=3)[0])
    for action in (0, 1, 1):
        found, expected = env.step(action), same.step(action)
        assert np.array_equal(found[0], expected[0])
        assert found[1:] == expected[1:]
    assert np.array_equal(env.render(), same.render())
    assert env.unwrapped.state is not None
    with pytest.raises(AssertionError):
        env.step(7)
    env.close()
    with pytest.raises(ZeroDivisionError):
        TimedEnv(lambda: 1 // 0, 30.0)


@pytest.mark.parametrize("call", ["step", "reset"])
def test_an_environment_that_hangs_is_replaced_and_stepping_goes_on(caplog, call):
    # The first environment finds the spaces, and the second one hangs.
    envs = VecEnv.create_factory(Hanging, {"call": call, "number": 2}, 1, env_timeout_s=LIMIT_S, on_env_error="restart")
    env = envs(seed=1)
    env.reset()
    for _ in range(40):
        env.step(np.zeros(1, np.int64))
    assert env.num_restarts == 1
    env.close()
    assert f"TimeoutError: {call} has not returned within 0.3 s" in caplog.text
    assert "in _block" in caplog.text


def test_an_environment_in_another_process_is_replaced(caplog):
    envs = VecEnv.create_factory(FaultyEnv, {"fault": "hang", "at": 3}, 2, backend="async", env_timeout_s=LIMIT_S,
                                 on_env_error="restart")
    env = envs(seed=1)
    env.reset()
    for _ in range(6):
        env.step(np.zeros(2, np.int64))
    assert env.num_restarts == 2
    env.close()
    assert caplog.text.count("TimeoutError: step has not returned within 0.3 s") >= 2


def test_the_error_ends_the_run_if_asked():
    Hanging.built = -1  # the environment that finds the spaces does not count
    with pytest.raises(EnvError, match=r"CWorker 0, env 0: step raised after 3 steps.*TimeoutError[\s\S]*in _block"):
        pytorchrl.train("ppo", Hanging, env_kwargs={"number": 5}, num_envs=1, num_steps=8, num_mini_batch=1,
                        env_timeout_s=LIMIT_S, on_env_error="raise", target_steps=100, progress=False, seed=1)


def test_training_is_the_same_with_and_without_a_limit():
    options = {"num_envs": 2, "num_steps": 16, "num_mini_batch": 1, "hidden_sizes": (4,), "backend": "sync",
               "target_steps": 96, "progress": False, "seed": 1}
    agents = [pytorchrl.train("ppo", "CartPole-v1", env_timeout_s=limit, **options) for limit in (None, 60.0)]
    assert agents[0].acting_state["all"].equal(agents[1].acting_state["all"])


def test_native_vector_environments_are_refused_or_avoided():
    with pytest.raises(ConfigError, match=r"env_timeout_s=5 needs single environments.*backend='sync' or 'async'"):
        VecEnv.create_factory("CartPole-v1", vec_env_size=8, backend="vector", env_timeout_s=5.0)
    env = VecEnv.create_factory("CartPole-v1", vec_env_size=8, env_timeout_s=5.0)(seed=1)
    assert isinstance(env.vector, gym.vector.SyncVectorEnv)
    env.close()
    with pytest.raises(ConfigError, match="env_timeout_s must be a number > 0"):
        VecEnv.create_factory("CartPole-v1", env_timeout_s=0.0)
