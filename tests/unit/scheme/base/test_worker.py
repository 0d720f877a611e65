"""Test the checks of choices and counts, and test that a process with a worker keeps freed memory for reuse."""

from __future__ import annotations

import platform

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.base.worker import ASYNC, CENTRAL, PARALLEL, SYNC, Execution, Worker, check_count, check_execution
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


@on_glibc
def test_malloc_thresholds_in_the_environment_take_precedence(run_python):
    _, after = faults(run_python, MALLOC_TRIM_THRESHOLD_="131072")
    assert after > 10_000


@pytest.mark.parametrize("choice", [SYNC, ASYNC, CENTRAL, PARALLEL])
def test_a_choice_equals_its_text(choice):
    assert type(choice)(str(choice)) is choice
    assert choice == str(choice)


@pytest.mark.parametrize(("text", "near"), [("central", "Central"), ("Parallels", "Parallel")])
def test_a_wrong_choice_is_refused_with_a_suggestion(text, near):
    with pytest.raises(ConfigError, match=rf"execution must be one of .*, got '{text}'; did you mean '{near}'\?"):
        Execution(text)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("execution", ["Central", PARALLEL])
def test_only_one_worker_can_be_central(execution, num_workers):
    if execution == "Central" and num_workers > 1:
        with pytest.raises(ConfigError, match=f"grad_execution='Central' contradicts num_grad_workers={num_workers}"):
            check_execution("grad", execution, num_workers)
    else:
        assert check_execution("grad", execution, num_workers) is Execution(execution)


@pytest.mark.parametrize(("value", "low"), [(0, 1), (-1, 0), (True, 1), (1.0, 1), ("1", 1), (None, 0)])
def test_invalid_counts_are_refused(value, low):
    with pytest.raises(ConfigError, match=f"size must be a whole number >= {low}, got {value!r}"):
        check_count("size", value, low)


def test_a_count_is_returned():
    assert [check_count("size", 0, 0), check_count("size", 1), check_count("size", 7)] == [0, 1, 7]


def test_a_worker_that_is_built_is_ready():
    assert Worker(3).ready() == 3
