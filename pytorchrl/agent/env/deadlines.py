"""Limit the time of each call of an environment; a call that takes too long raises `TimeoutError`.

Worker processes of `backend="async"` import this module, so it must not import torch.
"""

from __future__ import annotations

import enum
import functools
import queue
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import gymnasium as gym
from gymnasium.core import RenderFrame

from pytorchrl.agent.env.aliases import Action, AnyEnv, AnyWrapper, Info, ResetResult, StepResult
from pytorchrl.errors import StoppedError
from pytorchrl.support.tracebacks import USER_ERRORS, stack_of

T = TypeVar("T")

# A constructor may take this many times as long as a step, because simulators load data in the constructor.
_CONSTRUCTOR_FACTOR = 10.0


class Calls(enum.Enum):
    """State of the calls of a `TimedEnv`."""

    POSSIBLE = "the latest call has returned"
    TIMED_OUT = "a call has not returned in time; further calls are refused, and its late result is dropped"
    CLOSED = "the environment was closed; further calls are refused"


class TimedEnv(AnyWrapper):
    """Wrapper that calls an environment's constructor and methods in one thread, and limits the time of each call.

    If a call takes too long, its thread is abandoned, because Python cannot end a thread from outside. After `close()`,
    the abandoned thread closes the environment as soon as the call returns.

    The thread belongs to this object and ends after `close()`. Both queues are bounded without a limit of their own:
    each call waits for its result, so a queue contains one entry at most, and the None with which `close()` ends the
    thread. An error in the thread is the result of the call that caused it.

    Args:
        build: Function that builds the environment.
        timeout_s: Longest time of `reset`, `step`, `render` or `close`, in seconds.

    Raises:
        TimeoutError: The constructor took longer than ten times `timeout_s`.
        Exception: Any exception that the constructor raised.
    """

    def __init__(self, build: Callable[[], AnyEnv], timeout_s: float) -> None:
        self._timeout_s, self._state = timeout_s, Calls.POSSIBLE
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], dict[str, object]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self._thread.start()
        try:
            env = self._call("the constructor", build, _CONSTRUCTOR_FACTOR * timeout_s)
        except BaseException:
            self._calls.put(None)
            raise
        super().__init__(env)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Reset the environment; raise `TimeoutError` if the call does not return in time."""
        return self._call("reset", self.env.reset, self._timeout_s, seed=seed, options=options)

    def step(self, action: Action) -> StepResult:
        """Step the environment; raise `TimeoutError` if the call does not return in time."""
        return self._call("step", functools.partial(self.env.step, action), self._timeout_s)

    def render(self) -> RenderFrame | list[RenderFrame] | None:
        """Render the environment; raise `TimeoutError` if the call does not return in time."""
        return self._call("render", self.env.render, self._timeout_s)

    def close(self) -> None:
        """Close the environment. If an earlier call still hangs, the environment is closed when that call returns."""
        try:
            if self._state is Calls.POSSIBLE:
                self._call("close", self.env.close, self._timeout_s)
        finally:
            if self._state is Calls.POSSIBLE:
                self._state = Calls.CLOSED
            self._calls.put(None)

    def _call(self, name: str, function: Callable[..., T], timeout_s: float, **arguments: object) -> T:
        if self._state is Calls.TIMED_OUT:
            raise TimeoutError(f"{name} was called although an earlier call has not returned")
        if self._state is Calls.CLOSED:
            raise StoppedError(f"{name} was called after close(); build a new environment")
        self._calls.put((function, arguments))
        try:
            result, error = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._state = Calls.TIMED_OUT
            raise TimeoutError(f"{name} has not returned within {timeout_s:g} s; it is in\n"
                               f"{stack_of(self._thread)}") from None
        if error is not None:
            raise error
        return cast("T", result)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an environment that runs in a thread cannot be pickled")

    def _serve(self) -> None:
        env: AnyEnv | None = None
        while (call := self._calls.get()) is not None:
            function, arguments = call
            try:
                result = function(**arguments)
            except USER_ERRORS as error:
                self._results.put((None, error))
            else:
                if env is None and isinstance(result, gym.Env):  # the first call builds the environment
                    env = result
                self._results.put((result, None))
        if self._state is Calls.TIMED_OUT and env is not None:
            env.close()
