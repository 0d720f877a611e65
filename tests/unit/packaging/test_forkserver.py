"""Tests that scripts in forks behave like scripts in fresh processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, threading
from pathlib import Path
import helper
is_here = os.getcwd() == os.path.dirname(os.path.abspath(__file__))
print(__name__, sys.argv[1:], is_here, helper.VALUE, "pytorchrl" in sys.modules)
print(sys.stdin.read() == "", threading.active_count(), os.environ["OMP_NUM_THREADS"])
helper.VALUE = os.environ["OMP_NUM_THREADS"] = "changed"
import atexit
atexit.register(lambda: print("at the end"))
threading.Timer(0.1, lambda: print("in a thread")).start()
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
raise ValueError("no argument")
"""


def test_scripts_in_forks_have_their_own_folder_arguments_and_output(run_forked, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    for _ in range(2):  # the second run must not be affected by the first
        result = run_forked(tmp_path / "script.py", 5)
        assert result.returncode == 5
        assert result.stdout.splitlines() == ["__main__ ['5'] True 3 True", "True 1 1", "in a thread",
                                              "at the end"]
        assert result.stderr == ""
    result = run_forked(tmp_path / "script.py")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: no argument"


def test_modules_run_as_with_python_m(run_forked):
    result = run_forked("-m", "pytorchrl", "--version")
    assert result.returncode == 0
    assert result.stdout.startswith("pytorchrl ")
    assert run_forked("-m", "pytorchrl", "nonsense").returncode == 2


def test_code_runs_as_with_python_c(run_forked):
    result = run_forked("-c", "import sys\nassert __name__ == '__main__'\nprint(sys.argv[1:])", 1)
    assert (result.returncode, result.stdout) == (0, "['1']\n")


def test_imports_of_gymnasium_have_the_effect_that_they_have_in_a_fresh_process(forked_python, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYGAME_HIDE_SUPPORT_PROMPT"}
    (tmp_path / "script.py").write_text("import gymnasium, pygame\nprint('silent')\n")
    for python in (forked_python, sys.executable):
        result = subprocess.run([python, tmp_path / "script.py"], env=environment, capture_output=True, text=True,
                                check=True)
        assert result.stdout == "silent\n"


def test_a_script_that_does_not_end_is_killed(run_forked, tmp_path):
    (tmp_path / "script.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked(tmp_path / "script.py", timeout=1)
    (tmp_path / "script.py").write_text("print('the next one runs')\n")
    assert run_forked(tmp_path / "script.py", timeout=120).stdout == "the next one runs\n"


@pytest.mark.parametrize(("number", "shown", "code"), [
    (signal.SIGTERM, "signal 15\n", 3), (signal.SIGINT, "signal 2\n", 3), (signal.SIGKILL, "", -9)])
def test_signals_are_forwarded_to_the_fork(start_forked, number, shown, code):
    process = start_forked("-c", """
import os, signal, sys, time
def end(number, frame):
    print("signal", number, flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print(os.getpid(), flush=True)
time.sleep(600)
""")
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.communicate(timeout=120) == (shown, "")
    assert process.returncode == code
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
