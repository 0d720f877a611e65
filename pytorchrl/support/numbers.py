"""Convert numbers of NumPy to numbers of Python, and check numbers that are arguments of functions."""

from __future__ import annotations

import numpy as np

from pytorchrl.errors import ConfigError


def plain(value: object) -> object:
    """Return a NumPy scalar as a Python value and a NumPy array as nested lists; return any other value unchanged."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def check_whole(name: str, value: object, low: int = 1) -> int:
    """Return `value` as an `int`; raise `ConfigError` unless it is a whole number that is not below `low`."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise ConfigError(f"{name} must be a whole number >= {low}, got {value!r}")
    return number
