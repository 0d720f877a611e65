"""Check that results of environments fit the declared spaces and contain neither NaN nor infinity."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import (
    Action,
    AnyEnv,
    AnySpace,
    AnyVectorEnv,
    AnyWrapper,
    Info,
    Observation,
    ResetResult,
    StepResult,
)
from pytorchrl.errors import EnvError, NonFiniteDataError
from pytorchrl.support.terminal import Lines, get_logger
from pytorchrl.support.tracebacks import USER_ERRORS, reraise_of_signal, users_traceback

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)

# The text of an exception is cut to this length, because some environments put whole states into the text.
_MAX_CHARS = 2000
# A traceback is cut to this length; its end is kept, because the end is the most informative part.
_TRACEBACK_CHARS = 8000
# Up to this number of values, a sum of squares takes no longer than a sum of values; see `_has_finite_sum`.
_FEW_VALUES = 1000
_HINTS = (
    ("unexpected keyword argument 'seed'", "reset must accept seed= and options=: `def reset(self, *, seed=None, "
     "options=None)`, and begin with `super().reset(seed=seed)`"),
    ("unexpected keyword argument 'options'", "reset must accept seed= and options=: `def reset(self, *, seed=None, "
     "options=None)`"),
    ("values to unpack", "step must return (observation, reward, terminated, truncated, info) and reset "
     "(observation, info), as Gymnasium defines them"),
)


class GuardedEnv(AnyWrapper):
    """Wrapper that checks an environment's results, and names the worker and the environment in errors.

    Args:
        env: The environment.
        where: Worker and environment index, for error messages.
    """

    def __init__(self, env: AnyEnv, where: str) -> None:
        super().__init__(env)
        self._where = where
        self._seed: int | None = None
        self._num_steps = 0
        self._form: tuple[type, object] | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Reset the environment; raise `EnvError` if the environment raises an exception or violates its contract."""
        self._seed = seed if seed is not None else self._seed
        try:
            result = self.env.reset(seed=seed, options=options)
        except USER_ERRORS as failure:
            raise self._error("reset", failure) from failure
        problem = reset_problem(self.observation_space, result)
        if problem:
            raise EnvError(f"{self._where}: reset: {problem}")
        return result

    def step(self, action: Action) -> StepResult:
        """Step the environment; raise `EnvError` if the environment raises an exception or violates its contract."""
        self._num_steps += 1
        try:
            result = self.env.step(action)
        except USER_ERRORS as failure:
            return self._step_failed(failure)
        # The first step is checked fully; a later step is checked only if its result has a different form.
        if len(result) != 5 or self._form != (type(result[1]), _form(result[0])):
            problem = step_problem(self.observation_space, result)
            if problem:
                raise EnvError(f"{self._where}: step: {problem}")
            self._form = (type(result[1]), _form(result[0]))
        if result[2] or result[3]:  # copy the observation, because the next episode may reuse its memory
            last = result[0]
            return last.copy() if type(last) is np.ndarray else copy.deepcopy(last), *result[1:]
        return result

    def close(self) -> None:
        """Close the environment; an exception is only logged."""
        close_and_log(self.env.close, self._where)

    def _step_failed(self, failure: BaseException) -> StepResult:
        raise self._error("step", failure) from failure

    def _error(self, call: str, failure: BaseException) -> EnvError:
        reraise_of_signal(failure)
        return EnvError(
            f"{self._where}: {call} raised after {self._num_steps} steps, seed {self._seed}: {describe(failure)}")


def close_and_log(close: Callable[[], object], where: str) -> None:
    """Close an environment; an exception is logged but not raised, because the environment is no longer needed.

    Args:
        close: The `close` method of one environment, or of a vector of environments.
        where: Worker and environment index, for the message.
    """
    try:
        close()
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        logger.warning("%s: close raised %s\n%s", where, type(failure).__name__, Lines(traceback_of(failure)))


def traceback_of(failure: BaseException) -> str:
    """Format an exception with its causes and the frames of the user's code; return only the end of a long text."""
    return users_traceback(failure).rstrip("\n")[-_TRACEBACK_CHARS:]


def _form(observation: Observation) -> object:
    """Return the form of an observation: the dtype and shape of an array, or the type of any other observation."""
    if isinstance(observation, np.ndarray):
        return observation.dtype, observation.shape
    return type(observation)


def describe(failure: BaseException) -> str:
    """Return the type and text of `failure`, with a hint if `failure` looks like the result of a common mistake."""
    hint = "; an environment must not call sys.exit()" if isinstance(failure, SystemExit) else hint_for(failure)
    return f"{type(failure).__name__}: {_text(failure)}{hint}"


def hint_for(failure: BaseException) -> str:
    """Return a hint if `failure` looks like a common violation of the Gymnasium API; otherwise an empty string."""
    text = _text(failure)
    return "".join(f"; {hint}" for mark, hint in _HINTS if mark in text)


def _text(failure: BaseException) -> str:
    try:
        return str(failure)[:_MAX_CHARS]
    except Exception as another:  # noqa: BLE001 - reporting an exception must not raise another one
        return f"its __str__ raised {type(another).__name__}"


def space_problem(
    env: AnyEnv | AnyVectorEnv, names: tuple[str, ...] = ("observation_space", "action_space"),
) -> str | None:
    """Return an error text if an attribute in `names` is not a `gymnasium.Space`; None if all attributes are spaces."""
    for name in names:
        space = getattr(env, name, None)
        if not isinstance(space, spaces.Space):
            found = f"has {name} {space!r}" if hasattr(env, name) else f"has no {name}"
            return f"{type(env.unwrapped).__name__} {found}; set self.{name} to a gymnasium.Space in its constructor"
    return None


def reset_problem(space: AnySpace, result: object) -> str | None:
    """Return an error text if the `result` of `reset` violates the Gymnasium API or does not fit `space`; else None."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        return f"expected (observation, info), got {_kind(result)}; return both; info may be empty"
    return observation_problem(space, result[0])


def step_problem(space: AnySpace, result: object) -> str | None:
    """Return an error text if the `result` of `step` violates the Gymnasium API or does not fit `space`; else None."""
    if not (isinstance(result, tuple) and len(result) == 5):
        return (f"expected (observation, reward, terminated, truncated, info), got {_kind(result)}; "
                "split a single `done` into terminated and truncated")
    observation, reward, terminated, truncated, info = result
    if np.ndim(reward) != 0 or not np.issubdtype(np.asarray(reward).dtype, np.number):
        return f"expected a number as reward, got {_kind(reward)}; return float(reward)"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            return f"expected a bool as {name}, got {_kind(flag)}; return bool({name})"
    if not isinstance(info, dict):
        return f"expected a dict as info, got {_kind(info)}"
    return observation_problem(space, observation)


def observation_problem(space: AnySpace, observation: Observation, name: str = "observation") -> str | None:
    """Return an error text if the structure, a shape or a dtype of `observation` does not fit `space`; otherwise None.

    If the space declares floats, other numeric dtypes are accepted, and their conversion is logged.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, Mapping) or set(observation) != set(space.spaces):
            got = sorted(observation) if isinstance(observation, Mapping) else _kind(observation)
            return f"{name}: expected a dict with {sorted(space.spaces)}, got {got}"
        parts = [(f"{name}/{key}", child, observation[key]) for key, child in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space.spaces):
            return f"{name}: expected a tuple of {len(space.spaces)}, got {_kind(observation)}"
        parts = [
            (f"{name}/{i}", child, part)
            for i, (child, part) in enumerate(zip(space.spaces, observation, strict=True))
        ]
    else:
        return _array_problem(space, observation, name)
    return next((problem for n, child, part in parts if (problem := observation_problem(child, part, n))), None)


def _array_problem(space: AnySpace, observation: Observation, name: str) -> str | None:
    array, dtype = np.asarray(observation), space.dtype
    if array.dtype == dtype and array.shape == space.shape:
        return None
    expected = f"{name}: expected {dtype} {space.shape}, got {array.dtype} {array.shape}"
    if array.shape != space.shape:
        return f"{expected}; correct the observation, or the declared space"
    if isinstance(space, spaces.Discrete) and np.issubdtype(array.dtype, np.integer):
        return None
    if np.issubdtype(dtype, np.floating) and (
            (np.issubdtype(array.dtype, np.number) and not np.iscomplexobj(array)) or array.dtype == np.bool_):
        logger.info("%s: casting from %s to %s, the dtype of the space", name, array.dtype, dtype)
        return None
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)) and array.dtype.kind in "iub":
        return None
    return f"{expected}; return `observation.astype(np.{dtype})`, or declare the other dtype"


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {value.shape}"
    return f"a {type(value).__name__}"


def _has_finite_sum(array: np.ndarray) -> bool:
    """Return whether the sum of an array's values (for a small array, of their squares) is finite.

    If the sum is finite, all values are finite. Otherwise, a value is NaN or infinite, or the sum overflows.
    This check is several times as fast as `np.isfinite`.
    """
    if array.size <= _FEW_VALUES:  # `vdot` never warns, so it needs no `errstate`, which takes a microsecond
        return math.isfinite(np.vdot(array, array))
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(np.add.reduce(array, axis=None))


def check_finite(leaves: Mapping[str, np.ndarray | Tensor], worker: str, env_axis: int = 1) -> None:
    """Raise an error if an array of a rollout contains NaN or infinity.

    Args:
        leaves: Key -> array or CPU tensor, e.g. `{"reward": (T, E), "obs": (T + 1, E, ...)}`; integers are not checked.
        worker: The worker that collected the data, for the message.
        env_axis: Axis of the environments.

    Raises:
        NonFiniteDataError: A value is not finite; the message names the worker, the environment and the key.
    """
    for key, leaf in leaves.items():
        array = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
        if array.dtype.kind != "f" or _has_finite_sum(array):
            continue
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            position = tuple(bad[0].tolist())
            raise NonFiniteDataError(
                f"{worker}, env {position[env_axis]}: {key} is {array[position]} at {position}; "
                f"{len(bad)} of {array.size} values are not finite")
