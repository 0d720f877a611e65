"""Trees over an array whose values change, which compute sums and minima over ranges of it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pytorchrl.errors import ArgumentError

_WIDTH = 32
"""Number of children of a node. With wide nodes, a tree has few levels, and NumPy needs few calls for many changes."""
_MAX_TOP = 2048
"""Largest number of nodes of the highest level, whose running results are recomputed after each change."""
_FEW = 512
"""Largest number of changes for which recomputing common parents repeatedly is cheaper than removing duplicates."""


class _Level:
    """The nodes of one level, in blocks of `_WIDTH`; each block has one parent, a node of the next higher level."""

    def __init__(self, num_nodes: int, neutral: float) -> None:
        """Create at least `num_nodes` nodes with the neutral value."""
        self.num_blocks = -(-num_nodes // _WIDTH)
        self.nodes, self.running = (_filled((self.num_blocks, _WIDTH), neutral) for _ in range(2))
        """`running` contains, for each node, the sum or minimum of the nodes of its block up to this node."""


def _filled(shape: tuple[int, int], value: float) -> np.ndarray:
    """Return an array of a single value; for 0, the operating system allocates the memory only when it is written."""
    return np.full(shape, value) if value else np.zeros(shape)


class _Tree:
    """Tree with `capacity` values as its lowest nodes; each higher node is the sum or minimum of its children.

    Instead of these sums alone, each block of children stores its running sums, in which a prefix sum is found by one
    comparison. Changes are collected: the nodes above changed values are computed when a result is read. They are
    computed anew from their children, so that rounding errors do not accumulate, and results depend on the values only,
    not on the order of changes.
    """

    _operation: ClassVar[np.ufunc]
    _neutral: ClassVar[float]

    def __init__(self, capacity: int) -> None:
        """Create a tree of `capacity` >= 1 values, all of them neutral: 0 for sums, infinity for minima."""
        if capacity < 1:
            raise ArgumentError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._levels: list[_Level] = []
        num_nodes = capacity
        while num_nodes > _MAX_TOP or not self._levels:
            self._levels.append(_Level(num_nodes, self._neutral))
            num_nodes = self._levels[-1].num_blocks
        self._top_nodes, self._top = (np.full(num_nodes, self._neutral) for _ in range(2))
        self._values = self._levels[0].nodes.reshape(-1)
        self._is_stale = np.zeros(self._levels[0].num_blocks, np.bool_)
        self._has_stale = False

    def set(self, ids: np.ndarray, values: np.ndarray | float) -> None:
        """Replace values; for a repeated id, the last value is used.

        Args:
            ids: (N,) int, in [0, capacity).
            values: (N,) float, or one value for all ids; neither negative nor NaN.

        Raises:
            ArgumentError: An id is out of range, a value is negative or NaN, or the lengths differ.
        """
        ids = self._checked(ids)
        values = np.asarray(values, dtype=np.float64)
        if values.ndim and len(values) != len(ids):
            raise ArgumentError(f"expected one value for each id, got {len(ids)} ids and {len(values)} values")
        if not np.minimum.reduce(values, axis=None, initial=np.inf) >= 0.0:  # NaN is the minimum of values with NaN
            raise ArgumentError("values must not be negative or NaN")
        self._values[ids] = values
        self._is_stale[ids // _WIDTH] = True
        self._has_stale = True

    def get(self, ids: np.ndarray) -> np.ndarray:
        """Return the values of `ids`, (N,) float64; raise `ArgumentError` if an id is out of range."""
        return self._values.take(self._checked(ids))

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """Return the sum or minimum of the values with ids in [start, end); the neutral value if the range is empty.

        Args:
            start: First id.
            end: One past the last id. A negative number counts from the capacity; None is the capacity.
        """
        self._refresh()
        low, high = start, self.capacity if end is None else end + self.capacity if end < 0 else end
        result = self._neutral
        for nodes in (*(level.nodes.reshape(-1) for level in self._levels), self._top_nodes):
            first, last = -(-low // _WIDTH), high // _WIDTH  # the whole blocks in the range
            if nodes is self._top_nodes or first >= last:
                return float(self._operation.reduce(nodes[low:high], initial=result))
            for part in (nodes[low:first * _WIDTH], nodes[last * _WIDTH:high]):
                result = self._operation.reduce(part, initial=result)
            low, high = first, last
        return result

    def clear(self) -> None:
        """Set all values to the neutral value: 0 for sums, infinity for minima."""
        for level in self._levels:
            level.nodes.fill(self._neutral)
            level.running.fill(self._neutral)
        for array in (self._top_nodes, self._top):
            array.fill(self._neutral)
        self._is_stale.fill(False)
        self._has_stale = False

    @property
    def _whole(self) -> float:
        """The sum or minimum of all values."""
        self._refresh()
        return float(self._top[-1])

    def _refresh(self) -> None:
        """Compute the nodes above all values that changed since the last call."""
        if not self._has_stale:
            return
        blocks = self._is_stale.nonzero()[0]
        self._is_stale[blocks] = False
        self._has_stale = False
        for level, above in zip(self._levels, (*self._levels[1:], None), strict=True):
            running = self._operation.accumulate(level.nodes.take(blocks, axis=0), axis=1)
            level.running[blocks] = running
            parents = self._top_nodes if above is None else above.nodes.reshape(-1)
            parents[blocks] = running[:, -1]
            blocks = blocks // _WIDTH
            if len(blocks) > _FEW:  # blocks with the same parent are adjacent
                blocks = blocks[np.append(True, blocks[1:] != blocks[:-1])]
        self._operation.accumulate(self._top_nodes, out=self._top)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, dtype=np.int64)
        # As unsigned numbers, negative ids are the largest ones.
        if len(ids) and np.maximum.reduce(ids.view(np.uint64)) >= self.capacity:
            raise ArgumentError(f"ids must be in [0, {self.capacity}), got {ids.min()} to {ids.max()}")
        return ids


class SumTree(_Tree):
    """Tree that computes sums over ranges, and finds a value by its prefix sum, in O(log capacity)."""

    _operation, _neutral = np.add, 0.0

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._whole

    def find_prefix(self, mass: np.ndarray) -> np.ndarray:
        """Return, for each mass m, the id i for which value[0] + ... + value[i - 1] <= m < value[0] + ... + value[i].

        Args:
            mass: (N,) float, the numbers m >= 0. If m is not less than the sum of all values, i is the last id whose
                value is not 0 (and not so small that rounding loses it).

        Returns:
            (N,) int64 ids; their values are never 0.

        Raises:
            ArgumentError: A mass is negative or NaN, or all values are 0.
        """
        mass = np.asarray(mass, dtype=np.float64)
        if not np.minimum.reduce(mass, initial=np.inf) >= 0.0:
            raise ArgumentError("mass must not be negative or NaN")
        total = self.total
        if total <= 0.0:
            raise ArgumentError("expected at least one value above 0, but all values are 0")
        # The first running sum above a mass belongs to a node that increases it, so the node's sum is not 0.
        mass = np.minimum(mass, np.nextafter(total, 0.0))
        found = self._top.searchsorted(mass, side="right")
        before = self._top.take(found - 1, mode="wrap") * (found > 0)
        for level in reversed(self._levels):
            mass = mass - before
            running = level.running.take(found, axis=0)
            # Rounding can make a mass equal to or larger than the sum of its block.
            mass = np.minimum(mass, np.nextafter(running[:, -1], 0.0))
            child = (running > mass[:, None]).argmax(axis=1)
            found = found * _WIDTH + child
            before = level.running.reshape(-1).take(found - 1, mode="wrap") * (child > 0)
        return found


class MinTree(_Tree):
    """Tree that computes minima over ranges; unset values are infinite."""

    _operation, _neutral = np.minimum, np.inf

    @property
    def smallest(self) -> float:
        """Minimum of all values."""
        return self._whole
