"""Name workers in the same way in logs, errors, statistics, records, file names, and the options `faults` and `costs`.

A worker's name is its place in the tree, such as "GWorker 1/CWorker 2" for collection worker 2 of gradient worker 1.
Gradient worker 0 runs inside the update worker; collection worker 0 runs inside its gradient worker.
"""

from __future__ import annotations


def gradient_worker(index: int) -> str:
    """Return the name of a gradient worker, such as "GWorker 1"."""
    return f"GWorker {index}"


def collection_worker(parent: int, index: int) -> str:
    """Return the name of collection worker `index` of gradient worker `parent`, such as "GWorker 1/CWorker 2"."""
    return f"{gradient_worker(parent)}/CWorker {index}"


def replay_worker(parent: int, index: int) -> str:
    """Return the name of replay shard `index` of gradient worker `parent`, such as "GWorker 1/RWorker 2"."""
    return f"{gradient_worker(parent)}/RWorker {index}"


def in_file_name(worker: str) -> str:
    """Return a worker's name as it appears in file names, such as "GWorker_1_CWorker_2"."""
    return worker.replace(" ", "_").replace("/", "_")
