"""Tests that each pair of switches trains and resumes, or is refused by name; `benchmarks/pairs.py` lists the pairs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("pairs", BENCHMARKS / "pairs.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


pairs = load()
CASES = pairs.pairs(list(pairs.registered()))


@pytest.mark.every(20)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case).replace(" ", "_"))
@pytest.mark.filterwarnings("ignore")
def test_each_pair_of_switches_trains_or_is_refused(case):
    found = pairs.decide(case)
    assert found["outcome"] in ("trains", "refused"), found["reason"]


def test_there_are_at_least_300_pairs():
    assert len(CASES) >= 300
    assert len(set(CASES)) == len(CASES)


def test_a_difference_after_resuming_is_a_defect(monkeypatch):
    monkeypatch.setattr(pairs, "_equal", lambda one, other: False)
    assert pairs.decide(("dqn", "discrete", "dueling", "n_step"))["outcome"] == "defect"


def test_an_error_that_names_no_switch_is_a_defect(monkeypatch):
    monkeypatch.setitem(pairs.SHORT, "num_envs", 0)
    assert pairs.decide(("dqn", "discrete", "dueling", "n_step"))["outcome"] == "defect"
