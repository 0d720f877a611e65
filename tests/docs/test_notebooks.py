"""Tests that each notebook has a copy for Jupyter without outputs, and that research notebooks share one form."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.conftest import ROOT

pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
import nbformat

DOCS = ROOT / "docs"
FOLDER = DOCS / "notebooks"
SCRIPT = DOCS / "_ext" / "notebooks.py"


def load_script():
    spec = importlib.util.spec_from_file_location("notebooks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks = load_script()
NAMES = notebooks.names()
HEADER = "---\nkernelspec:\n  name: python3\n  display_name: Python 3\n---\n\n"
# The first agent is an introduction, so it asks no question.
RESEARCH = [name for name in NAMES if name != "first_agent"]


def text_of(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_every_page_but_the_index_is_a_notebook():
    assert {path.stem for path in FOLDER.glob("*.md")} - {"index"} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_jupyter_copy_is_valid_and_has_the_cells_of_the_text_without_outputs(name):
    path = FOLDER / f"{name}.ipynb"
    copy = nbformat.read(path, as_version=4)
    nbformat.validate(copy)
    expected = notebooks.notebook_of(name)
    assert [(cell.cell_type, cell.source) for cell in copy.cells] == \
        [(cell.cell_type, cell.source) for cell in expected.cells], "run make notebooks-sync"
    code = [cell for cell in copy.cells if cell.cell_type == "code"]
    assert len(code) == len(re.findall(r"^```\{code-cell\}", text_of(name), re.MULTILINE)) > 0
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert path.read_text(encoding="utf-8") == notebooks.jupyter_copy(name), "run make notebooks-sync"


@pytest.mark.parametrize("name", NAMES)
def test_page_offers_its_jupyter_copy_for_download(name):
    before_first_section = text_of(name).partition("\n## ")[0]
    assert f"{{download}}`{name}.ipynb <{name}.ipynb>`" in before_first_section


@pytest.mark.parametrize("name", RESEARCH)
def test_research_notebook_begins_with_a_question_and_ends_with_a_result(name):
    sections = re.findall(r"^## (.+)$", text_of(name), re.MULTILINE)
    assert (sections[0], sections[-1]) == ("The question", "What was found")


@pytest.mark.parametrize("name", RESEARCH)
def test_first_cell_of_a_research_notebook_chooses_the_size(name):
    first = next(cell.source for cell in notebooks.notebook_of(name).cells if cell.cell_type == "code")
    assert "import os\n" in first
    assert 'FULL = os.environ.get("PYTORCHRL_NOTEBOOKS") == "full"\n' in f"{first}\n"


def test_index_lists_every_research_notebook():
    listed = re.findall(r"^- \{doc\}`(\w+)`: .+\?$", (FOLDER / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == RESEARCH


def test_execution_is_at_full_size_and_keeps_the_outputs_also_after_an_error(tmp_path, monkeypatch, capsys):
    code = 'import os\nprint(os.environ["PYTORCHRL_NOTEBOOKS"])\n1 / 0\n'
    (tmp_path / "small.md").write_text(f"{HEADER}```{{code-cell}}\n{code}```\n")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr(notebooks, "EXECUTED", tmp_path / "executed")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.main("execute", "small")
    assert "small: cell 1 of 1" in capsys.readouterr().out
    (cell,) = nbformat.read(tmp_path / "executed" / "small.ipynb", as_version=4).cells
    assert [output.output_type for output in cell.outputs] == ["stream", "error"]
    assert cell.outputs[0].text == "full\n"


def test_sync_writes_the_copy_and_an_unknown_name_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.md").write_text(f"{HEADER}```{{code-cell}}\n1\n```\n")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    assert notebooks.main("sync") == 0
    assert [cell.source for cell in nbformat.read(tmp_path / "small.ipynb", as_version=4).cells] == ["1"]
    assert notebooks.main("execute", "other") == 2
    assert "['execute', 'other'], but expected sync or execute, and names among small" in capsys.readouterr().err
