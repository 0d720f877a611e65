"""Warn about names that a later release removes.

An old name keeps working for one release: its use warns in release `since` and fails in release `removed_in`. Each
warning is a `DeprecationWarning` that states the replacement and both releases. The warning points to the line outside
this package that used the name. Otherwise, users would not see the warning, because by default Python shows a
`DeprecationWarning` only if it points to the user's script.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import ParamSpec, TypeVar

from pytorchrl.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Renamed:
    """The old and the new name of an option or attribute, and the releases that deprecate and remove the old name."""

    old: str
    new: str
    since: str
    """The first release that warns, such as "0.2"."""
    removed_in: str
    """The first release without the old name, such as "0.3"."""


def warn_deprecated(name: str, *, use: str, since: str, removed_in: str) -> None:
    """Warn that `name` is deprecated.

    Args:
        name: The deprecated name, as users write it.
        use: The replacement, or another way to do the same thing; the text completes "use ...".
        since: The first release that warns, such as "0.2".
        removed_in: The first release without the name, such as "0.3".
    """
    warnings.warn(
        f"{name} is deprecated since {since} and will be removed in {removed_in}; use {use}", DeprecationWarning,
        stacklevel=_level_of_the_user())


def deprecated(*, use: str, since: str, removed_in: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes each call of a function or method warn; see `warn_deprecated` for the arguments."""
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            warn_deprecated(f"{function.__qualname__}()", use=use, since=since, removed_in=removed_in)
            return function(*args, **kwargs)

        return warning

    return decorate


def renamed(old: str, new: str, *, since: str, removed_in: str) -> Renamed:
    """Declare that an option or attribute has a new name; see `renamed_options` and `renamed_attribute`."""
    return Renamed(old, new, since, removed_in)


def renamed_options(given: Mapping[str, V], renames: Iterable[Renamed]) -> dict[str, V]:
    """Return options under their new names, and warn for each old name.

    Args:
        given: Options as the user gave them, by name.
        renames: The options that have a new name.

    Raises:
        ConfigError: An option was given under its old name and its new name.
    """
    options = dict(given)
    for each in renames:
        if each.old not in options:
            continue
        if each.new in options:
            raise ConfigError(
                f"{each.old} and {each.new} are the same option, got both; leave out {each.old}, which is its old name")
        warn_deprecated(each.old, use=each.new, since=each.since, removed_in=each.removed_in)
        options = {each.new if name == each.old else name: value for name, value in options.items()}
    return options


def renamed_attribute(owner: object, name: str, renames: Iterable[Renamed]) -> object:
    """Return the attribute that was called `name` before it was renamed, and warn.

    Call this function in the method or function `__getattr__` of a class or module.

    Args:
        owner: The module, or the instance of the class.
        name: The name that `__getattr__` received.
        renames: The attributes that have a new name.

    Raises:
        AttributeError: `name` is not the old name of an attribute.
    """
    for each in renames:
        if each.old == name:
            warn_deprecated(name, use=each.new, since=each.since, removed_in=each.removed_in)
            return getattr(owner, each.new)
    shown = owner.__name__ if isinstance(owner, (type, ModuleType)) else type(owner).__name__
    raise AttributeError(f"{shown!r} has no attribute {name!r}")


def _level_of_the_user() -> int:
    """Return the `stacklevel` with which `warn_deprecated` points outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
