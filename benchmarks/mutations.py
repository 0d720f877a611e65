"""Check that the test suite notices small defects: apply each mutation to a copy of the tree, and run its tests.

    python benchmarks/mutations.py [--only ring] [--gpu] [--list] [--tree .] [--pause 1] [--timeout 300]

The table is in `mutation_table.py`. A mutation is killed if one of its tests fails, and survives if all its tests pass,
including those that only `make test-all` runs. Mutations whose effect no test can observe are marked as equivalent in
the table, with the reason, and are not tested. The script prints one line of JSON per mutation on stdout, and a last
line with the counts. The exit code is 1 if a mutation survives or does not apply. A mutation does not apply if its text
does not occur exactly once in the file, or if its tests are missing, select nothing, or fail without the mutation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mutation_table import MUTATIONS, Mutation
from results import print_result

ROOT = Path(__file__).parents[1]
_COPIED = ("pytorchrl", "tests", "benchmarks", "examples", "docs")
_TAIL_CHARS = 300
_NO_TESTS_RAN = 5


def problem_of(mutation: Mutation, tree: Path) -> str | None:
    """Return the reason why a mutation does not apply to a tree; None if it applies."""
    path = tree / mutation.file
    if not path.is_file():
        return f"{mutation.file} does not exist"
    if (count := path.read_text().count(mutation.old)) != 1:
        return f"the text occurs {count} times in {mutation.file}, not once: {mutation.old!r}"
    if missing := [name for name in mutation.files if not (tree / name).is_file()]:
        return f"tests do not exist: {', '.join(missing)}"
    return None if mutation.old != mutation.new else "the mutation changes nothing"


def copy_of(tree: Path, to: Path) -> Path:
    """Copy the files that the tests need to a folder, and return the folder."""
    for name in _COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in tree.iterdir():
        if path.is_file():
            shutil.copy2(path, to)
    return to


def run_tests(copy: Path, mutation: Mutation, timeout_s: float, *, every: bool = False) -> tuple[str, str]:
    """Run a mutation's tests in a copy of the tree; return "passed", "failed" or "error", and the end of the output.

    With `every`, also run those that the default selection leaves out.
    """
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", "-p", "no:cacheprovider", *mutation.files]
    if mutation.needs_gpu:
        command += ["-p", "tests.emulated_gpu.plugin", "-m", "gpu"]
    elif every:
        command += ["-m", ""]
    if mutation.only:
        command += ["-k", mutation.only]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "failed", f"not finished within {timeout_s:g} s"
    tail = done.stdout.strip()[-_TAIL_CHARS:]
    if done.returncode == _NO_TESTS_RAN:
        return "error", f"no test was selected: {tail}"
    if done.returncode < 0:
        return "error", f"pytest was ended by signal {-done.returncode}"
    return ("failed" if done.returncode else "passed"), tail


def results(mutations: list[Mutation], tree: Path, timeout_s: float, pause_s: float) -> Iterator[dict[str, object]]:
    """Test the mutations one after the other, and yield the result of each."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = copy_of(tree, Path(folder))
        unchanged: dict[str, tuple[str, str]] = {}  # outcomes and outputs of the tests without any mutation
        for mutation in mutations:
            start = time.monotonic()
            result: dict[str, object] = {"file": mutation.file, "old": mutation.old, "new": mutation.new}
            if problem := problem_of(mutation, tree):
                yield {**result, "result": "not applied", "why": problem}
                continue
            if mutation.equivalent:
                yield {**result, "result": "equivalent", "why": mutation.equivalent}
                continue
            if mutation.tests not in unchanged:
                unchanged[mutation.tests] = run_tests(copy, mutation, timeout_s)
            outcome, tail = unchanged[mutation.tests]
            # If the tests failed without a mutation, every mutation would count as killed.
            if outcome != "passed":
                yield {**result, "result": "not applied", "why": f"the tests fail without the mutation: {tail}"}
                continue
            path = copy / mutation.file
            before = path.read_text()
            try:
                path.write_text(before.replace(mutation.old, mutation.new))
                outcome, tail = run_tests(copy, mutation, timeout_s)
                if outcome == "passed" and not mutation.needs_gpu:  # on a GPU, all of them have run
                    outcome, tail = run_tests(copy, mutation, timeout_s, every=True)
            finally:
                path.write_text(before)
            found = {"failed": "killed", "passed": "survived", "error": "not applied"}[outcome]
            result |= {"result": found, "seconds": round(time.monotonic() - start, 1)}
            yield result if found == "killed" else {**result, "why": tail}
            time.sleep(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only mutations whose file or text contains this")
    parser.add_argument("--gpu", action="store_true", help="run only mutations whose tests run on the emulated GPU")
    parser.add_argument("--list", action="store_true", help="list the mutations, run nothing")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to mutate; it is copied and not changed")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to pause after each mutation")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a mutation counts as killed")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if given.only in m.file or given.only in m.old]
    if given.gpu:
        chosen = [m for m in chosen if m.needs_gpu]
    if given.list:
        for mutation in chosen:
            print(f"{mutation.file}: {mutation.old!r} -> {mutation.new!r}")
        return
    counts: Counter[str] = Counter()
    start = time.monotonic()
    for result in results(chosen, given.tree.resolve(), given.timeout, given.pause):
        counts[str(result["result"])] += 1
        print_result(result, indent=None)
    print_result({**counts, "seconds": round(time.monotonic() - start)}, indent=None)
    sys.exit(bool(counts["survived"] or counts["not applied"]))


if __name__ == "__main__":
    main()
