"""Tests of the command in a separate process: signals, closed streams, and what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pytorchrl.cli import main

TRAIN = ["-m", "pytorchrl", "train", "ppo", "--env", "CartPole-v1", "--num-envs", "2", "--num-steps", "64", "--seed",
         "1", "--no-tensorboard", "--compile", "no"]


def wait_for_line(process, text, timeout_s=60):
    """Read the process's stderr until a line contains `text`."""
    deadline = time.monotonic() + timeout_s
    seen = []
    while time.monotonic() < deadline:
        line = process.stderr.readline()
        seen.append(line)
        if text in line:
            return
        if not line and process.poll() is not None:
            break
    pytest.fail(f"{text!r} was not shown: {seen}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_stops_and_sets_the_exit_code(start_forked, tmp_path, number, code):
    process = start_forked(*TRAIN, "--target-steps", "100000000", "--log-dir", "run", "--json")
    wait_for_line(process, "steps/s")
    start = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == code
    assert "Traceback" not in err
    assert (tmp_path / "run" / "model.pt").exists()
    summary = json.loads(out.splitlines()[-1])
    assert summary["ledger"]["in_flight"] == summary["ledger"]["queued"] == 0
    assert main(["enjoy", str(tmp_path / "run"), "--episodes", "1"]) == 0


def test_a_signal_before_training_ends_quietly(start_python):
    process = start_python(
        "-c", "import os, signal, sys\n"
              "from pytorchrl.cli import main\n"
              "sys.modules['pytorchrl.learner.learner'] = None\n"  # makes an import of the learner fail
              "import pytorchrl.cli as cli\n"
              "cli._run = lambda arguments: os.kill(os.getpid(), signal.SIGTERM)\n"
              "sys.exit(main(['train']))")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_swallowed_by_an_import_still_ends_the_command(start_python, number, code):
    """Check that a signal ends the command even if an import of native code swallows the handler's exception."""
    process = start_python(
        "-c", "import os, sys, time\n"
              "import pytorchrl.cli as cli\n"
              "def run(arguments):\n"
              "    try:\n"
              f"        os.kill(os.getpid(), {int(number)})\n"
              "        time.sleep(20)\n"
              "    except BaseException:\n"
              "        pass\n"
              "    return 0\n"
              "cli._run = run\n"
              "sys.exit(cli.main())", "train")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")


@pytest.mark.parametrize("streams", [">&- 2>&-", "| true"])
def test_a_run_survives_closed_streams_and_a_missing_home(tmp_path, forked_python, streams):
    python = forked_python if streams == "| true" else sys.executable  # a fork needs the streams that it is given
    command = " ".join([python, *TRAIN, "--target-steps", "128", "--log-dir", "run", "--json"])
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "TERM", "USER")}
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {streams}"], cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"}, check=False, timeout=120, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "model.pt").exists()
    # Without a terminal, progress is shown as a few plain lines.
    assert len(result.stderr.splitlines()) <= 10
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr


def test_a_second_signal_ends_the_process_immediately(start_forked):
    process = start_forked(
        "-c", "import sys, time\n"
              "from pytorchrl.cli import main\n"
              "from pytorchrl.scheme import Scheme\n"
              "def stop(self):\n"
              "    print('stopping', file=sys.stderr, flush=True)\n"
              "    try:\n"
              "        time.sleep(60)\n"
              "    except BaseException:\n"  # the exception is swallowed, as in native code
              "        time.sleep(60)\n"
              "Scheme.stop = stop\n"
              "sys.exit(main())", *TRAIN[2:], "--target-steps", "100000000")
    wait_for_line(process, "steps/s")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "stopping")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - start < 10  # two seconds if the machine is idle


@pytest.mark.ray
@pytest.mark.slow
def test_a_signal_stops_remote_workers_too(start_forked, ray_python, tmp_path):
    process = start_forked(*TRAIN, "--target-steps", "100000000", "--num-col-workers", "2", "--log-dir", "run",
                           "--json", FORK_EXECUTABLE=ray_python)
    wait_for_line(process, "steps/s", timeout_s=150)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 30  # the limit is ten seconds, tripled for a slow machine
    assert process.returncode == 130
    assert "Traceback" not in err
    summary = json.loads(out.splitlines()[-1])
    assert summary["scheme"]["col_execution"] == "Parallel"
    assert (tmp_path / "run" / "model.pt").exists()
