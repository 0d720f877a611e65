"""Print the results of a benchmark as JSON, with the commit and the machine that they belong to."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytorchrl.support.cores import usable_cores

CORES = usable_cores()
"""Number of usable CPU cores, before a benchmark binds its threads to some of them."""


@functools.cache
def origin() -> dict[str, Any]:
    """Return the commit, with "-dirty" if tracked files have changed since, and the machine and its versions."""
    described = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"], text=True,
                               capture_output=True, check=False, cwd=Path(__file__).parent)
    return {"commit": described.stdout.strip() or None,
            "machine": {"processor": _processor(), "cores": CORES,
                        "python": platform.python_version(), "torch": version("torch")}}


def _processor() -> str:
    """Return the model of the processor, or only its architecture where /proc does not show the model."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def print_result(result: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Print `result` after its origin as one JSON object, on one line if `indent` is None."""
    print(json.dumps({**origin(), **result}, indent=indent), flush=True)
