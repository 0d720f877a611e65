"""Define schedules: values that change with the env steps of an experiment."""

from __future__ import annotations

import itertools
import math
import numbers
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from typing_extensions import override

from pytorchrl.errors import ConfigError

FORMS = ("linear:START:END[:STEPS], cosine or exponential in place of linear, piecewise:STEP:VALUE:STEP:VALUE..., or "
         "the MODULE:NAME of a function")
"""Formats of a schedule on the command line, which also accepts a Python call such as `linear(1e-3, 0)`."""
_NUM_SAMPLES = 101
"""Number of values of `progress_remaining` for which a function is tested when its schedule is created."""
_LONGEST_ECHO = 100


class Schedule(ABC):
    """A value that changes with the env steps of an experiment.

    Except for `Computed`, `repr` returns the Python call that creates the schedule.
    """

    @abstractmethod
    def value(self, env_steps: int, target_steps: int) -> float:
        """Return the value after `env_steps` of an experiment that ends at `target_steps`."""

    @property
    @abstractmethod
    def values(self) -> tuple[float, ...]:
        """The numbers that define the schedule; the last number is its final value."""

    @abstractmethod
    def parts(self) -> list[str | float]:
        """Return the schedule as plain values, beginning with its name; `schedule_of` is the inverse."""


_SHAPES: Mapping[str, Callable[[float, float, float], float]] = MappingProxyType({
    "linear": lambda start, end, x: start + (end - start) * x,
    "cosine": lambda start, end, x: start + (end - start) * (1.0 - math.cos(math.pi * x)) / 2.0,
    "exponential": lambda start, end, x: start * (end / start) ** x,
})
"""The function of each shape. Its arguments are the start, the end and the completed fraction of the steps (0 to 1)."""


@dataclass(frozen=True)
class Ramp(Schedule):
    """A value that moves from `start` to `end` over the first `steps` env steps of the experiment, and stays at `end`.

    With `steps=None`, the value reaches `end` after `target_steps` env steps. `shape` is "linear", "cosine" (half a
    period of a cosine, which is flat at both ends) or "exponential" (the value changes by the same factor per step).
    """

    shape: str
    start: float
    end: float
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check that `start` and `end` are finite (with shape "exponential", also positive), and that `steps` >= 1."""
        ends = [_number(value, f"the ends of a {self.shape} schedule") for value in (self.start, self.end)]
        if self.shape == "exponential" and min(ends) <= 0.0:
            raise ConfigError(f"the ends of an exponential schedule must be > 0, got {self.start!r} to {self.end!r}; "
                              "use linear or cosine to reach 0")
        object.__setattr__(self, "start", ends[0])
        object.__setattr__(self, "end", ends[1])
        if self.steps is not None:
            object.__setattr__(self, "steps", _whole(self.steps, 1))

    def __repr__(self) -> str:
        """Return the Python call that creates the schedule."""
        return f"{self.shape}({', '.join(map(repr, self.parts()[1:]))})"

    @override
    def value(self, env_steps: int, target_steps: int) -> float:
        return _SHAPES[self.shape](self.start, self.end, min(1.0, env_steps / (self.steps or max(1, target_steps))))

    @property
    @override
    def values(self) -> tuple[float, ...]:
        return self.start, self.end

    @override
    def parts(self) -> list[str | float]:
        return [self.shape, self.start, self.end, *([] if self.steps is None else [self.steps])]


@dataclass(frozen=True)
class Piecewise(Schedule):
    """A value that is interpolated linearly between points (env step, value), and constant after the last point."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Refuse points that are not pairs, env steps that do not increase from 0, and values that are not finite."""
        if len(self.points) < 2 or not all(isinstance(point, Sequence) and len(point) == 2 for point in self.points):
            raise ConfigError("a piecewise schedule needs two or more points (env_step, value), such as (0, 1e-3), "
                              f"(1000000, 1e-4), got {self.points!r}")
        what = "the values of a piecewise schedule"
        points = tuple((_whole(step, 0), _number(value, what)) for step, value in self.points)
        steps = [step for step, _ in points]
        if steps[0] != 0 or any(later <= step for step, later in itertools.pairwise(steps)):
            raise ConfigError(f"the env steps of a piecewise schedule must start at 0 and increase, got {steps}")
        object.__setattr__(self, "points", points)

    def __repr__(self) -> str:
        """Return the Python call that creates the schedule."""
        return f"piecewise({', '.join(map(repr, self.points))})"

    @override
    def value(self, env_steps: int, target_steps: int) -> float:
        after = bisect_right(self.points, env_steps, key=lambda point: point[0])
        if after == len(self.points):
            return self.points[-1][1]
        (start, low), (end, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * (env_steps - start) / (end - start)

    @property
    @override
    def values(self) -> tuple[float, ...]:
        return tuple(value for _, value in self.points)

    @override
    def parts(self) -> list[str | float]:
        return ["piecewise", *(number for point in self.points for number in point)]


@dataclass(frozen=True)
class Computed(Schedule):
    """A value that a function computes from the remaining share of the experiment, which falls from 1 to 0.

    The function is tested when the schedule is created. Each of its values is checked against the range of the option.
    """

    function: Callable[[float], float]
    option: str
    """Name of the option, which error messages contain."""
    low: float | None
    high: float | None
    exclusive: bool
    """Whether `low` itself is refused, except at the end of the experiment."""

    NAME: ClassVar[str] = "function"
    """The first value of `parts()`."""

    def __post_init__(self) -> None:
        """Test the function at `_NUM_SAMPLES` evenly spaced points of the experiment.

        Raises:
            ConfigError: The function raises, or does not return a number in the option's range.
        """
        for index in range(_NUM_SAMPLES):
            self.value(index, _NUM_SAMPLES - 1)

    def __repr__(self) -> str:
        """Return the module and name of the function; if the function is a callable object, name its class instead."""
        function: object = self.function
        if not hasattr(function, "__qualname__") or getattr(function, "__module__", None) is None:
            function = type(function)
        return f"{function.__module__}.{getattr(function, '__qualname__')}"  # noqa: B009 - some objects lack it

    @override
    def value(self, env_steps: int, target_steps: int) -> float:
        """Return the function's value after `env_steps`.

        Raises:
            ConfigError: The function raises, or does not return a number in the option's range.
        """
        remaining = 1.0 - min(1.0, env_steps / max(1, target_steps))
        where = f"{self.option}: {self!r} at progress_remaining={remaining:g}"
        try:
            returned = self.function(remaining)
        except Exception as error:
            raise ConfigError(f"{where} raised {error!r}") from error
        try:
            number = float(returned)
        except (TypeError, ValueError):
            raise ConfigError(f"{where} must return a number, got {returned!r}") from None
        if wrong := out_of_range(number, self.low, self.high, self.exclusive and remaining > 0.0):
            raise ConfigError(f"{where} must be {wrong}, got {number!r}")
        return number

    @property
    def values(self) -> tuple[float, ...]:
        """An empty tuple: a function has no fixed numbers to check in advance; `value` checks each result."""
        return ()

    def parts(self) -> list[str | float]:
        """Return the function's name, since the function itself is not a plain value."""
        return [self.NAME, repr(self)]


def linear(start: float, end: float, steps: int | None = None) -> Schedule:
    """Return a schedule that moves linearly from `start` to `end` over `steps` env steps.

    If `steps` is None, the value reaches `end` after the experiment's `target_steps`.

    Examples:
        >>> linear(1.0, 0.0).value(env_steps=25, target_steps=100)
        0.75
    """
    return Ramp("linear", start, end, steps)


def cosine(start: float, end: float, steps: int | None = None) -> Schedule:
    """Return a schedule that moves from `start` to `end` along half a period of a cosine; see `linear` for `steps`."""
    return Ramp("cosine", start, end, steps)


def exponential(start: float, end: float, steps: int | None = None) -> Schedule:
    """Return a schedule that moves from `start` to `end`, both above 0, by a constant factor in each step.

    See `linear` for `steps`.
    """
    return Ramp("exponential", start, end, steps)


def piecewise(*points: Sequence[float]) -> Schedule:
    """Return a schedule that interpolates linearly between points (env step, value); the first point is at env step 0.

    The value is constant after the last point.

    Examples:
        >>> piecewise((0, 1.0), (100, 0.5), (200, 0.0)).value(env_steps=150, target_steps=1000)
        0.25
    """
    return Piecewise(tuple(points))  # type: ignore[arg-type] # `Piecewise` checks the points


def schedule_of(parts: Sequence[str | float]) -> Schedule:
    """Return the schedule that `Schedule.parts()` describes; numbers may be given as strings.

    Raises:
        ConfigError: The parts do not describe a schedule.
    """
    name, *given = parts or [""]
    shown = ":".join(map(str, parts))[:_LONGEST_ECHO]
    try:
        values = [float(value) if isinstance(value, str) else value for value in given]
    except ValueError:
        raise ConfigError(f"a schedule is made of numbers, as in {FORMS}, got {shown}") from None
    if name in _SHAPES and len(values) in (2, 3):
        return Ramp(str(name), values[0], values[1], _whole(values[2], 1) if len(values) == 3 else None)
    if name == "piecewise" and len(values) % 2 == 0:
        return piecewise(*zip(values[::2], values[1::2], strict=True))
    raise ConfigError(f"a schedule must have the form {FORMS}, got {shown}")


def as_schedule(value: object, option: str, low: float | None, high: float | None, exclusive: bool) -> object:
    """Convert a function or a list of points to a schedule; return any other value unchanged.

    Args:
        value: The user's value for an option that may be a schedule.
        option: Name of the option.
        low: Smallest allowed value.
        high: Largest allowed value.
        exclusive: Whether `low` itself is refused. At the end of the schedule, the value may nevertheless be `low`.

    Raises:
        ConfigError: The points are not valid, or the function does not return numbers within the range.
    """
    if isinstance(value, (list, tuple)):
        try:
            return piecewise(*value)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None
    if callable(value) and not isinstance(value, type):
        return Computed(value, option, low, high, exclusive)
    return value


def out_of_range(number: float, low: float | None, high: float | None, exclusive: bool) -> str:
    """Return the requirement that a number violates, such as ">= 0.0 and <= 1.0", or "" if it violates none."""
    if not math.isfinite(number):
        return "finite"
    too_low = low is not None and (number <= low if exclusive else number < low)
    if not too_low and (high is None or number <= high):
        return ""
    return bounds_text(low, high, exclusive)


def bounds_text(low: float | None, high: float | None, exclusive: bool) -> str:
    """Return a range as text, such as ">= 0.0 and <= 1.0", or "" if there are no bounds."""
    bounds = [f"{'>' if exclusive else '>='} {low}"] if low is not None else []
    return " and ".join(bounds + ([f"<= {high}"] if high is not None else []))


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ConfigError(f"{what} must be finite numbers, got {value!r}")
    return float(value)


def _whole(value: object, low: int) -> int:
    """Convert a number of env steps, such as 1e6, to an int; refuse fractions and numbers below `low`."""
    number = _number(value, "env steps of a schedule")
    if not number.is_integer() or number < low:
        raise ConfigError(f"env steps of a schedule must be whole numbers >= {low}, got {value!r}")
    return int(number)
