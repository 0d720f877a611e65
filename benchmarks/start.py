"""Measure the seconds from the command `pytorchrl train` to its first progress line, and the seconds of imports.

    python benchmarks/start.py [--repeat 5] [--only import,in_process,compiled,ray] [--cold]

Each repetition runs `python -m pytorchrl train ppo --env CartPole-v1` in a new process and reads its standard error:
`line_s` is the time of the first line of any kind, `progress_s` that of the first progress line, and `steps_s` that of
the first progress line with at least one env step. `load` is the load average of the machine before the start; compare
only runs with a load near 0. `in_process` runs everything in one process, `compiled` also compiles the losses (with
torch's cache of compiled graphs, which the first repetition may fill), and `ray` has two collection workers on a local
Ray. `import` measures imports of this package, of all of its public names, and of torch
alone.

With `--cold`, the files of all packages are removed from the file cache before each repetition. Linux keeps files that
other processes have mapped, so no other program should be using torch at that time. The script prints one JSON object
with medians and ranges, and asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from results import print_result

TRAIN = [sys.executable, "-m", "pytorchrl", "train", "ppo", "--env", "CartPole-v1", "--target-steps", "100000000",
         "--seed", "1", "--compile", "no"]
RUNS = {
    "in_process": [], "compiled": ["--compile"],
    "ray": ["--num-col-workers", "2", "--num-envs", "4"],
}
IMPORTS = {
    "pytorchrl": "import pytorchrl",
    "all_names": "import pytorchrl\nfor name in pytorchrl.__all__: getattr(pytorchrl, name)",
    "torch": "import torch",
}
PROGRESS = re.compile(r"\s*([\d,]+)/[\d,]+ steps")
LIMIT_S = 120.0


def empty_file_cache() -> None:
    """Ask the kernel to remove the files of all packages from the file cache."""
    os.sync()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")}:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def time_of_lines(flags: list[str]) -> dict[str, float]:
    """Return the seconds from the start of training to the first line, progress line, and progress line with steps."""
    found: dict[str, float] = {}
    start = time.perf_counter()
    process = subprocess.Popen([*TRAIN, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            now = time.perf_counter() - start
            found.setdefault("line_s", now)
            if match := PROGRESS.match(line):
                found.setdefault("progress_s", now)
                if match[1] != "0":
                    found["steps_s"] = now
                    break
            if now > LIMIT_S:
                raise SystemExit(f"{flags}: no env steps within {LIMIT_S:g} s")
    finally:
        process.terminate()
        process.communicate()
    return found


def time_of_import(script: str) -> dict[str, float]:
    """Return the seconds of a new process that runs an import, including the start of Python."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    return {"seconds": time.perf_counter() - start}


def repeated(measure: Any, argument: Any, repeat: int, *, cold: bool) -> dict[str, dict[str, float]]:
    """Return name -> median and range of the seconds that `measure(argument)` returns, over `repeat` calls."""
    rows = []
    for _ in range(repeat):
        if cold:
            empty_file_cache()
        load = os.getloadavg()[0]
        rows.append({**measure(argument), "load": load})
    columns = {name: [row[name] for row in rows if name in row] for name in rows[0]}
    return {name: {"median": round(statistics.median(values), 2), "low": round(min(values), 2),
                   "high": round(max(values), 2)} for name, values in columns.items()}


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--only", default=",".join(("import", *RUNS)), help="measurements, separated by commas")
    parser.add_argument("--cold", action="store_true", help="empty the file cache before each repetition")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.only.split(","):
        if name == "import":
            results[name] = {what: repeated(time_of_import, script, options.repeat, cold=options.cold)
                             for what, script in IMPORTS.items()}
        else:
            results[name] = repeated(time_of_lines, RUNS[name], options.repeat, cold=options.cold)
    print_result({"cold": options.cold, "repeat": options.repeat, "results": results})


if __name__ == "__main__":
    main()
