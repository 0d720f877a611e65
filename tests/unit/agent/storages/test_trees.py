"""Compare sum trees and min trees with plain arrays, and with known values."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.agent.storages import MinTree, SumTree
from pytorchrl.errors import ArgumentError


def tree_of(cls, values):
    tree = cls(len(values))
    tree.set(np.arange(len(values)), np.array(values, dtype=float))
    return tree


@pytest.mark.parametrize(("values", "mass", "expected"), [
    ([1, 2, 3, 4], [0, 0.999, 1, 2.999, 3, 5.999, 6, 9.999, 10], [0, 0, 1, 1, 2, 2, 3, 3, 3]),
    ([0, 2, 0, 2], [0, 1.999, 2, 3.999, 4], [1, 1, 3, 3, 3]),
    ([1, 2, 3, 4, 5], [9.999, 10, 14.999, 15], [3, 4, 4, 4]),
    ([3], [0, 2.9, 3], [0, 0, 0]),
    ([1, 2, 0, 0, 0], [2.999, 3, 99], [1, 1, 1]),
])
def test_find_prefix_on_golden_values(values, mass, expected):
    assert tree_of(SumTree, values).find_prefix(np.array(mass)).tolist() == expected


def test_ranges_on_golden_values():
    sums, minima = tree_of(SumTree, [1, 2, 3, 4]), tree_of(MinTree, [1, 2, 3, 4])
    found = [sums.reduce(0, 4), sums.reduce(1, 3), sums.reduce(0, -1), sums.reduce(2, 2), sums.reduce()]
    assert found == [10, 5, 6, 0, 10]
    assert [minima.reduce(0, 4), minima.reduce(2, 4), minima.reduce(2, 2)] == [1, 3, np.inf]
    assert (sums.total, minima.smallest) == (10, 1)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 37, 64, 100, 1000])  # each call changes up to 2 * capacity ids
def test_trees_agree_with_plain_arrays_through_random_changes(capacity):
    rng = np.random.default_rng(capacity)
    sums, minima = SumTree(capacity), MinTree(capacity)
    plain_sum, plain_min = np.zeros(capacity), np.full(capacity, np.inf)
    for _ in range(60):
        ids = rng.integers(0, capacity, rng.integers(0, 2 * capacity + 1))
        values = rng.integers(0, 4, len(ids)) * rng.random(len(ids))
        sums.set(ids, values)
        minima.set(ids, values)
        for i, value in zip(ids, values, strict=True):
            plain_sum[i] = plain_min[i] = value
        np.testing.assert_array_equal(sums.get(np.arange(capacity)), plain_sum)
        np.testing.assert_array_equal(minima.get(np.arange(capacity)), plain_min)
        start, end = rng.integers(0, capacity + 1, 2)
        assert sums.reduce(start, end) == pytest.approx(plain_sum[start:end].sum(), abs=1e-12)
        assert minima.reduce(start, end) == plain_min[start:end].min(initial=np.inf)
        assert sums.total == pytest.approx(plain_sum.sum())
        if plain_sum.any():
            mass = rng.random(50) * plain_sum.sum()
            prefix = np.concatenate([[0.0], plain_sum.cumsum()])
            for m, found in zip(mass, sums.find_prefix(mass), strict=True):
                assert plain_sum[found] > 0
                assert prefix[found] - 1e-9 <= m < prefix[found + 1] + 1e-9


@pytest.mark.parametrize("capacity", [2048, 2049, 65_536, 65_537, 100_000])  # one or two levels below the highest one
def test_results_depend_on_the_values_only_and_not_on_the_order_of_changes(capacity):
    rng = np.random.default_rng(capacity)
    sums, minima, plain = SumTree(capacity), MinTree(capacity), np.zeros(capacity)
    for count in (capacity, 3, 700, 1, 64, 5000):
        ids = rng.choice(capacity, min(count, capacity), replace=False)
        plain[ids] = rng.random(len(ids)) * rng.integers(0, 2, len(ids))
        sums.set(ids, plain[ids])
        minima.set(ids, plain[ids])
        if count != 700:  # results are read after some of the changes
            assert sums.total == tree_of(SumTree, plain).total == pytest.approx(plain.sum())
            assert minima.smallest == plain.min()
    prefix = np.concatenate([[0.0], plain.cumsum()])
    mass = np.concatenate([rng.random(500) * prefix[-1], prefix[rng.integers(0, capacity, 100)], [prefix[-1], np.inf]])
    found = sums.find_prefix(mass)
    np.testing.assert_array_equal(found, tree_of(SumTree, plain).find_prefix(mass))
    assert (plain[found] > 0).all()
    assert (prefix[found] - 1e-9 <= mass).all()
    assert (mass[:-1] < prefix[found[:-1] + 1] + 1e-9).all()
    assert found[-1] == np.flatnonzero(plain)[-1]
    for start, end in np.sort(rng.integers(0, capacity + 1, (20, 2))):
        assert sums.reduce(start, end) == pytest.approx(plain[start:end].sum(), abs=1e-9)
        assert minima.reduce(start, end) == plain[start:end].min(initial=np.inf)


def test_a_mass_that_rounding_moves_past_the_end_of_its_block_finds_a_value_above_zero():
    first, second, mass = 0.25 - 2.0**-54, 0.75, 1.0 - 2.0**-53
    assert first + second == 1.0
    assert mass - first == second  # so the rest of the mass is not less than the sum of the second block
    tree = SumTree(100)
    tree.set(np.array([7, 32 + 9]), np.array([first, second]))
    assert tree.find_prefix(np.array([mass])).tolist() == [32 + 9]


def test_last_value_wins_for_repeated_ids():
    tree = SumTree(5)
    tree.set(np.array([3, 1, 3, 3]), np.array([1.0, 2.0, 5.0, 7.0]))
    assert tree.get(np.array([3, 1])).tolist() == [7, 2]
    assert tree.total == 9


def test_clear_sets_all_values_to_the_neutral_element():
    sums, minima = tree_of(SumTree, [1, 2]), tree_of(MinTree, [1, 2])
    sums.clear()
    minima.clear()
    assert (sums.total, minima.smallest) == (0, np.inf)


@pytest.mark.parametrize(("ids", "values", "message"), [
    ([5], [1.0], r"in \[0, 5\), got 5 to 5"), ([-1], [1.0], "got -1"), ([0, 1], [1.0], "2 ids and 1 values"),
    ([0], [np.nan], "NaN"), ([0], [-1.0], "negative"),
])
def test_set_refuses_invalid_arguments_and_changes_nothing(ids, values, message):
    tree = tree_of(SumTree, [1, 2, 3, 4, 5])
    with pytest.raises(ArgumentError, match=message):
        tree.set(np.array(ids), np.array(values))
    assert tree.total == 15


def test_find_prefix_and_capacity_refuse_invalid_arguments():
    with pytest.raises(ArgumentError, match="capacity must be >= 1, got 0"):
        SumTree(0)
    with pytest.raises(ArgumentError, match="negative"):
        tree_of(SumTree, [1]).find_prefix(np.array([-0.1]))
    with pytest.raises(ArgumentError, match="all values are 0"):
        SumTree(3).find_prefix(np.array([0.0]))
    with pytest.raises(ArgumentError, match="got 3 to 3"):
        SumTree(3).get(np.array([3]))
