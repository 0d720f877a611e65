"""Test that a process with a worker keeps freed memory for reuse."""

from __future__ import annotations

import platform

import pytest

from pytorchrl.scheme.base.worker import Worker
from tests.conftest import process_environment, result_of

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
print("result:", json.dumps([before, faults()]))
"""


on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tests malloc settings of glibc")


def faults(run_python, **settings):
    """Count the page faults of the same work before and after a worker is built, and return both counts."""
    own = {name: value for name, value in process_environment().items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return result_of(run_python("-c", SCRIPT, env={**own, **settings}))


@on_glibc
def test_freed_memory_is_kept(run_python):
    before, after = faults(run_python)
    assert before > 10_000  # one fault per page of 4 kB, because freed memory was returned to the system
    assert after < 100


@pytest.mark.thorough  # glibc documents it
@on_glibc
def test_malloc_thresholds_in_the_environment_take_precedence(run_python):
    _, after = faults(run_python, MALLOC_TRIM_THRESHOLD_="131072")
    assert after > 10_000


def test_a_worker_that_is_built_is_ready():
    assert Worker(3).ready() == 3
