"""Test the conversion of NumPy's numbers, and the check of whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.support.numbers import check_whole, plain


def test_only_values_of_numpy_are_converted():
    for value, expected in [(np.int64(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (np.array(2), 2),
                            (np.array([[1, 2]]), [[1, 2]]), (np.str_("a"), "a")]:
        assert plain(value) == expected
        assert type(plain(value)) is type(expected)
    others = (1, 2.0, "a", None, [np.int64(1)], {"a": np.int64(1)})
    assert all(plain(value) is value for value in others)


def test_whole_numbers_are_checked_and_converted():
    assert [type(check_whole("n", value)) for value in (1, np.int32(5))] == [int, int]
    assert check_whole("n", 0, low=0) == 0
    for value in (0, -1, 2.0, np.float64(2), True, np.bool_(True), "2", None, [1]):
        with pytest.raises(ConfigError, match="n must be a whole number >= 1, got "):
            check_whole("n", value)
