"""Check the weight versions of a shard's rows against a list with an entry for every row."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.scheme.replay.versions import Versions


@pytest.mark.parametrize("seed", range(10))
def test_rows_have_the_versions_of_their_rollouts(seed):
    rng, size = np.random.default_rng(seed), int(np.random.default_rng(seed).integers(20, 400))
    versions, rows = Versions(), []
    for number in range(150):
        count = int(rng.integers(1, 20))
        versions.add(len(rows), number, 3 * number)
        rows += [(number, 3 * number)] * count
        first = max(0, len(rows) - size)
        versions.forget(first)
        asked = rng.integers(first, len(rows), 30)
        np.testing.assert_array_equal(versions.of(asked), [rows[row] for row in asked])
        if number == 100:
            versions, before = Versions(), versions
            versions.load_state_dict(before.state_dict())
    assert versions._blocks.shape[1] <= 4 * max(16, size)
    with pytest.raises(AssertionError, match="never added, or its versions were discarded"):
        versions.of(np.array([0]))
