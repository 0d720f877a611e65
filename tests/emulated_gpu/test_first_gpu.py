"""Check that the script for the first minutes on a real GPU runs on the emulated one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.emulated_gpu.streams import NAME

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_name() != NAME,
                                 reason="this script itself is for machines with a real GPU")]


def test_steps_that_the_emulated_gpu_can_run_pass_and_the_others_are_named(tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "first_gpu.py", "--emulated", "--minutes", "50", "--logs", tmp_path,
         "--steps", "machine,failed_capture,waits,exactness"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stdout + result.stderr
    *lines, printed = result.stdout.partition("\n{\n")
    assert [line.split(",")[0] for line in lines[0].splitlines()] == [
        "1/4 machine: passed", "2/4 failed_capture: passed", "3/4 waits: cannot run", "4/4 exactness: passed"]
    assert [step["result"] for step in json.loads("{" + printed)["steps"]] == [
        "passed", "passed", "cannot run", "passed"]
