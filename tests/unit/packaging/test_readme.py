"""Tests that the README and the first page of the documentation are short, agree, and show what exists.

The three lines of Python are run by tests/docs/test_docs_code.py, together with the code of the other pages.
"""

from __future__ import annotations

import re

import pytest
import yaml

import pytorchrl
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
MOST_WORDS = 600


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_readme_is_short():
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.parametrize("language", ["python", "text"])
def test_readme_and_first_page_show_the_same_three_lines(language):
    assert len(blocks(README, language)) == 1
    assert blocks(README, language) == blocks(INDEX, language)


# Number, text with a link to a page, test: as the README and the first page show it.
REASONS = {
    "README": (README, r"^\d\. \[[^]]+\]\(docs/\w+\.md\).*\n {3}\[`(?P<name>test_\w+)`\]\((?P<path>tests/.*\.py)\)$"),
    "first page": (INDEX, r"^\d\. \{doc\}`[^<]+ <\w+>`.*\n {3}`(?P<path>tests/.*\.py)::(?P<name>test_\w+)`$")}


@pytest.mark.parametrize(("text", "pattern"), REASONS.values(), ids=REASONS)
def test_each_of_five_reasons_names_a_page_and_a_test(text, pattern):
    reasons = list(re.finditer(pattern, text, re.MULTILINE))
    assert len(reasons) == 5
    for reason in reasons:
        assert f"\ndef {reason['name']}(" in (ROOT / reason["path"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["one_core", "scores_short"])
def test_tables_are_those_of_the_benchmarks(name):
    table = (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text(encoding="utf-8")
    assert f"\n\n{table}\n" in README
    assert f"{{include}} benchmarks/{name}.md\n" in INDEX


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pytorchrl.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
