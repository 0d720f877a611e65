"""Tests of the lag study: each kind of run can be repeated bit for bit, and its tables are those of its results."""

import json

import pytest

from tests.conftest import ROOT

LAG = ROOT / "benchmarks" / "lag"

# Make a short run of each kind twice, after a base decoder that has learned for a moment only.
RUNS = """
import json, sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[2]]
import torch

torch.set_num_threads(1)
from base import MODEL_FORMAT, path_of, save, train_base
from study import QUESTIONS

work, seen = Path(sys.argv[3]), set()
for task in ("sort", "copy"):
    save(str(path_of(task, work)), {
        "format": MODEL_FORMAT, "version": 0, "acting_state": train_base(task, 5).acting_state()})
for question in QUESTIONS.values():
    for settings in question():
        variant = type(settings), getattr(settings, "policy", ""), getattr(settings, "mode", ""), settings.lag == 4
        if variant in seen or settings.correction not in ("ppo", "decoupled", "vtrace") or settings.lag not in (2, 4):
            continue
        seen.add(variant)
        short = replace(settings, **({"batches": 6} if settings.task else {"steps": 600}))
        found = [short.run(work) for _ in range(2)]
        print(json.dumps([settings.id, [run["checksum"] for run in found], found[0]]))
"""

# Print the tables of the stored results.
TABLES = """
import json, sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[2]]
from report import tables_of
from study import QUESTIONS, results_of

print(json.dumps(tables_of({name: results_of(name, Path(sys.argv[3])) for name in QUESTIONS})))
"""


@pytest.mark.timeout(600)
def test_the_tables_of_the_lag_study_are_current(run_forked):
    results = ROOT / "docs" / "benchmarks" / "lag"
    found = run_forked("-c", TABLES, LAG, LAG.parent, results, cwd=ROOT, timeout=500)
    assert found.returncode == 0, found.stderr
    tables = json.loads(found.stdout)
    assert sorted(tables) == sorted(path.stem for path in results.glob("*.md"))
    for name, text in tables.items():
        assert (results / f"{name}.md").read_text(encoding="utf-8") == text, name
    page = (results.parent / "lag_study.md").read_text(encoding="utf-8")
    assert [name for name in tables if f"{{include}} lag/{name}.md" not in page] == []


@pytest.mark.timeout(600)
def test_each_kind_of_run_can_be_repeated(run_forked, tmp_path):
    found = run_forked("-c", RUNS, LAG, LAG.parent, tmp_path, cwd=ROOT, timeout=500)
    assert found.returncode == 0, found.stderr
    runs = {name: (checksums, line) for name, checksums, line in map(json.loads, found.stdout.splitlines())}
    assert {name.partition("/")[0] for name in runs} == {
        "TokenRun", "ControlRun", "CollapseRun", "ProximalRun", "TailRun", "GenerationRun"}
    for name, (checksums, _) in runs.items():
        assert checksums[0] == checksums[1], name
    lines = {name: line for name, (_, line) in runs.items()}
    for name, line in lines.items():
        if line["task"]:
            assert line["tokens"] == line["trained"] + sum(line["dropped"].values())
            assert sum(line["prompts"].values()) % 8 == 0  # groups of 8 answers
        if name.startswith(("ProximalRun", "GenerationRun")):
            error = line["errors"]["logp_error"]
            assert (error < 1e-5) == (line.get("mode") != "keep"), name
            assert (line["recomputed"] > 0) == (line.get("mode") == "recompute"), name
    dropped = {line["policy"]: line["dropped"].get("cancelled", 0) for line in lines.values() if "policy" in line}
    assert [policy for policy, number in dropped.items() if number] == ["cancel"]
