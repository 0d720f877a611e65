"""A process with a worker keeps the memory that its updates free."""

from __future__ import annotations

import platform

import pytest

from tests.conftest import process_environment, told_by

SCRIPT = """
import json, resource
import numpy as np
from pytorchrl.scheme.base.worker import Worker

def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        arrays = [np.ones(100_000) for _ in range(8)]  # 6.4 MB, made and freed
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

faults()
before = faults()
Worker(0)
faults()
print("told:", json.dumps([before, faults()]))
"""


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what it does is glibc's")


def faults(run_python, **settings):
    """Page faults of the same work before there was a worker, and with one."""
    own = {name: value for name, value in process_environment().items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return told_by(run_python("-c", SCRIPT, env={**own, **settings}))


def test_freed_memory_is_kept(run_python):
    before, after = faults(run_python)
    assert before > 10_000  # pages of 4 kB: all of it, each time
    assert after < 100


def test_thresholds_of_the_environment_hold(run_python):
    _, after = faults(run_python, MALLOC_TRIM_THRESHOLD_="131072")
    assert after > 10_000
