"""Measurements of processes from outside, and slopes of these measurements over time; see `soak.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from process_table import read_text

NUM_BLOCKS = 60
MEMORY = {"rss_mb": ("Rss",), "pss_mb": ("Pss",), "uss_mb": ("Private_Clean", "Private_Dirty")}


def sample(pid: int) -> dict[str, float] | None:
    """Return the memory, descriptors and threads of a process; None if it has ended."""
    fields = dict(line.split(":", 1) for line in read_text(f"/proc/{pid}/smaps_rollup").splitlines()[1:])
    status = dict(line.split(":", 1) for line in read_text(f"/proc/{pid}/status").splitlines() if ":" in line)
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return {**{name: sum(int(fields[part].split()[0]) for part in parts) * 1024 / 1e6
                   for name, parts in MEMORY.items()},
                "descriptors": descriptors, "threads": int(status["Threads"])}
    except (KeyError, OSError):
        return None


def shared_memory() -> dict[str, float]:
    """Return how much of /dev/shm is used on this machine."""
    found = os.statvfs("/dev/shm")
    return {"shm_mb": (found.f_blocks - found.f_bfree) * found.f_frsize / 1e6,
            "shm_files": len(os.listdir("/dev/shm"))}


def medians(times: Sequence[float], values: Sequence[float], num_blocks: int) -> tuple[list[float], list[float]]:
    """Return the median time and value of each block of consecutive samples."""
    import numpy as np

    blocks = np.array_split(np.arange(len(times)), min(num_blocks, len(times)))
    return ([float(np.median(np.asarray(times)[block])) for block in blocks],
            [float(np.median(np.asarray(values)[block])) for block in blocks])


def trend(times: Sequence[float], values: Sequence[float], num_blocks: int = NUM_BLOCKS) -> dict[str, Any] | None:
    """Return the Theil-Sen slope per unit of time with its 95 % interval, the change, and the level at the end."""
    import numpy as np
    import scipy.stats

    if len(times) < 4:
        return None
    x, y = medians(times, values, num_blocks)
    slope, _, low, high = scipy.stats.theilslopes(y, x, alpha=0.95)
    sixth = max(1, len(y) // 6)
    return {"slope": float(slope), "interval": [float(low), float(high)],
            "change": float(np.median(y[-sixth:]) - np.median(y[:sixth])), "last": y[-1], "samples": len(times)}


def pooled(series: list[tuple[list[float], list[float]]]) -> dict[str, Any] | None:
    """Return the median slope within the lives of several processes, with a 95 % interval of the median.

    The interval is that of the sign test: it consists of order statistics of the slopes of single processes, so it
    assumes only that the processes are independent.
    """
    import numpy as np
    import scipy.stats

    slopes = sorted(float(scipy.stats.theilslopes(y, x)[0]) for x, y in series if len(x) >= 4)
    if not slopes:
        return None
    cut = int(scipy.stats.binom.ppf(0.025, len(slopes), 0.5))
    return {"slope": float(np.median(slopes)), "interval": [slopes[max(0, cut - 1)], slopes[min(len(slopes) - cut,
            len(slopes) - 1)]], "processes": len(slopes)}
