"""Syntax trees of the project's modules, which several tests read; tests in the group `source` share one process."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "pytorchrl"
MODULES = sorted(PACKAGE.rglob("*.py"))
reads_source = pytest.mark.xdist_group("source")


def name_of(path):
    """Return the dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes_of(path):
    """Return all nodes of a module's syntax tree; the first one is the module."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
