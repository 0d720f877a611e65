"""Tests of a cluster of three nodes on this machine, one of which dies during training.

The run must continue or report why it cannot. One process starts the cluster and performs all runs, which takes
minutes; the tests check its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, process_environment

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(900)]

CASES = ("collectors", "rounds", "gradients", "colocated", "no-room")
LIMIT_S = 800


@pytest.fixture(scope="module")
def directory():
    """Return the directory for Ray's files; the process that starts Ray removes it."""
    return tempfile.mkdtemp(prefix="prl-", dir="/tmp")


@pytest.fixture(scope="module")
def found(directory):
    """Return the results of the benchmark by case."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "cluster.py", "--seconds", "1", "--cases", ",".join(CASES)],
        capture_output=True, text=True,
        timeout=LIMIT_S, check=False, env=process_environment(RAY_TMPDIR=directory))
    assert done.returncode == 0, done.stderr[-5000:]
    return {result["case"]: result for result in json.loads(done.stdout)["results"]}


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_accounted_for_after_losses(found, case):
    assert found[case]["ledger_exact"]
    assert found[case]["updates_after"] > 0


@pytest.mark.parametrize(("case", "num_workers"),
                         [("collectors", 4), ("rounds", 4), ("gradients", 6), ("colocated", 6)])
def test_workers_are_spread_and_restart_on_the_remaining_node(found, case, num_workers):
    result = found[case]
    assert result["before"]["workers_by_node"] == [num_workers // 2] * 2
    assert result["after"]["workers_by_node"] == [num_workers]
    assert result["workers_restarted"] >= (2 if case in ("collectors", "rounds") else 1)


def test_gradient_workers_are_colocated_with_their_collectors(found):
    assert found["colocated"]["before"]["together"] == 2
    assert found["colocated"]["workers_restarted"] == 1  # the other gradient worker lost no collectors


def test_a_replacement_without_resources_ends_the_run_with_an_error(found):
    result = found["no-room"]
    assert result["error"] == "InsufficientResourcesError"
    assert "s for resources: it requests CPU=2" in result["text"]


def test_no_processes_or_files_are_left(found, directory):
    deadline = time.monotonic() + 10
    def processes():
        return [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _names(pid, directory)]
    while (left := processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert not os.path.exists(directory)


def _names(process, directory):
    try:
        return directory.encode() in (process / "cmdline").read_bytes()
    except OSError:  # the process has ended
        return False
