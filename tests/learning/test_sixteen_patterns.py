"""Test that every pattern learns on Ray: a return of 400 in CartPole within 150,000 env steps, for three seeds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "benchmarks" / "patterns.py"
_SPEC = importlib.util.spec_from_file_location("benchmarks_patterns", _PATH)
patterns = importlib.util.module_from_spec(_SPEC)
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(_PATH.parent))  # the benchmark imports another module of its folder
    _SPEC.loader.exec_module(patterns)


@pytest.mark.learning
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("pattern", patterns.PATTERNS)
def test_learns_counts_and_stops(pattern, seed):
    result = patterns.run(pattern, seed, runtime="ray", max_steps=150_000, goal=400.0)
    assert result["return"] >= 400, result
    assert result["steps"] <= 151_000
    assert result["ledger_ok"], result
    assert result["stop_seconds"] <= 10
    assert result["leftovers"] == []
    if pattern.split("/")[0].endswith("-sync"):
        assert result["policy_lag"]["max"] == 0
