"""Declare options (name, type, default, range, choices, help), and check values against the declarations."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from pytorchrl.agent.option_values.text import to_python
from pytorchrl.agent.schedules import Schedule, as_schedule, bounds_text, out_of_range
from pytorchrl.errors import ConfigError
from pytorchrl.support.numbers import plain
from pytorchrl.support.untyped import ANY, OptionsOfSubclass, TypeHint

_UNION_TYPES = (typing.Union, types.UnionType)
# Types of collections whose items all have one type. Tuples and mappings are checked separately.
_COLLECTIONS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Set)
# The names of types in errors, in the singular and the plural.
_NAMES: dict[object, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"), float: ("a number", "numbers"), bool: ("True or False", "booleans"),
    str: ("a string", "strings"), type(None): ("None", "None"), Schedule: ("a schedule", "schedules"),
    ANY: ("any value", "any values"), object: ("any value", "any values"),
}


@dataclass(frozen=True)
class Declaration:
    """The declaration of one option, read from a field of an `Options` class."""

    name: str
    type: object
    """The evaluated annotation, such as `int | None`."""
    field: dataclasses.Field[object] = dataclasses.field(repr=False)

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.field.default is dataclasses.MISSING and self.field.default_factory is dataclasses.MISSING

    @property
    def default(self) -> object:
        """The default value (a new object if mutable); `dataclasses.MISSING` for a required option."""
        factory = self.field.default_factory
        return self.field.default if factory is dataclasses.MISSING else factory()

    @functools.cached_property
    def is_default_valid(self) -> bool:
        """Whether the default passes all checks without a conversion; always False for mutable defaults."""
        default = self.field.default
        return (default is not dataclasses.MISSING and self.converted(default) is default
                and self.problem(default) is None)

    @property
    def help(self) -> str:
        """The help text, one or two sentences; empty if the field was not declared by `option`."""
        return self.field.metadata.get("help", "")

    @property
    def low(self) -> float | None:
        """The smallest allowed value; if `is_exclusive`, values must be greater. None if there is no lower bound."""
        return self.field.metadata.get("low")

    @property
    def high(self) -> float | None:
        """The largest allowed value; None if there is no upper bound."""
        return self.field.metadata.get("high")

    @property
    def is_exclusive(self) -> bool:
        """Whether `low` itself is refused, except as the last value of a `Schedule`."""
        return self.field.metadata.get("exclusive", False)

    @functools.cached_property
    def choices(self) -> tuple[object, ...] | None:
        """All allowed values (for an enum, the values of its members); None if the option has no list of values."""
        declared = self.field.metadata.get("choices")
        if declared is not None:
            return declared
        kind = _enum_of(self.type)
        is_closed = kind is not None and all(other in (kind, str, type(None)) for other in _members(self.type))
        return tuple(member.value for member in kind) if kind is not None and is_closed else None

    @property
    def allowed(self) -> str:
        """A description of the allowed values for error messages, such as "a whole number >= 1 or None"."""
        if self.choices is None:
            return type_name(self.type, bounds_text(self.low, self.high, self.is_exclusive))
        return f"one of {list(self.choices)}" + (" or None" if self._may_be_none(self.choices) else "")

    def converted(self, value: object) -> object:
        """Convert a value to the form in which options store it.

        Depending on the type of the option, a function or a list of points becomes a schedule, a list becomes a tuple,
        the value of an enum member becomes the member, and numbers and arrays of NumPy become numbers and lists.

        Raises:
            ConfigError: The value cannot be converted to a schedule.
        """
        if type(value) not in (int, float, bool, str):
            value = without_numpy(self.type, value)
            if str in _members(self.type) and not fits(self.type, value):
                value = _as_text(value)
        if self.field.metadata and Schedule in _parts_of(self.type)[1]:
            return as_schedule(value, self.name, self.low, self.high, self.is_exclusive)
        if _enum_of(self.type) is not None:
            return as_member(self.type, value)
        if isinstance(value, list):
            members = (self.type, *_parts_of(self.type)[1])
            if any(typing.get_origin(member) is tuple for member in members):
                return tuple(value)
        return value

    def stored(self, value: object) -> object:
        """Return the form in which options store a value.

        Raises:
            ConfigError: The value is not allowed, or does not pass the option's own check.
        """
        value = self.converted(value)
        if problem := self.problem(value):
            raise ConfigError(problem)
        check = self.field.metadata.get("check")
        return value if check is None else check(value)

    def problem(self, value: object) -> str | None:
        """Return an error message if `value`, a result of `converted`, is not allowed; otherwise None."""
        if not self.field.metadata:
            return None
        choices = self.choices
        if choices is not None and not self._is_choice(value, choices):
            return f"{self.name} must be {self.allowed}, got {to_python(value)}{_nearest(value, choices)}"
        if not fits(self.type, value):
            return f"{self.name} must be {self.allowed}, got {to_python(value)}"
        if isinstance(value, Schedule):
            return self._problem_of_schedule(value)
        if ANY in typing.get_args(self.type):  # arguments of the user's own code, such as infinite bounds
            return None
        for number in _numbers(value):
            if wrong := out_of_range(number, self.low, self.high, self.is_exclusive):
                return f"{self.name} must be {self.allowed if math.isfinite(number) else wrong}, got {to_python(value)}"
        return None

    def _problem_of_schedule(self, schedule: Schedule) -> str | None:
        # A schedule may end at an excluded bound, because it reaches the bound only at the last step.
        for index, number in enumerate(schedule.values):
            is_last = index == len(schedule.values) - 1
            if wrong := out_of_range(number, self.low, self.high, self.is_exclusive and not is_last):
                return f"{self.name} must be {wrong}, got {to_python(schedule)}"
        return None

    def _is_choice(self, value: object, choices: tuple[object, ...]) -> bool:
        # `choices` contains the values of enum members and the names of functions. A member or a function itself is
        # therefore not found in `choices`, and is accepted if it has the right type.
        return fits(self.type, value) and (
            isinstance(value, enum.Enum) or (value is None and self._may_be_none(choices))
            or callable(value) or any(_same(choice, value) for choice in choices))

    def _may_be_none(self, choices: tuple[object, ...]) -> bool:
        return type(None) in _members(self.type) and None not in choices


def as_member(hint: object, value: object) -> object:
    """Return the member of the enum in the annotation `hint` that `value` names; return any other value unchanged.

    Enums may understand other names than the values of their members, such as "async" for "asynchronous".
    """
    kind = _enum_of(hint)
    if kind is None:
        return value
    try:
        member = kind(value)
    except (ConfigError, ValueError):
        return value
    return member if isinstance(value, str) or _same(member.value, value) else value


def _as_text(value: object) -> object:
    """Return a path or a device of torch as a string; return any other value unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if (type(value).__module__, type(value).__name__) == ("torch", "device") else value


def without_numpy(hint: object, value: object) -> object:
    """Return a value of an option with Python's numbers and lists in place of NumPy's, also inside of collections.

    Parts of the value for which the annotation `hint` allows any object are returned unchanged.
    """
    members = _members(hint)
    if any(member in (ANY, object) for member in members):
        return value
    value = plain(value)
    parts = [_parts_of(member) for member in members]
    if isinstance(value, (list, tuple)):
        of_items = next((arguments[0] for origin, arguments in parts if origin in (tuple, *_COLLECTIONS)), float)
        items = [without_numpy(of_items, item) for item in value]
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, Mapping):
        of_items = next((arguments[1] for origin, arguments in parts if len(arguments) == 2 and origin is not tuple),
                        object)
        pairs = {key: without_numpy(of_items, item) for key, item in value.items()}
        return value if all(map(operator.is_, pairs.values(), value.values())) else pairs
    return value


@functools.cache
def declarations_of(options: type[OptionsOfSubclass]) -> Mapping[str, Declaration]:
    """Return the declarations of a dataclass of options, by name, in the order of its fields."""
    hints = typing.get_type_hints(options)
    return types.MappingProxyType({
        field.name: Declaration(field.name, hints[field.name], field) for field in dataclasses.fields(options)})


def fits(hint: object, value: object) -> bool:
    """Return whether a value and its items match a type annotation.

    A whole number also fits `float`; True and False fit only `bool`.
    """
    origin, arguments = _parts_of(hint)
    if hint is ANY:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in _UNION_TYPES:
        return any(fits(argument, value) for argument in arguments)
    if origin is typing.Literal:
        return any(_same(argument, value) for argument in arguments)
    if origin is not None:
        return _fits_generic(origin, arguments, value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _fits_generic(origin: TypeHint, arguments: tuple[object, ...], value: object) -> bool:
    if origin is collections.abc.Callable:
        return callable(value)
    if not isinstance(value, origin):
        return False
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(arguments[0], item) for item in value)
        return len(value) == len(arguments) and all(map(fits, arguments, value))
    if issubclass(origin, Mapping):
        return all(fits(arguments[0], key) and fits(arguments[1], item) for key, item in value.items())
    if origin in _COLLECTIONS:  # a string is technically a sequence of strings, but is refused
        return not isinstance(value, (str, bytes)) and all(fits(arguments[0], item) for item in value)
    return True


def type_name(hint: object, bounds: str = "", is_plural: bool = False) -> str:
    """Return a type annotation in words for error messages, such as "a whole number >= 1 or None".

    Args:
        hint: The annotation.
        bounds: Range of the numbers in the annotation, such as ">= 1".
        is_plural: Whether to return the plural.
    """
    if hint in (int, float) and bounds:
        return f"{_NAMES[hint][is_plural]} {bounds}"
    if hint in _NAMES:
        return _NAMES[hint][is_plural]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNION_TYPES:
        *others, last = (type_name(argument, bounds, is_plural) for argument in arguments)
        return f"{', '.join(others)} or {last}"
    if origin is typing.Literal:
        return f"one of {list(arguments)}"
    if origin is tuple:
        return ("tuples or lists of " if is_plural else "a tuple or list of ") + _tuple_items(arguments, bounds)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = arguments
        names = f"{type_name(key, is_plural=True)} to {type_name(item, bounds, is_plural=True)}"
        kind = "dict" if issubclass(origin, dict) else "mapping"
        return (f"{kind}s of " if is_plural else f"a {kind} of ") + names
    if origin in _COLLECTIONS:
        kind = origin.__name__.lower()
        return (f"{kind}s of " if is_plural else f"a {kind} of ") + type_name(arguments[0], bounds, is_plural=True)
    if origin is collections.abc.Callable:
        return "functions" if is_plural else "a function"
    path = origin or hint
    if isinstance(path, type) and issubclass(path, os.PathLike):
        return "paths" if is_plural else "a path"
    return getattr(hint, "__name__", str(hint)).replace("typing.", "")


def _tuple_items(arguments: tuple[object, ...], bounds: str) -> str:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return type_name(arguments[0], bounds, is_plural=True)
    return f"{len(arguments)} items: {', '.join(type_name(argument, bounds) for argument in arguments)}"


@functools.cache
def _parts_of(hint: object) -> tuple[object, tuple[object, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _members(hint: object) -> tuple[object, ...]:
    """Return the members of a union; for any other annotation, return the annotation itself as the only member."""
    return typing.get_args(hint) if typing.get_origin(hint) in _UNION_TYPES else (hint,)


@functools.cache
def _enum_of(hint: object) -> type[enum.Enum] | None:
    """Return the enum class in an annotation, which may be a union; None if the annotation contains no enum."""
    types_ = (member for member in _members(hint) if isinstance(member, type))
    return next((member for member in types_ if issubclass(member, enum.Enum)), None)


def _same(one: object, other: object) -> bool:
    """Return whether two values are equal; True and 1 are not equal."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def _nearest(value: object, choices: tuple[object, ...]) -> str:
    # Classes are compared by name, so that the error for torch.nn.ReLU suggests "relu".
    text = (value.__name__ if isinstance(value, type) else str(value)).lower()
    by_lower = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(text, by_lower, n=1)
    return f"; did you mean {str(by_lower[near[0]])!r}?" if near else ""


def _numbers(value: object) -> list[float]:
    """Return all numbers in `value`, including numbers in nested tuples and in the values of nested mappings."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [value]
    if isinstance(value, Mapping):
        return _numbers(tuple(value.values()))
    if isinstance(value, tuple):
        return [number for item in value for number in _numbers(item)]
    return []
