"""Draw the virtual durations of operations in the simulated runtime."""

from __future__ import annotations

import dataclasses
import fnmatch
import random
import time
from collections.abc import Callable, Mapping

from pytorchrl.errors import ConfigError

# The default durations vary uniformly, so that workers neither run in lockstep nor wait long for each other.
DEFAULT_COSTS: Mapping[str, object] = {
    "start": ("uniform", 0.5, 1.5),
    "message": ("uniform", 0.0002, 0.0008),
    "byte": 0.0,
    "step": ("uniform", 0.0005, 0.0015),
    "grad": ("uniform", 0.005, 0.015),
    "update": ("uniform", 0.0005, 0.0015),
    "add": ("uniform", 0.0002, 0.0006),
    "sample": ("uniform", 0.001, 0.003),
    "priorities": ("uniform", 0.0002, 0.0006),
}

_DISTRIBUTIONS: dict[str, tuple[int, Callable[..., Callable[[random.Random], float]]]] = {
    "uniform": (2, lambda low, high: lambda rng: rng.uniform(low, high)),
    "exponential": (1, lambda mean: lambda rng: rng.expovariate(1.0) * mean),
    "lognormal": (2, lambda median, sigma: lambda rng: median * rng.lognormvariate(0.0, sigma)),
}


class Costs:
    """Durations of operations in virtual seconds.

    Operations are "start" (building a worker), "message" (sending a call or a result), "byte" (sending one byte of the
    arrays in a call or a result, in addition to "message"; by default 0, as for workers that share memory), "step" (one
    step of a vector of environments, including the choice of actions), "grad" (computing a gradient), "update"
    (applying a gradient), and "add", "sample" and "priorities" (calls of a replay shard).

    Args:
        costs: Map from operations to durations; operations that it does not contain keep their defaults. A key such as
            `step@*/CWorker 1` applies only to the workers whose names match the pattern after "@". A duration is a
            number of seconds, ("uniform", low, high), ("exponential", mean), ("lognormal", median, sigma) or
            "measured", the real duration of the operation. With "measured", even runs with equal seeds differ.
        seed: Seed of the draws.

    Raises:
        ConfigError: An operation or distribution is unknown, or a time is negative.
    """

    def __init__(self, costs: Mapping[str, object] | None, seed: int) -> None:
        self._rng = random.Random(f"costs {seed}")
        self._rules = [self._rule(key, value) for key, value in {**DEFAULT_COSTS, **(costs or {})}.items()]
        self._has_bytes = any(key.partition("@")[0] == "byte" and value != 0 for key, value in (costs or {}).items())
        self._rules.reverse()  # if several rules match, the one that was given last applies
        self._chosen: dict[tuple[str, str], Callable[[random.Random], float] | None] = {}

    @property
    def has_bytes(self) -> bool:
        """Whether sending a byte takes time for any worker."""
        return self._has_bytes

    @staticmethod
    def _rule(key: str, value: object) -> tuple[str, str, Callable[[random.Random], float] | None]:
        operation, _, worker = key.partition("@")
        if operation not in DEFAULT_COSTS:
            raise ConfigError(f"costs has the key {key!r}; keys are the operations {list(DEFAULT_COSTS)}, with or "
                              "without @worker")
        if value == "measured":
            return operation, worker or "*", None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
            return operation, worker or "*", lambda rng: float(value)
        if isinstance(value, (tuple, list)) and value and value[0] in _DISTRIBUTIONS:
            arity, make = _DISTRIBUTIONS[value[0]]
            numbers = value[1:]
            if len(numbers) == arity and all(isinstance(n, (int, float)) and 0 <= n < float("inf") for n in numbers):
                return operation, worker or "*", make(*numbers)
        raise ConfigError(f"costs[{key!r}] must be seconds >= 0, 'measured', ('uniform', low, high), ('exponential', "
                          f"mean) or ('lognormal', median, sigma), got {value!r}")

    def draw(self, operation: str, worker: str, since: float | None = None) -> float:
        """Return the duration of an operation in virtual seconds.

        If the duration is set to "measured", it is the real time since `since`, a value of `time.perf_counter()`. If
        `since` is None, such a duration is 0.
        """
        key = (operation, worker)
        if key not in self._chosen:
            self._chosen[key] = next(rule for name, pattern, rule in self._rules
                                     if name == operation and fnmatch.fnmatchcase(worker, pattern))
        rule = self._chosen[key]
        if rule is None:
            return 0.0 if since is None else time.perf_counter() - since
        return rule(self._rng)


def num_bytes(content: object) -> int:
    """Return the number of bytes of the arrays and tensors in nested dataclasses, mappings, lists and tuples."""
    if isinstance(size := getattr(content, "nbytes", None), int):
        return size
    if dataclasses.is_dataclass(content):
        return sum(num_bytes(getattr(content, field.name)) for field in dataclasses.fields(content))
    if isinstance(content, Mapping):
        return sum(map(num_bytes, content.values()))
    return sum(map(num_bytes, content)) if isinstance(content, (list, tuple)) else 0
