"""Check the values of observations: categories and flags must be in their space, and Boxes should be.

Worker processes of `backend="async"` import this module, so it must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import AnySpace
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

RowName = Callable[[int], str]
"""Function from the index of a row to a name of it for error messages."""

# The bounds of Boxes are checked at each of the first steps, which include the first episodes of most environments.
_FIRST_STEPS = 500
# Afterwards, they are checked at each step whose number is a multiple of this one. Checks of one small leaf take 6 us.
_EVERY = 100
# Up to this number of values, Python finds the largest one faster than NumPy.
_FEW = 32


def num_categories(space: AnySpace) -> np.ndarray | int:
    """Return the number of categories of a leaf that is no Box, or of each of its values; flags are 0 or 1."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return np.asarray(space.nvec, np.uint64) if isinstance(space, spaces.MultiDiscrete) else 2


class ValueCheck:
    """Checks the values of observations that are already in the form that actors receive.

    A category outside its space would silently become a wrong input, so it is an error, and each step is checked. Many
    packages declare wrong bounds of a Box, which do no harm, so a number outside of them is only logged, once for each
    leaf, and only some of the steps are checked.

    Args:
        leaves: The space of each leaf, as returned by `flatten_space`.
        starts: For each leaf whose categories do not count from 0 in the environment, the offset.
    """

    def __init__(self, leaves: Mapping[str, AnySpace], starts: Mapping[str, np.ndarray] | None = None) -> None:
        self._spaces, self._starts = dict(leaves), starts or {}
        self._categories: list[tuple[str, np.dtype[np.generic], np.ndarray | int]] = []
        self._boxes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for leaf, space in leaves.items():
            if isinstance(space, spaces.Box):
                low, high = np.asarray(space.low), np.asarray(space.high)
                if not _covers(low, high):
                    self._boxes[leaf] = low, high
            else:
                self._categories.append((leaf, _unsigned(space.dtype), num_categories(space)))
        self._boxes_due = 1
        self.due = self._next()
        """Number of the next step that must be checked; infinite if no step needs a check."""

    def check(self, leaves: Mapping[str, np.ndarray], step: int, name_of: RowName = "env {}".format) -> str | None:
        """Check a step that is due: log numbers outside their Box, and return `problem(leaves)`.

        Args:
            leaves: Leaf -> (E, ...).
            step: Number of the step, from 1; it decides whether Boxes are checked.
            name_of: Function from the index of a row to its name.
        """
        if self._boxes and step >= self._boxes_due:
            self._log_outside(leaves)
            self._boxes_due = step + 1 if step < _FIRST_STEPS else (step // _EVERY + 1) * _EVERY
            self.due = self._next()
        return self.problem(leaves, name_of) if self._categories else None

    def problem(self, leaves: Mapping[str, np.ndarray], name_of: RowName = "env {}".format) -> str | None:
        """Return an error text if a category or flag in `leaves`, (E, ...) each, is outside its space; else None."""
        for leaf, dtype, number in self._categories:
            values = leaves[leaf]
            if type(number) is int and values.size <= _FEW:  # NumPy would take several times as long
                numbers = values.ravel().tolist()
                if not numbers or (max(numbers) < number and min(numbers) >= 0):
                    continue
            # A negative number becomes a large unsigned one, so one comparison finds both kinds of wrong categories.
            unsigned = values.view(dtype) if values.dtype.itemsize == dtype.itemsize else values.astype(np.uint64)
            if isinstance(number, int):
                if unsigned.size and np.maximum.reduce(unsigned, axis=None) >= number:
                    return self._text(leaf, values, unsigned >= number, name_of)
            elif np.count_nonzero(unsigned >= number):
                return self._text(leaf, values, unsigned >= number, name_of)
        return None

    def _next(self) -> float:
        """Return the number of the next step that must be checked."""
        if self._categories:
            return 0
        return self._boxes_due if self._boxes else math.inf

    def _text(self, leaf: str, values: np.ndarray, wrong: np.ndarray, name_of: RowName) -> str:
        index, space = tuple(np.argwhere(wrong)[0].tolist()), self._spaces[leaf]
        start = self._starts.get(leaf)
        found, place = int(values[index]), f" at {list(index[1:])}" if len(index) > 1 else ""
        if start is not None:
            found += int(start if start.ndim == 0 else start[index[1:]])
        allowed = f"{space}" if start is None else f"{space}, counted from {start.tolist()}"
        return (f"{name_of(index[0])}: observation leaf {leaf!r} has the value {found}{place}, which is not in "
                f"{allowed}; return a value of the space, or declare a larger space")

    def _log_outside(self, leaves: Mapping[str, np.ndarray]) -> None:
        for leaf, (low, high) in list(self._boxes.items()):
            values = leaves[leaf]
            below, above = values < low, values > high
            if np.count_nonzero(below) or np.count_nonzero(above):
                index = tuple(np.argwhere(below | above)[0].tolist())
                del self._boxes[leaf]  # one warning is enough
                place = index[1:]
                logger.warning(
                    "observation leaf %r has the value %g, outside its bounds %g to %g; it is used as it is, but the "
                    "space should declare bounds that hold (logged once)",
                    leaf, values[index], low[place], high[place])


def _covers(low: np.ndarray, high: np.ndarray) -> bool:
    """Return whether bounds allow all values of their dtype."""
    if low.dtype.kind == "f":
        return bool(np.isneginf(low).all() and np.isposinf(high).all())
    if low.dtype.kind == "b":
        return True
    limits = np.iinfo(low.dtype)
    return bool((low <= limits.min).all() and (high >= limits.max).all())


def _unsigned(dtype: object) -> np.dtype[np.generic]:
    return np.dtype(f"u{np.dtype(dtype).itemsize}")  # type: ignore[call-overload] # dtypes of spaces are known
