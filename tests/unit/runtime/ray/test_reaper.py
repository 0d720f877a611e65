"""Tests of the reaper of a local Ray instance: which processes it ends and which files it removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytorchrl.runtime.ray import reaper as module

FOLDER = Path(module.__file__).parent
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds processes by /proc")

DRIVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever runs the tests may ignore it
sys.path.insert(0, sys.argv[3])  # as a file beside it: the package imports torch
from reaper import start_reaper
directory = sys.argv[1]
reaper = start_reaper(directory)
holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=open(directory + "/log", "w"))
named = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", directory])
own = open(directory + "/own", "w")
print(reaper.pid, holder.pid, named.pid, flush=True)
if sys.argv[2] == "close":
    while not os.path.exists(directory + ".close"):
        time.sleep(0.02)
    reaper.communicate()
    print("alive", flush=True)
time.sleep(60)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def directory(tmp_path):
    """Return a directory that contains a link to a file elsewhere and a link to a folder elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis").write_text("years of work")
    path = tmp_path / "prl-test"
    path.mkdir()
    (path / "file").symlink_to(tmp_path / "elsewhere" / "thesis")
    (path / "folder").symlink_to(tmp_path / "elsewhere")
    return path


@pytest.mark.parametrize("end", ["kill", "close"])
def test_only_processes_and_files_of_ray_are_removed(start_python, directory, end):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(directory)],
                                 start_new_session=True)
    try:
        driver = start_python("-c", DRIVER, str(directory), end, FOLDER)
        reaper, *left = map(int, driver.stdout.readline().split())
        assert all(is_alive(pid) for pid in (reaper, *left))
        if end == "kill":
            driver.kill()
        else:
            directory.with_suffix(".close").touch()
            assert driver.stdout.readline() == "alive\n"
        assert wait_until(lambda: not any(is_alive(pid) for pid in (reaper, *left)))
        assert not directory.exists()
        assert (directory.parent / "elsewhere" / "thesis").read_text() == "years of work"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ctrl_c_in_the_terminal_does_not_stop_the_reaper(start_python, directory):
    driver = start_python("-c", DRIVER, str(directory), "kill", FOLDER)
    reaper, *_ = map(int, driver.stdout.readline().split())
    os.killpg(driver.pid, signal.SIGINT)
    driver.wait(20)
    assert wait_until(lambda: not is_alive(reaper))
    assert not directory.exists()


TEXT = "connection.cc:216: The connection to the plasma store is failed. Terminate the process."
LOGGED = f"[2026-11-26 14:57:36,192 W 1 1] {TEXT}"


@pytest.mark.parametrize(("told", "logged", "expected"), [
    ("\n", LOGGED, ""),  # an orderly exit
    ("the GCS has ended\n\n", "", ""),
    ("the GCS has ended\n", LOGGED, "the GCS has ended"),
    ("", "[2026-11-26 I 1 1] training", ""),  # the driver was killed
    ("", LOGGED, f"Ray's raylet has ended unexpectedly: {TEXT}"),
])
def test_the_reason_for_which_ray_ends_the_driver(tmp_path, told, logged, expected):
    logs = tmp_path / "r" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "python-core-driver-01_1.log").write_text(f"first\n{logged}\n")
    assert module.reason_of_end(told, str(tmp_path)) == expected


@pytest.mark.parametrize(("told", "expected"), [
    (b"the GCS has ended\n",
     "error: the GCS has ended; Ray has ended this program; resume it from its newest checkpoint\n"),
    (b"the GCS has ended\n\n", ""), (b"\n", ""), (b"", "")])
def test_the_reaper_prints_the_reason(tmp_path, told, expected):
    reaper = subprocess.run(
        [sys.executable, "-I", "-S", module.__file__, str(tmp_path / "prl-test"), str(os.getsid(0)), str(os.getpid())],
        input=told, capture_output=True, timeout=60, check=True, start_new_session=True)
    assert reaper.stderr.decode() == expected
