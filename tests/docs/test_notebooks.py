"""Tests that each notebook is stored with its outputs, and that its numbers are those of its stored results."""

from __future__ import annotations

import base64
import importlib.util
import json
import re

import pytest

from tests.conftest import ROOT

pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")
import nbformat

FOLDER = ROOT / "docs" / "notebooks"
SCRIPT = ROOT / "docs" / "_ext" / "notebooks.py"


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
# A notebook of two cells, which draws from the results of the third one.
SMALL = (
    HEADER + "# Small\n\n```{code-cell}\nimport json\nfrom pathlib import Path\n\n"
    'results = json.loads(Path("small.json").read_text())["results"]\nresults["found"]\n```\n\n'
    "It found {{ results['found']:.1f }}.\n\n## The experiment\n\n```{code-cell}\nimport os\n\n"
    'results = {"found": 0.12345678, "size": os.environ["PYTORCHRL_NOTEBOOKS"]}\n```\n')


def text_of(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def stored(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def record_of(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def outputs_of(notebook, kind):
    return [output.data[kind] for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
            if kind in output.get("data", ())]


def typed_numbers(text):
    """Return the numbers of a text that are neither values of expressions nor parts of code, names and links."""
    prose = re.sub(r"^```.*?^```$|\{\{ .+? \}\}|`[^`]+`|\]\([^)]*\)", " ", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<![\w-])\d[\d.,]*", prose)


def test_every_page_but_the_index_is_a_notebook():
    assert {path.stem for path in FOLDER.glob("*.md")} - {"index"} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(RESEARCH)


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stored_with_the_cells_of_its_text_and_with_outputs(name):
    path, copy, text = FOLDER / f"{name}.ipynb", stored(name), notebooks.notebook_of(name)
    nbformat.validate(copy)
    assert [(cell.cell_type, cell.source) for cell in copy.cells if cell.cell_type == "code"] == \
        [(cell.cell_type, cell.source) for cell in text.cells if cell.cell_type == "code"], "run make notebooks-sync"
    assert len(copy.cells) == len(text.cells)
    assert path.stat().st_size < 100_000
    first = next(number for number, cell in enumerate(copy.cells)
                 if cell.cell_type == "code" and any("image/png" in output.get("data", ()) for output in cell.outputs))
    assert sum(cell.source.count("\n") + 1 for cell in copy.cells[:first + 1]) < 100
    for png in outputs_of(copy, "image/png"):
        assert base64.b64decode(png).startswith(b"\x89PNG")
    shown, experiment = notebooks.parts_of(copy)
    assert not [cell for cell in experiment if cell.cell_type == "code" and cell.outputs]
    kinds = {output.get("name", "") for cell in shown if cell.cell_type == "code" for output in cell.outputs}
    assert kinds <= {"", "stdout"}
    assert not [text for text in outputs_of(copy, "text/plain") if " at 0x" in text and "Markdown" not in text]


@pytest.mark.parametrize("name", RESEARCH)
def test_every_number_of_a_notebook_is_that_of_its_results(name):
    drawn, copy = notebooks.drawn(name), stored(name)
    for now, before in zip(drawn.cells, copy.cells, strict=True):
        assert now.source == before.source, "run make notebooks-sync"
    for kind in ("text/plain", "text/markdown"):
        assert outputs_of(drawn, kind) == outputs_of(copy, kind), "run make notebooks-sync"
    found = text_of(name).partition("\n## What was found\n")[2].partition("\n## The experiment\n")[0]
    assert len(notebooks.EXPRESSION.findall(found)) >= 3
    assert typed_numbers(found) == [], "write each number as an expression, {{ ... }}"
    assert not notebooks.EXPRESSION.search(text_of(name).partition("\n## The experiment\n")[2])


@pytest.mark.parametrize("name", RESEARCH)
def test_results_say_how_they_were_measured(name):
    record = record_of(name)
    assert record["command"] == f"make notebooks NOTEBOOK={name}"
    assert record["experiment"] == notebooks.checksum_of_experiment(name), "run the command again"
    assert re.fullmatch(r"[0-9a-f]{7,}", record["commit"])
    assert {"seeds", "seconds", "core_seconds", "machine", "load_at_start", "torch"} <= set(record)
    assert (FOLDER / f"{name}.json").stat().st_size < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_text_of_a_notebook_is_readable_on_a_forge_and_its_lines_of_code_fit_into_a_page(name):
    text = text_of(name)
    assert not re.findall(r"\{[a-z]+\}`", text)  # only Sphinx shows roles
    code = [line for cell in notebooks.notebook_of(name).cells if cell.cell_type == "code"
            for line in cell.source.splitlines()]
    assert not [line for line in code if len(line) > 88]


@pytest.mark.parametrize("name", RESEARCH)
def test_research_notebook_asks_answers_and_shows_its_experiment(name):
    assert re.findall(r"^## (.+)$", text_of(name), re.MULTILINE) == ["The question", "What was found", "The experiment"]
    code = next(cell.source for cell in notebooks.parts_of(notebooks.notebook_of(name))[1] if cell.cell_type == "code")
    assert 'FULL = os.environ.get("PYTORCHRL_NOTEBOOKS") == "full"\n' in code


def test_index_lists_every_research_notebook():
    listed = re.findall(r"^- \[.+\?\]\((\w+)\.md\)$", (FOLDER / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*listed, "first_agent"} == set(NAMES)


@pytest.mark.site
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_at_small_size(name, tmp_path):
    cells = [*notebooks.notebook_of(name).cells]
    if name in RESEARCH:
        cells.append(nbformat.v4.new_code_cell(notebooks.REPORT))
    printed = notebooks.run(name, cells, "small")
    if name in RESEARCH:
        assert set(json.loads(printed)["results"]) <= set(record_of(name)["results"])


@pytest.mark.parametrize("text", ["PPO scored 180.", "in 1/6 of the runs", "(12, 3 %)", "lag ≤ 2"])
def test_typed_numbers_are_found(text):
    assert typed_numbers(text)
    assert not typed_numbers("CartPole-v1 and p99 have `queue_size=2`, [see](x2.md), and {{ score('a', 0) }}")


def small(folder, monkeypatch, text=SMALL):
    (folder / "small.md").write_text(text)
    monkeypatch.setattr(notebooks, "FOLDER", folder)


def test_execution_measures_at_full_size_and_the_copy_shows_its_results(tmp_path, monkeypatch, capsys):
    small(tmp_path, monkeypatch)
    monkeypatch.setattr(notebooks, "_commit", lambda: "0123abc")
    assert notebooks.main("execute", "small") == 0
    assert "small: cell 1 of 2" in capsys.readouterr().out
    record = json.loads((tmp_path / "small.json").read_text())
    assert record["results"] == {"found": 0.123457, "size": "full"}
    assert record["seeds"] == []
    copy = nbformat.read(tmp_path / "small.ipynb", as_version=4)
    assert copy.cells[2].source.startswith("It found 0.1.")
    assert [output.data for output in copy.cells[1].outputs] == [{"text/plain": "0.123457"}]
    assert copy.cells[1].execution_count == 1
    assert copy.cells[3].outputs == []

    # A number that is changed in the results changes the copy, and code that is changed has another checksum.
    (tmp_path / "small.json").write_text(json.dumps({**record, "results": {"found": 0.2}}))
    assert notebooks.drawn("small").cells[2].source.startswith("It found 0.2.")
    small(tmp_path, monkeypatch, SMALL.replace("0.12345678", "0.5"))
    assert notebooks.checksum_of_experiment("small") != record["experiment"]


def test_copy_contains_small_figures_and_printed_text(tmp_path, monkeypatch):
    cell = "import matplotlib.pyplot as plt\n\nplt.figure(figsize=(9, 3)).gca().plot([1, 2])\nprint(1);"
    small(tmp_path, monkeypatch, f"{HEADER}```{{code-cell}}\n{cell}\n```\n")
    assert notebooks.main("sync") == 0
    (cell,) = nbformat.read(tmp_path / "small.ipynb", as_version=4).cells
    assert [output.output_type for output in cell.outputs] == ["stream", "display_data"]
    assert cell.outputs[0].text == "1\n"
    assert len(cell.outputs[1].data["image/png"]) < 20_000
    assert (tmp_path / "small.ipynb").read_text() == notebooks.jupyter_copy("small")


def test_error_of_a_cell_ends_a_run_and_an_unknown_name_is_refused(tmp_path, monkeypatch, capsys):
    small(tmp_path, monkeypatch, f"{HEADER}```{{code-cell}}\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        notebooks.main("sync", "small")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.run("small", notebooks.notebook_of("small").cells, "small")
    small(tmp_path, monkeypatch, f"{HEADER}There are {{{{ unknown:.1f }}}}.\n")
    with pytest.raises(ValueError, match=r"\{\{ unknown:.1f \}\} in the text has no value: NameError"):
        notebooks.main("sync", "small")
    assert notebooks.main("execute", "other") == 2
    assert "['execute', 'other'], but expected sync or execute, and names among small" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "expected"), [
    ({"a": [1.23456789, 2]}, {"a": [1.23457, 2]}), (float("nan"), None), (True, True), ("x", "x")])
def test_results_are_rounded(value, expected):
    assert notebooks.rounded(value) == expected
