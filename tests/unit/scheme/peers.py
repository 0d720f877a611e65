"""Short schemes of tests of defects of other libraries."""

from __future__ import annotations

import time

import pytest


# One step of an environment takes 0.1 s of the virtual clock, one gradient too.
COSTS = {"start": 1.0, "message": 0.0, "step": 0.1, "grad": 0.1, "update": 0.0}


def simulated(**settings):
    """A scheme on the virtual clock, where a minute passes at once."""
    return {"runtime": "simulated", "costs": COSTS, "num_col_workers": 2, **settings}


def step_until(scheme, updates):
    while scheme.version < updates:
        scheme.step()


def step_on(scheme):
    """More steps than any fault waits for."""
    for _ in range(1000):
        scheme.step()


def raises_within(seconds, kind, scheme, match):
    """The error that `scheme.step()` raises."""
    start = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        step_on(scheme)
    assert time.monotonic() - start < seconds
    return caught.value
