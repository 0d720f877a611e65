"""Sums and minima over ranges of values that change: binary trees in one array each. All work on arrays of ids."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

_FEW = 512
"""Of so few changes, computing a common parent once for each is cheaper than finding out which are common."""


class _Tree:
    """Values 0..capacity-1 are the leaves of a full binary tree; a node holds what its two children make together.

    Node 1 is the root, 2i and 2i + 1 are the children of node i. The number of leaves is padded to a power of two with
    the operation's neutral value. A change recomputes every node above it, so that rounding errors never add up.
    """

    _operation: ClassVar[np.ufunc]
    _neutral: ClassVar[float]

    def __init__(self, capacity: int) -> None:
        """Make a tree of `capacity` >= 1 leaves, all neutral (0 for sums, infinity for minima)."""
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._num_leaves = 1 << (capacity - 1).bit_length()
        self._nodes = np.full(2 * self._num_leaves, self._neutral)

    def set(self, ids: np.ndarray, values: np.ndarray | float) -> None:
        """Replace values; of repeated ids the last one wins.

        Args:
            ids: (N,) int, in [0, capacity).
            values: (N,) float, or one for all of them; not negative, not NaN.

        Raises:
            ValueError: An id out of range, a value that is negative or NaN, or lengths that differ.
        """
        ids = self._checked(ids)
        values = np.asarray(values, dtype=np.float64)
        if values.ndim and len(values) != len(ids):
            raise ValueError(f"got {len(ids)} ids and {len(values)} values")
        if not (values >= 0.0).all():
            raise ValueError("values must not be negative or NaN")
        nodes = ids + self._num_leaves
        self._nodes[nodes] = values
        is_many = len(nodes) > _FEW
        if is_many:
            nodes = np.unique(nodes)
        for _ in range(self._num_leaves.bit_length() - 1):
            nodes >>= 1
            if is_many:
                first = np.ones(len(nodes), dtype=np.bool_)  # of those with the same parent, which are neighbours
                np.not_equal(nodes[1:], nodes[:-1], out=first[1:])
                nodes = nodes[first]
            left = nodes << 1
            self._nodes[nodes] = self._operation(self._nodes[left], self._nodes[left + 1])

    def get(self, ids: np.ndarray) -> np.ndarray:
        """Values of `ids`, (N,) float64; raises `ValueError` for an id out of range."""
        return self._nodes[self._checked(ids) + self._num_leaves]

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """What the values in [start, end) make together.

        Args:
            start: First id.
            end: One past the last id; a negative one counts from the capacity, None is the capacity.

        Returns:
            The neutral value for an empty range.
        """
        end = self.capacity if end is None else end + self.capacity if end < 0 else end
        result, low, high = self._neutral, start + self._num_leaves, end + self._num_leaves
        while low < high:
            if low & 1:
                result = self._operation(result, self._nodes[low])
                low += 1
            if high & 1:
                high -= 1
                result = self._operation(result, self._nodes[high])
            low, high = low >> 1, high >> 1
        return float(result)

    def clear(self) -> None:
        """Make all values neutral."""
        self._nodes.fill(self._neutral)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.capacity):
            raise ValueError(f"ids must be in [0, {self.capacity}), got {ids.min()} to {ids.max()}")
        return ids


class SumTree(_Tree):
    """Sums over ranges, and the value in which a prefix sum falls. O(log capacity) each."""

    _operation, _neutral = np.add, 0.0

    @property
    def total(self) -> float:
        """Sum of all values."""
        return float(self._nodes[1])

    def find_prefix(self, mass: np.ndarray) -> np.ndarray:
        """For each m the id i with value[0] + ... + value[i - 1] <= m < value[0] + ... + value[i].

        Args:
            mass: (N,) float, not negative; from the sum of all values on it is the last value that is not 0.

        Returns:
            (N,) int64, never the id of a value of 0.

        Raises:
            ValueError: A negative or NaN mass, or all values are 0.
        """
        mass = np.array(mass, dtype=np.float64)
        if not (mass >= 0.0).all():
            raise ValueError("mass must not be negative or NaN")
        if self.total <= 0.0:
            raise ValueError("all values are 0")
        nodes = np.ones(mass.shape, dtype=np.int64)
        for _ in range(self._num_leaves.bit_length() - 1):
            nodes <<= 1
            left = self._nodes[nodes]
            # Rounding may leave a mass as large as the sum of both children: then the last one that is not empty.
            right = (mass >= left) & (self._nodes[nodes + 1] > 0.0)
            mass -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._num_leaves


class MinTree(_Tree):
    """Minima over ranges; what has no value is infinite."""

    _operation, _neutral = np.minimum, np.inf

    @property
    def smallest(self) -> float:
        """Minimum of all values."""
        return float(self._nodes[1])
