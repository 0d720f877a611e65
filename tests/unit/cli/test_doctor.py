"""Tests of `pytorchrl doctor`: the checklist of a run, which is that of the page "It does not learn".

Runs that go wrong and right in each way are in `monitor/test_findings.py`.
"""

from __future__ import annotations

import os
import re
import sys

import pytest

from pytorchrl.cli import main
from pytorchrl.cli.doctor import QUESTIONS, checks_of
from pytorchrl.monitor.view import read_run
from tests.conftest import ROOT
from tests.unit.monitor.runs import make_run, record

PAGE = (ROOT / "docs" / "not_learning.md").read_text(encoding="utf-8")
RESULT = {"env_steps": 400}


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def rows_of(title):
    """Return the cells of each row of the table in a section of the page."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")]
            for line in section.splitlines() if line.startswith("| ")][1:]


def doctor(capsys, run_dir):
    """Return the exit code, the lines with states and the questions that the command prints."""
    code = main(["doctor", str(run_dir)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    items, _, rest = out.partition("\n\n")
    return code, re.sub(r"\n {9}", " ", items).split("\n"), re.findall(r"^ ?\d+  .+", rest, re.MULTILINE)


def state_of(items, text):
    (found,) = [item for item in items if text in item]
    return found.split()[0]


def test_the_page_and_the_command_have_the_same_items_in_the_same_order(capsys, tmp_path):
    _, items, questions = doctor(capsys, make_run(tmp_path / "a", [record(9, 400)], result=RESULT))
    printed = [item[9:] for item in items if not item.startswith("wrong")]
    assert printed == [fine for fine, _ in rows_of("What a record tells")]
    rows = rows_of("What only you can check")
    assert [re.split(r" {2,}", line.strip()) for line in questions] == [
        [number, question, page] for (number, question, *_), (_, page) in zip(rows, QUESTIONS, strict=True)]
    for (_, page), (*_, check, remedy) in zip(QUESTIONS, rows, strict=True):
        assert f"{{doc}}`{page}`" in check + remedy


def test_a_run_that_has_just_begun_is_unknown(capsys, tmp_path):
    code, items, _ = doctor(capsys, make_run(tmp_path / "a"))
    assert code == 0
    assert [item.split()[0] for item in items] == ["ok"] + 9 * ["unknown"]
    early = record(1, 20, updates_skipped_nan=0)
    code, items, _ = doctor(capsys, make_run(tmp_path / "b", [early]))
    assert code == 0
    assert [item.split()[0] for item in items] == 3 * ["ok"] + 6 * ["unknown"] + ["ok"]


def test_a_run_that_was_killed_is_wrong(capsys, tmp_path):
    run_dir = make_run(tmp_path / "a", [record(9, 400)])
    os.utime(run_dir / "metrics.jsonl", (1e9, 1e9))
    code, items, _ = doctor(capsys, run_dir)
    assert code == 1
    assert state_of(items, "silent: no record was written for") == "wrong"
    assert [check.word for check in checks_of(read_run(run_dir)) if check.wrong] == ["silent"]


def test_a_damaged_file_is_wrong(capsys, tmp_path):
    run_dir = make_run(tmp_path / "a", [record(9, 400)], result=RESULT)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write("damaged\n")
    (run_dir / "run.json").write_text("{")
    code, items, _ = doctor(capsys, run_dir)
    assert code == 1
    assert state_of(items, "files: ") == "wrong"
    assert "lines that are no records were left out: 1" in "".join(items)
    assert "cannot be read" in "".join(items)


@pytest.mark.parametrize(("is_terminal", "no_color"), [(False, ""), (True, ""), (True, "1")])
def test_what_is_wrong_is_red_in_a_terminal(capsys, monkeypatch, tmp_path, is_terminal, no_color):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("COLUMNS", "60")
    worst = record(9, 400, workers_missing=1)
    assert main(["doctor", str(make_run(tmp_path / "a", [worst], result=RESULT))]) == 1
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    is_red = is_terminal and not no_color
    wrong = [line for line in lines if "wrong    " in line or "reason" in line]
    assert len(wrong) == 2
    assert [line.startswith("\x1b[31m") and line.endswith("\x1b[0m") for line in wrong] == [is_red] * 2
    assert ("\x1b" in "".join(lines)) == is_red
    assert all(len(line.removeprefix("\x1b[31m").removesuffix("\x1b[0m")) <= 60 for line in lines)
