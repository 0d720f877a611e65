"""Tests of the number of source files that a rollout passes through, from the collection worker to the storage."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "message_paths.py"


@pytest.mark.parametrize(("message", "most"), [
    ("rollout, parallel and asynchronous", 7), ("rollout, parallel and synchronous", 6),
    ("rollout, central and synchronous", 4)])
def test_a_rollout_passes_through_few_files_and_never_returns_to_one(message, most):
    spec = importlib.util.spec_from_file_location("message_paths", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = script.trace(*script.PATHS[message])
    assert path["files"][0] == "pytorchrl/scheme/collection/c_worker.py"
    assert path["files"][-1] == "storage"
    assert len(path["files"]) <= most, path["files"]
    assert path["returns"] == 0, path["files"]
