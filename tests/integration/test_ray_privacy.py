"""Test that other machines and other users cannot reach a Ray instance that a run has started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, process_environment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]


@pytest.fixture
def home(tmp_path):
    """Return a home directory in which an earlier version of Ray has left a token that all users can read."""
    folder = tmp_path / "home" / ".ray"
    folder.mkdir(parents=True)
    token = folder / "auth_token"
    token.write_text("0" * 64, encoding="ascii")
    token.chmod(0o644)
    return folder.parent


def test_nothing_listens_beyond_the_loopback_and_no_file_is_open_to_others(run_python, home):
    environment = process_environment(HOME=str(home))
    completed = run_python(ROOT / "benchmarks" / "exposure.py", timeout=190, env=environment)
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result["processes"].count("ray::Worker") == 2
    assert {"gcs_server", "raylet", "ray::Worker"} <= {row["process"] for row in result["sockets"]}
    assert [row for row in result["sockets"] if not row["is_loopback"]] == []
    modes = {row["path"]: int(row["mode"], 8) for row in result["files"]}
    assert [row for row in result["files"] if row["is_open_to_others"]] == []
    assert modes[str(home / ".ray" / "auth_token")] == 0o600
    logs = {path: mode for path, mode in modes.items() if "/logs/" in path and not path.endswith(("/old", "/nsight"))}
    assert any("raylet" in path for path in logs)
    assert {path: oct(mode) for path, mode in logs.items() if Path(path).suffix and mode & 0o077} == {}


def test_gradient_workers_that_average_listen_on_the_loopback_only(run_forked):
    completed = run_forked(ROOT / "benchmarks" / "exposure.py", "--runtime", "threads", "--decentralized", timeout=100)
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result["sockets"]
    assert [row for row in result["sockets"] if not row["is_loopback"]] == []
