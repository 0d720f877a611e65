"""Tests that pages can be read in pieces: no long run of prose, and a table of situations at the top of long pages.

A run of prose consists of paragraphs and lists. It ends at a heading, a figure, a table, a block of code or formulas,
or a term that is defined.
"""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs"
MOST_WORDS = 300
# These pages belong to a record of measurements, which is read by date.
EXEMPT = {"benchmarks/log.md"}
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
# Pages that describe many cases begin with a table that leads from a situation to the answer.
WITH_SITUATIONS = ("failures", "scaling", "checkpoints", "replay", "which_scheme", "not_learning", "own_environment",
                   "own_network", "own_algorithm", "install", "clusters", "debugging", "profiling", "algorithms/index",
                   "benchmarks", "benchmarks/libraries", "benchmarks/workers")


def runs_of_prose(text):
    """Yield (first line, number of words) of each run of prose."""
    first, words, fence = 0, 0, ""
    lines = re.sub(r"\A---\n.*?\n---\n", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL).split("\n")
    for number, line in enumerate(lines, start=1):
        opening = re.match(r"(`{3,}|:{3,})", line)
        if opening and (not fence or line.startswith(fence)):
            fence = "" if fence else opening[1]
        is_term = number < len(lines) and lines[number].startswith(": ")
        is_code = re.match(r" {4}(?![-*\d])", line) and (number == 1 or not words or not lines[number - 2].strip())
        if fence or opening or is_term or is_code or re.match(r"#+ |\||\(\S+\)=$", line):
            if words:
                yield first, words
            first, words = 0, 0
        elif line.strip():
            first = first or number
            words += len(line.split())
    if words:
        yield first, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_run_of_prose_is_long(page):
    if page.relative_to(DOCS).as_posix() in EXEMPT:
        pytest.skip("a record by date")
    long = [(line, words) for line, words in runs_of_prose(page.read_text(encoding="utf-8")) if words > MOST_WORDS]
    assert not long, "add a heading, a table, a figure or code; (line, words)"


@pytest.mark.parametrize("name", WITH_SITUATIONS)
def test_page_begins_with_a_table_of_situations(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    table = re.search(r"^\|[^\n]+\n\| ?-", text, re.MULTILINE)
    assert table
    before = re.sub(r"^```.*?^```$", "", text[:table.start()], flags=re.MULTILINE | re.DOTALL)
    assert len(before.split()) < 120
    rows = text[table.start():].partition("\n\n")[0].count("\n") - 1
    assert rows >= 4


def test_runs_of_prose_are_measured():
    text = ("# Title\n\none two\nthree\n\n- four\n- five\n\n| a | b |\n|---|---|\n\n```python\ncode here\n```\n\n"
            "six\n\n    code\n\nseven\n\nterm\n: meaning of it\n")
    assert list(runs_of_prose(text)) == [(3, 7), (16, 1), (20, 1), (23, 4)]
