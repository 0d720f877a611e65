"""Tests that the table of mutations matches this source tree."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MIN_MUTATIONS = 500


@pytest.fixture
def mutations(monkeypatch):
    """Return the module benchmarks/mutations.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("mutation_table", "mutation_kinds", "mutation_gpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "benchmarks" / "mutations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mutation_applies(mutations):
    problems = [problem for mutation in mutations.MUTATIONS if (problem := mutations.problem_of(mutation, ROOT))]
    assert not problems, "\n".join(problems)


def test_there_are_enough_mutations_without_duplicates(mutations):
    table = mutations.MUTATIONS
    assert len(table) >= MIN_MUTATIONS
    assert not [key for key, count in Counter((m.file, m.old, m.new) for m in table).items() if count > 1]


def test_a_mutation_of_a_text_that_is_missing_or_repeated_is_an_error(mutations, tmp_path):
    (tmp_path / "pytorchrl").mkdir()
    (tmp_path / "pytorchrl" / "a.py").write_text("one two two\n")
    (tmp_path / "pytorchrl" / "test_a.py").write_text("")

    def problem(old, file="pytorchrl/a.py", tests="pytorchrl/test_a.py"):
        return mutations.problem_of(mutations.Mutation(file, old, "new", tests), tmp_path)

    assert problem("one") is None
    assert "occurs 0 times" in problem("three")
    assert "occurs 2 times" in problem("two")
    assert "b.py does not exist" in problem("one", file="pytorchrl/b.py")
    assert "tests do not exist" in problem("one", tests="pytorchrl/test_b.py")


def test_results_say_killed_survived_and_equivalent(mutations, tmp_path):
    (tmp_path / "pytorchrl").mkdir()
    (tmp_path / "pytorchrl" / "a.py").write_text("X = 1\nY = 2\n")
    test = "pytorchrl/test_a.py"
    (tmp_path / test).write_text("import a\n\n\ndef test_x():\n    assert a.X == 1\n")
    (tmp_path / "pytorchrl" / "test_fails.py").write_text("def test_fails():\n    assert False\n")
    table = [mutations.Mutation("pytorchrl/a.py", "X = 1", "X = 3", test),
             mutations.Mutation("pytorchrl/a.py", "Y = 2", "Y = 3", test),
             mutations.Mutation("pytorchrl/a.py", "Y = 2", "Y = 4", test, equivalent="nobody reads Y"),
             mutations.Mutation("pytorchrl/a.py", "Z = 2", "Z = 4", test),
             mutations.Mutation("pytorchrl/a.py", "X = 1", "X = 3", test + " -k nothing"),
             mutations.Mutation("pytorchrl/a.py", "Y = 2", "Y = 5", "pytorchrl/test_fails.py")]
    found = list(mutations.results(table, tmp_path, timeout_s=300.0, pause_s=0.0))
    assert [result["result"] for result in found] == ["killed", "survived", "equivalent", *["not applied"] * 3]
    assert "the tests fail without the mutation" in found[-1]["why"]
    assert (tmp_path / "pytorchrl" / "a.py").read_text() == "X = 1\nY = 2\n"
