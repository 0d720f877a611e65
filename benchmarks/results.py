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
    """Return the commit and the machine with its versions; "-dirty" follows the commit if tracked files have changed.

    Files in `docs` do not count, since benchmarks append their results there.
    """
    try:
        commit, changed = (subprocess.run(["git", *command], text=True, capture_output=True, check=False,
                                          cwd=Path(__file__).parent).stdout.strip()
                           for command in (["rev-parse", "--short=8", "HEAD"],
                                           ["status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)docs"]))
        commit = f"{commit}{'-dirty' if changed else ''}" if commit else None
    except FileNotFoundError:  # git is not installed
        commit = None
    return {"commit": commit,
            "machine": {"processor": _processor(), "cores": CORES,
                        "python": platform.python_version(), "torch": version("torch")}}


def _processor() -> str:
    """Return the name, family and model of the processor, or its architecture where /proc does not show the name.

    Virtual machines often show a name that several generations share, such as "AMD EPYC"; family and model differ.
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    numbers = [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found]
    return ", ".join([found["model name"], *numbers]) if "model name" in found else platform.machine()


def print_result(result: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Print `result` after its origin as one JSON object, on one line if `indent` is None."""
    print(json.dumps({**origin(), **result}, indent=indent), flush=True)
