"""Tests of Ctrl-C, SIGTERM and SIGKILL at random moments: exit codes, remaining processes, and files."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.forkserver import write_executable

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "signals.py"
# A signal that arrives before Python runs our code kills the process, so its exit code is negative. Otherwise, our code
# exits with 130 or 143.
CODES = {"SIGINT": {"130", "-2"}, "SIGTERM": {"143", "-15"}, "SIGKILL": {"-9"}, "SIGINT twice": {"130", "-2"},
         "SIGTERM, SIGKILL": {"-9", "143", "-15"}}


# Runs a module in a process that was started afresh, and in which Ray starts its workers with another executable.
RUN_MODULE = """
import runpy, sys
sys.executable = sys.argv[1]
del sys.argv[:3]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def check(start_forked, *arguments, timeout_s, **variables):
    """Run the benchmark and check its results for each form of training and each kind of signal."""
    process = start_forked(BENCHMARK, *arguments, **variables)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:  # the benchmark ends the training runs that it has started
            process.terminate()
            process.communicate(timeout=30)
    assert process.returncode == 0, err
    told = json.loads(out)
    for form, kinds in told.items():
        for kind, codes in CODES.items():
            if kind in kinds:
                found, where = kinds[kind], f"{form} {kind}\n{err}"
                assert set(found["exit_codes"]) <= codes, where
                assert (found["runs_with_processes_left"], found["runs_with_files_left"]) == (0, 0), where
                assert found["flaws"] == {}, where
                # A process must exit within ten seconds, or within two seconds of a second signal. Both limits are
                # doubled for slow machines.
                assert found["exit_s"] is None or found["exit_s"]["max"] < (4 if "twice" in kind else 20), where
    return told


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kinds", "count"), [
    pytest.param(["SIGINT"], 1, id="SIGINT"),  # see also `cli/test_process.py`
    pytest.param(list(CODES), 2, id="all", marks=pytest.mark.thorough)])
def test_signals_at_random_moments_of_central_training(start_forked, kinds, count):
    told = check(start_forked, "--count", count, "--twice", 1, "--forms", "central", "--start-up", 2, "--training", 0.4,
                 "--kinds", *kinds, timeout_s=140)
    assert told["central"].keys() == {"start_up_s", *kinds}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param("SIGINT", marks=pytest.mark.thorough), "SIGKILL"])
def test_signals_at_random_moments_of_training_on_ray(start_forked, ray_python, tmp_path, kind):
    """Check training whose process starts afresh, and whose workers are forks, which end with their executable."""
    command = shlex.join([sys.executable, "-c", RUN_MODULE, ray_python])
    python = write_executable(tmp_path / "python", f'exec {command} "$@"')
    check(start_forked, "--count", 1, "--forms", "ray", "--start-up", 10, "--training", 1, "--kinds", kind,
          timeout_s=260, FORK_EXECUTABLE=python)


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_many_signals_at_random_moments(start_forked):
    check(start_forked, "--count", 20, "--twice", 10, timeout_s=7100)
