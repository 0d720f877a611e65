"""Check that every pattern and architecture trains as recorded in digests.json, which benchmarks/digests.py writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.conftest import pairwise

pytestmark = pytest.mark.cpu("stored results of the CPU")

TOOL = Path(__file__).parents[3] / "benchmarks" / "digests.py"
STORED = json.loads(Path(__file__).with_name("digests.json").read_text(encoding="utf-8"))

# With the kernels of another processor (ATEN_CPU_CAPABILITY=default), the norm of the parameter change differed by at
# most 1.3e-7 (relative), and individual parameters by at most 5.1e-7. A different minibatch, or an extra or missing
# update, changes individual parameters by about 1e-3.
RELATIVE, ABSOLUTE = 1e-5, 1e-5


@pytest.fixture(scope="module")
def tool():
    """Return the module benchmarks/digests.py."""
    spec = importlib.util.spec_from_file_location("digests", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_run_has_a_stored_digest(tool):
    assert tool.runs().keys() == STORED.keys()
    assert len(STORED) == 16 + 8
    assert all("_" in name for name in list(STORED)[:16])  # the patterns are first


@pytest.mark.parametrize("name", [*pairwise([pytest.param(name, id=name) for name in list(STORED)[:16]]),
                                  *list(STORED)[16:]])
def test_counts_and_parameters_equal_the_stored_ones(tool, name):
    found, stored = tool.digest(name), STORED[name]
    assert found["updates"] == stored["updates"]
    assert found["ledger"] == stored["ledger"]
    assert found["norm"] == pytest.approx(stored["norm"], rel=RELATIVE)
    assert found["change"] == pytest.approx(stored["change"], rel=RELATIVE)
    assert found["some"] == pytest.approx(stored["some"], rel=0, abs=ABSOLUTE)


def test_differences_are_reported(tool):
    stored = {"a": {"sha256": "1", "norm": 2.0}, "b": {"sha256": "3", "norm": 4.0}}
    assert tool.differences(stored, stored) == []
    assert tool.differences(stored, {"a": {"sha256": "0", "norm": 2.0}}) == [
        "a: sha256 is 1, 0 in the file", "b: missing on one side"]
