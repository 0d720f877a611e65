"""Kill and stop the processes of Ray itself during training: the run goes on, or ends with an error that names it."""

from __future__ import annotations

import glob
import json
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT, process_environment, processes_of, result_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SCRIPT = """
import glob, json, os, signal, sys, threading, time
from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import SleepEnv
from pytorchrl.errors import RayDiedError
from pytorchrl.runtime.ray.watch import parts_of
part, number, policy, limit_s = sys.argv[1], getattr(signal, sys.argv[2]), sys.argv[3], float(sys.argv[4])
envs = VecEnv.create_factory(SleepEnv, {"step_s": 0.002}, 2)  # processes that wait leave the cores to other tests
scheme = Scheme(
    PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(16), envs, seed=1, num_col_workers=2, col_communication=ASYNC, on_worker_failure=policy)
scheme.step()
directories = [name for name in glob.glob("/tmp/prl-*") if glob.glob(f"{name}/r/session_*_{os.getpid()}")]
pid = next(pid for pid, name in parts_of(os.getpid()).items() if name == part)
os.kill(pid, number)
start, error = time.monotonic(), ""
try:
    while time.monotonic() - start < limit_s:
        scheme.step()
except RayDiedError as died:
    error = str(died)
ledger = scheme.stop()
print("result:", json.dumps({"error": error, "pid": pid, "directories": directories, "ledger": ledger}))
"""


def run_and_check(run, part, number, policy="restart", *, limit_s):
    """Run the script, check the ledger and that nothing is left, and return the result.

    Args:
        run: Function that runs Python in a new process.
        part: Process of Ray that gets the signal.
        number: Name of the signal.
        policy: `on_worker_failure`.
        limit_s: Seconds after which a run without an error ends.
    """
    result = result_of(run("-c", SCRIPT, part, number, policy, str(limit_s), timeout=250))
    ledger = result["ledger"]
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    assert len(result["directories"]) == 1
    deadline = time.monotonic() + 20
    while (left := glob.glob(result["directories"][0]) + processes_of(result["directories"][0])) \
            and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    return result


@pytest.mark.parametrize(("part", "policy"), [
    ("GCS", "restart"), pytest.param("GCS", "ignore", marks=pytest.mark.chaos),
    pytest.param("runtime environment agent", "restart", marks=pytest.mark.chaos),
    pytest.param("dashboard agent", "ignore", marks=pytest.mark.chaos)])
def test_a_killed_part_of_ray_ends_the_run_with_its_name(run_with_ray, part, policy):
    result = run_and_check(run_with_ray, part, "SIGKILL", policy, limit_s=150)
    assert result["error"].startswith(f"Ray's {part} (process {result['pid']}) has ended unexpectedly")


@pytest.mark.parametrize("part", [
    "raylet", pytest.param("GCS", marks=pytest.mark.chaos),
    pytest.param("runtime environment agent", marks=pytest.mark.chaos)])
def test_a_stopped_part_of_ray_is_continued(run_with_ray, part):
    result = run_and_check(run_with_ray, part, "SIGSTOP", limit_s=8)
    assert result["error"] == ""


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["raylet SIGKILL", "GCS SIGKILL", "GCS SIGSTOP"])
def test_a_command_without_a_part_of_ray(case):
    """Check that a command goes on, or ends with an error and a checkpoint, and leaves nothing."""
    completed = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "ray_parts.py"), "--count", "1", "--cases", case],
        env=process_environment(), capture_output=True, text=True, timeout=800, check=True)
    row = json.loads(completed.stdout)[case]
    assert row["left"] == []
    assert row["resumes"] == 1
    if "goes on" not in row["outcomes"]:
        assert row["outcomes"] == {"ended": 1}
        assert row["names_part"] == 1
