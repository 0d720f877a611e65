"""Check that the log of public reports, tests/reports.md, names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.conftest import ROOT

_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def test_every_test_in_the_log_of_reports_exists():
    rows = [line for line in (ROOT / "tests" / "reports.md").read_text(encoding="utf-8").splitlines()
            if line.startswith("| ") and not line.startswith("| kind")]
    assert len(rows) >= 11
    for row in rows:
        named = _TEST.findall(row)
        assert named, row
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), (path, name)
