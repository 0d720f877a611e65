"""Comparisons of many rows of a batch at once, because comparing single rows takes most of the time of a test."""

from __future__ import annotations

import numpy as np


def assert_observations(found, places, expected):
    """Assert that observations equal expected ones in value and dtype.

    `found` contains a tensor for each leaf, `places` is the index of N observations in it, and `expected` is a list of
    N observations, each with an array for each leaf.
    """
    for name, leaf in found.items():
        ours, wanted = leaf.numpy()[places], np.stack([obs[name] for obs in expected])
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape), name
        assert np.array_equal(ours, wanted), (name, ours, wanted)


def assert_targets(batch, places, returns, discounts):
    """Assert that a batch has the given n-step returns and discounts, (N,) each, at the index `places`."""
    np.testing.assert_allclose(batch.ret.numpy()[places], returns, rtol=0, atol=1e-5)
    np.testing.assert_allclose(batch.discount.numpy()[places], discounts, rtol=0, atol=1e-6)


def assert_masks(batch_mask, places, expected):
    """Assert that a batch has the masks of the list `expected` at the index `places`; each mask may be None."""
    if expected[0] is None:
        assert all(mask is None for mask in expected)
    else:
        assert batch_mask.numpy()[places].tolist() == np.stack(expected).tolist()
