"""Tests that each pair of switches trains and resumes, or is refused by name; `benchmarks/pairs.py` lists the pairs."""

from __future__ import annotations

import collections
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from pytorchrl.agent import fit

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
LINES = [json.loads(line) for line in (
    BENCHMARKS.parent / "docs" / "benchmarks" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
TABLE = {(line["algorithm"], line["actions"], *case): line for line in LINES for case in line["cases"]}
REFUSED = [(line["algorithm"], line["actions"], *line["cases"][0]) for line in LINES if line["outcome"] == "refused"]


@pytest.fixture(autouse=True)
def no_parts_of_tests(monkeypatch):
    """Let errors list only parts of the package, not those that other tests of this process have defined."""
    known = fit._parts
    monkeypatch.setattr(fit, "_parts", lambda *homes: [
        cls for cls in known(*homes) if cls.__module__.startswith("pytorchrl.")])


def check(case):
    """Check that a case has the outcome of the table, and if it is refused, for the same reason."""
    found, expected = pairs.decide(case), TABLE[case]
    assert (found["outcome"], found["reason"]) == (expected["outcome"], expected["reason"])


@pytest.mark.every(40)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case).replace(" ", "_"))
@pytest.mark.filterwarnings("ignore")
def test_each_pair_of_switches_has_the_outcome_of_the_table(case):
    check(case)


@pytest.mark.filterwarnings("ignore")
def test_each_refusal_of_the_table_still_has_its_reason():
    assert len(REFUSED) >= 40
    for case in REFUSED:
        check(case)


def test_the_table_contains_each_case_and_no_defect():
    assert sorted(TABLE) == sorted(CASES)
    assert {line["outcome"] for line in LINES} == {"trains", "refused"}


def test_each_switch_belongs_to_several_of_at_least_300_cases():
    assert len(CASES) >= 300
    assert len(set(CASES)) == len(CASES)
    counts = collections.Counter(switch for case in CASES for switch in case[2:])
    assert min(counts[switch] for switch in pairs.SWITCHES) >= 10


def test_a_difference_after_resuming_is_a_defect(monkeypatch):
    monkeypatch.setattr(pairs, "_equal", lambda one, other: False)
    assert pairs.decide(("dqn", "discrete", "dueling", "n_step"))["outcome"] == "defect"


def test_an_error_that_names_no_switch_is_a_defect(monkeypatch):
    monkeypatch.setitem(pairs.SHORT, "num_envs", 0)
    assert pairs.decide(("dqn", "discrete", "dueling", "n_step"))["outcome"] == "defect"
