"""Tests of the number of source files that the value of an option passes through, from the user's call to its use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "option_path.py"


@pytest.mark.parametrize(("name", "last", "most_files", "most_returns"), [
    ("train(gae_lambda=...)", "pytorchrl/agent/storages/returns.py", 12, 12),
    ("Scheme(broadcast_interval=...)", "pytorchrl/scheme/collection/weight_broadcast.py", 17, 45)])
def test_an_option_passes_through_few_files(name, last, most_files, most_returns, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # the script imports another module of its folder
    spec = importlib.util.spec_from_file_location("option_path", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = script.trace(name)
    assert path["reached"]
    assert path["files"][-1] == last
    assert path["num_files"] <= most_files, path["files"]
    assert path["returns"] <= most_returns, path["files"]
