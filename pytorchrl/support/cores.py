"""Count the CPU cores that this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

# Linux control groups, version 2: "QUOTA PERIOD" or "max PERIOD" in one file; version 1: each number in a file.
_QUOTAS = (("/sys/fs/cgroup/cpu.max",), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def usable_cores(quotas: Sequence[Sequence[str]] = _QUOTAS) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    The number is that of the machine, reduced to the cores to which the process is bound, and to the limit of its
    container.

    Args:
        quotas: For each version of Linux control groups, the files that state the processor time of a container.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in quotas:
        with contextlib.suppress(OSError, ValueError):  # the files do not exist, or contain "max" or -1
            quota, period = map(int, " ".join(Path(file).read_text(encoding="ascii") for file in files).split())
            cores = min(cores, -(-quota // period)) if quota > 0 else cores
    return max(1, cores)
