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
stopped, killed, policy = sys.argv[1:]
envs = VecEnv.create_factory(SleepEnv, {"step_s": 0.01}, 2)  # processes that wait leave the cores to other tests
scheme = Scheme(
    PPO.create_factory(num_epochs=1), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(16), envs, seed=1, num_col_workers=2, col_communication=ASYNC, on_worker_failure=policy)
scheme.step()
directories = [name for name in glob.glob("/tmp/prl-*") if glob.glob(f"{name}/r/session_*_{os.getpid()}")]
pid_of = {name: pid for pid, name in parts_of(os.getpid()).items()}

def is_stopped():
    with open(f"/proc/{pid_of[stopped]}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"

error, start = "", time.monotonic()
try:
    if stopped:
        os.kill(pid_of[stopped], signal.SIGSTOP)
        while not is_stopped():
            assert time.monotonic() - start < 60
        while is_stopped():
            scheme.step()
            assert time.monotonic() - start < 120
    version = scheme.version
    while scheme.version < version + 3:
        scheme.step()
    os.kill(pid_of[killed], signal.SIGKILL)
    while time.monotonic() - start < 200:
        scheme.step()
except RayDiedError as died:
    error = str(died)
ledger = scheme.stop()
print("result:", json.dumps({"error": error, "pid": pid_of[killed], "directories": directories, "ledger": ledger}))
"""


@pytest.mark.parametrize(("stopped", "killed", "policy"), [
    ("raylet", "GCS", "restart"), *(pytest.param(*parts, marks=pytest.mark.chaos) for parts in (
        ("GCS", "GCS", "ignore"), ("runtime environment agent", "runtime environment agent", "restart"),
        ("", "dashboard agent", "ignore")))])
def test_a_stopped_part_of_ray_is_continued_and_a_killed_one_is_named(request, stopped, killed, policy):
    """Stop one part of Ray during a run, and kill one later: training goes on, and then ends and leaves nothing.

    Agents that are forks lack the names by which the watch finds Ray's agents.
    """
    run = request.getfixturevalue("run_python" if "agent" in killed else "run_with_ray")
    result = result_of(run("-c", SCRIPT, stopped, killed, policy, timeout=250))
    assert result["error"].startswith(f"Ray's {killed} (process {result['pid']}) has ended unexpectedly")
    ledger = result["ledger"]
    assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    assert len(result["directories"]) == 1
    deadline = time.monotonic() + 20
    while (left := glob.glob(result["directories"][0]) + processes_of(result["directories"][0])) \
            and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


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
