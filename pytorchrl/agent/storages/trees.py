"""Segment trees, which compute sums and minima over ranges of an array whose values change."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pytorchrl.errors import ArgumentError

_FEW = 512
"""Largest number of changes for which recomputing common parents repeatedly is cheaper than removing duplicates."""


class _Tree:
    """Binary tree with `capacity` values as leaves; each node contains the sum or minimum of its two children.

    Node 1 is the root; nodes 2i and 2i + 1 are the children of node i. Leaves with the neutral value of the operation
    pad the number of leaves to a power of two. Changing a leaf recomputes every node above it, so that rounding errors
    do not accumulate.
    """

    _operation: ClassVar[np.ufunc]
    _neutral: ClassVar[float]

    def __init__(self, capacity: int) -> None:
        """Create a tree of `capacity` >= 1 leaves, all with the neutral value: 0 for sums, infinity for minima."""
        if capacity < 1:
            raise ArgumentError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._num_leaves = 1 << (capacity - 1).bit_length()
        self._nodes = np.full(2 * self._num_leaves, self._neutral)

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
        if not (values >= 0.0).all():
            raise ArgumentError("values must not be negative or NaN")
        nodes = ids + self._num_leaves
        self._nodes[nodes] = values
        is_many = len(nodes) > _FEW
        if is_many:
            nodes = np.unique(nodes)
        for _ in range(self._num_leaves.bit_length() - 1):
            nodes >>= 1
            if is_many:
                first = np.ones(len(nodes), dtype=np.bool_)  # nodes with the same parent are adjacent
                np.not_equal(nodes[1:], nodes[:-1], out=first[1:])
                nodes = nodes[first]
            left = nodes << 1
            self._nodes[nodes] = self._operation(self._nodes[left], self._nodes[left + 1])

    def get(self, ids: np.ndarray) -> np.ndarray:
        """Return the values of `ids`, (N,) float64; raise `ArgumentError` if an id is out of range."""
        return self._nodes[self._checked(ids) + self._num_leaves]

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """Return the sum or minimum of the values with ids in [start, end); the neutral value if the range is empty.

        Args:
            start: First id.
            end: One past the last id. A negative number counts from the capacity; None is the capacity.
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
        """Set all values to the neutral value: 0 for sums, infinity for minima."""
        self._nodes.fill(self._neutral)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.capacity):
            raise ArgumentError(f"ids must be in [0, {self.capacity}), got {ids.min()} to {ids.max()}")
        return ids


class SumTree(_Tree):
    """Tree that computes sums over ranges, and finds a value by its prefix sum, in O(log capacity)."""

    _operation, _neutral = np.add, 0.0

    @property
    def total(self) -> float:
        """Sum of all values."""
        return float(self._nodes[1])

    def find_prefix(self, mass: np.ndarray) -> np.ndarray:
        """Return, for each mass m, the id i for which value[0] + ... + value[i - 1] <= m < value[0] + ... + value[i].

        Args:
            mass: (N,) float, the numbers m >= 0. If m is not less than the sum of all values, i is the last id whose
                value is not 0.

        Returns:
            (N,) int64 ids; their values are never 0.

        Raises:
            ArgumentError: A mass is negative or NaN, or all values are 0.
        """
        mass = np.array(mass, dtype=np.float64)
        if not (mass >= 0.0).all():
            raise ArgumentError("mass must not be negative or NaN")
        if self.total <= 0.0:
            raise ArgumentError("expected at least one value above 0, but all values are 0")
        nodes = np.ones(mass.shape, dtype=np.int64)
        for _ in range(self._num_leaves.bit_length() - 1):
            nodes <<= 1
            left = self._nodes[nodes]
            # Rounding can make a mass equal to or larger than the sum of both children. Even then, the second condition
            # prevents a descent to a right child whose sum is 0.
            right = (mass >= left) & (self._nodes[nodes + 1] > 0.0)
            mass -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._num_leaves


class MinTree(_Tree):
    """Tree that computes minima over ranges; unset values are infinite."""

    _operation, _neutral = np.minimum, np.inf

    @property
    def smallest(self) -> float:
        """Minimum of all values."""
        return float(self._nodes[1])
