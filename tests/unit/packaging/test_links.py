"""Tests of the links in the documentation, and of the tool that checks them in `make lint`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import ROOT

TOOL = ROOT / "docs" / "_ext" / "check_links.py"


@pytest.fixture(scope="module")
def tool():
    """Return the module docs/_ext/check_links.py."""
    spec = importlib.util.spec_from_file_location("check_links", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_has_an_existing_target(tool):
    assert list(tool.broken_links(ROOT)) == []
    num_links = sum(len(list(tool.links_of(page.read_text(encoding="utf-8")))) for page in tool.pages_of(ROOT))
    assert num_links > 80


@pytest.mark.parametrize(("text", "is_broken"), [
    ("[a](docs/b.md)", False), ("[a](docs/c.md)", True), ("![a](docs/c.svg)", True),
    ("[a](docs/b.md#the-title)", False),
    ("[a](docs/b.md#the-totle)", True), ("[a](docs/b.md#mark)", False), ("[a](#own)", False), ("[a](#other)", True),
    ("[a](https://example.org/c.md)", False), ("[a]: docs/b.md", False), ("[a]: docs/c.md", True), ("[a](docs)", False),
    ("{doc}`docs/b`", False), ("{doc}`docs/c`", True), ("{doc}`text <docs/c>`", True), ("{doc}`/b`", False),
    ("{doc}`/c`", True),
    ("`[a](docs/c.md)`", False), ("```\n[a](docs/c.md)\n```", False),
    ("[a](docs/b.md 'x')\n[a](docs/c.md \"title\")", True)])
def test_broken_links_are_found(tool, tmp_path, text, is_broken):
    (tmp_path / "docs" / "_build").mkdir(parents=True)
    (tmp_path / "docs" / "b.md").write_text("# The *title*!\n\n(mark)=\n")
    (tmp_path / "docs" / "_build" / "built.md").write_text("[a](nowhere.md)")
    (tmp_path / "page.md").write_text(f"# Own\n\n{text}\n")
    found = list(tool.broken_links(tmp_path))
    assert len(found) == is_broken
    assert all(line.startswith(f"page.md:{3 + text.count(chr(10))}: ") and line.endswith("is broken")
               for line in found)


def test_the_tool_fails_for_a_broken_link(tmp_path, run_python):
    (tmp_path / "page.md").write_text("[a](b.md)")
    result = run_python(TOOL, tmp_path)
    assert result.returncode == 1
    assert result.stdout == "page.md:1: b.md is broken\n"
    (tmp_path / "b.md").touch()
    assert run_python(TOOL, tmp_path).returncode == 0
