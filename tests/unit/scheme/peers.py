"""Short schemes for tests that reproduce defects of other libraries."""

from __future__ import annotations

import time

import pytest


# On the virtual clock, each env step and each gradient takes 0.1 s.
COSTS = {"start": 1.0, "message": 0.0, "step": 0.1, "grad": 0.1, "update": 0.0}


def simulated(**settings):
    """Return settings of a simulated scheme, in which a minute of virtual time takes almost no real time."""
    return {"runtime": "simulated", "costs": COSTS, "num_col_workers": 2, **settings}


def step_until(scheme, updates):
    while scheme.version < updates:
        scheme.step()


def step_on(scheme):
    """Call `scheme.step` often enough for every injected fault to occur."""
    for _ in range(1000):
        scheme.step()


def raises_within(seconds, kind, scheme, match):
    """Check that `scheme.step()` raises an error of type `kind` within `seconds` seconds, and return the error."""
    start = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        step_on(scheme)
    assert time.monotonic() - start < seconds
    return caught.value
