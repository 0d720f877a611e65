"""Tests that every benchmark starts, and that its results say which commit and machine they belong to."""

import importlib.util
import json
import re

from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
# Modules that benchmarks import; all other files are scripts.
MODULES = {"damages.py", "growth.py", "mutation_table.py", "process_table.py", "results.py"}
SCRIPTS = {path.name for path in BENCHMARKS.glob("*.py")} - MODULES
# Script -> package that it needs, and that the tests do not install.
NEEDS = {"rliable_check.py": "rliable"}
# Scripts that write text or files, and digests.py, whose results are equal for all commits.
WITHOUT_ORIGIN = {"digests.py", "golden.py", "reading_sample.py", "report.py", "watching.py"}
# Prints the help of each script in one process, and the failures afterwards.
HELP = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
wrong = {}
for name in sys.argv[2:]:
    sys.argv = [f"{sys.path[0]}/{name}", "--help"]
    path = list(sys.path)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = "no exit"
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = repr(error)
    sys.path[:] = path
    if code or not output.getvalue().startswith(f"usage: {name}"):
        wrong[name] = [code, output.getvalue()[:200]]
print(json.dumps(wrong))
"""


def test_every_benchmark_prints_its_help(run_forked):
    missing = {name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None}
    result = run_forked("-c", HELP, BENCHMARKS, *sorted(SCRIPTS - missing), cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {}


def test_every_benchmark_that_prints_json_states_its_origin():
    used = {name for name in SCRIPTS
            if re.search(r"^from results import ", (BENCHMARKS / name).read_text(encoding="utf-8"), re.MULTILINE)}
    assert used == SCRIPTS - WITHOUT_ORIGIN


def test_result_states_commit_and_machine(run_forked):
    code = "import sys; sys.path.insert(0, sys.argv[1]); from results import print_result; print_result({'rate': 1.5})"
    printed = json.loads(run_forked("-c", code, BENCHMARKS, timeout=60).stdout)
    assert printed["rate"] == 1.5
    assert re.fullmatch(r"[0-9a-f]{8}(-dirty)?", printed["commit"])
    assert set(printed["machine"]) == {"processor", "cores", "python", "torch"}
    assert printed["machine"]["cores"] > 0
