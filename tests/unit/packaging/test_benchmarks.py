"""Tests that every benchmark starts, and that its results say which commit and machine they belong to."""

import importlib.util
import io
import json
import re

import pytest

from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
# Modules that benchmarks import; all other files are scripts.
MODULES = {"damages.py", "growth.py", "mutation_table.py", "process_table.py", "results.py"}
SCRIPTS = {path.name for path in BENCHMARKS.glob("*.py")} - MODULES
# Script -> package that it needs, and that the tests do not install.
NEEDS = {"rliable_check.py": "rliable"}
# Scripts that write text or files, and digests.py, whose results are equal for all commits.
WITHOUT_ORIGIN = {"digests.py", "golden.py", "history.py", "reading_sample.py", "report.py", "watching.py"}
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


@pytest.fixture
def history():
    """Return the module benchmarks/history.py."""
    spec = importlib.util.spec_from_file_location("history", BENCHMARKS / "history.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_history_is_complete_and_its_table_is_current(history):
    lines = [json.loads(line) for line in history.HISTORY.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 100
    for line in lines:
        assert list(line) == ["commit", "recorded", "date", "machine", "script", "name", "value", "unit", "source"]
        assert re.fullmatch(r"[0-9a-f]{8}(-dirty)?", line["commit"] or line["recorded"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
        assert line["script"].split()[0] in SCRIPTS
        assert isinstance(line["value"], (int, float))
        assert line["unit"]
    assert len({json.dumps(line) for line in lines}) == len(lines)
    assert history.HISTORY.with_suffix(".md").read_text(encoding="utf-8") == history.table(lines)


def test_figures_of_a_benchmark_are_kept(history, monkeypatch, tmp_path):
    printed = [{"commit": "01234567", "machine": {"processor": "Zen 3", "cores": 2}, "task": "sac", "rate": 1.5},
               {"task": "dqn", "results": [{"case": "small", "rate": 2, "seconds": 9}, {"case": "large", "rate": 3}]}]
    path = tmp_path / "history.jsonl"
    for text in (json.dumps(printed[0], indent=1) + "\n", "a line of a log\n" + json.dumps(printed[1])):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        monkeypatch.setattr("sys.argv", ["history.py", "--keep", "a.py", "--figure", "rate=1/s",
                                         "--history", str(path)])
        history.main()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["commit"], line["machine"], line["name"], line["value"]) for line in lines] == [
        ("01234567", "Zen 3", "sac, rate", 1.5), (None, None, "dqn, results, small, rate", 2),
        (None, None, "dqn, results, large, rate", 3)]
    assert {(line["script"], line["unit"], line["recorded"]) for line in lines} == {("a.py", "1/s", None)}
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))
    with pytest.raises(SystemExit):
        history.main()
