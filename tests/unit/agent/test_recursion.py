"""Compare the linear recursion with a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.agent.recursion import backward_recursion


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (7,), (9, 8), (9, 2, 3), (9, 9), (9, 5, 4)], ids=str)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_recursion_equals_a_loop_bit_for_bit(shape, is_reversed):
    rng = np.random.default_rng(len(shape))
    delta, decay = rng.normal(size=shape), rng.uniform(size=shape)
    if is_reversed:
        delta, decay = delta[::-1], decay[::-1]
    expected = delta.copy()
    for t in reversed(range(len(expected) - 1)):
        expected[t] = delta[t] + decay[t] * expected[t + 1]
    found = backward_recursion(delta, decay)
    assert found is delta
    np.testing.assert_array_equal(delta, expected)
