"""Tests that the site, including the notebook, builds without warnings, and that its pages are complete."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re

import pytest

import pytorchrl
from pytorchrl.agent import algorithms
from pytorchrl.agent.algorithms.registry import registered
from pytorchrl.agent.names_elsewhere import of_other_libraries
from pytorchrl.scheme.options.settings import known_keywords
from tests.conftest import ROOT

pytest.importorskip("myst_nb")
pytest.importorskip("furo")
# One process builds the site for all of these tests, because a build takes a minute.
pytestmark = [pytest.mark.site, pytest.mark.timeout(600), pytest.mark.xdist_group("site")]

DOCS = ROOT / "docs"
WORKERS = (
    "scheme.updates.u_worker.UWorker", "scheme.updates.u_worker.UpdaterThread",
    "scheme.gradients.g_worker_set.GWorkerSet", "scheme.gradients.g_worker.GWorker",
    "scheme.gradients.g_worker.CollectorThread", "scheme.collection.c_worker_set.CWorkerSet",
    "scheme.collection.c_worker.CWorker", "scheme.replay.r_worker_set.RWorkerSet",
    "scheme.replay.r_worker.RWorker", "scheme.replay.shards.Shards",
    "scheme.transport.messages.Rollout", "scheme.transport.messages.Gradients",
    "scheme.transport.messages.Weights", "scheme.ledger.Ledger", "runtime.base.Runtime", "runtime.ThreadRuntime",
)


@pytest.mark.parametrize("name", list(registered()))
def test_every_algorithm_has_a_page_with_formulas_and_options(site, name):
    page = (site / "algorithms" / f"{name}.html").read_text(encoding="utf-8")
    assert "<math" in page
    assert "\\mathbb" not in page  # all formulas are MathML, which needs neither a script nor a network
    assert "mathjax" not in page.lower()
    options = dataclasses.fields(getattr(algorithms, name.upper()).Options)
    assert all(f">{field.name}<" in page for field in options)


def test_code_can_be_copied(site):
    page = (site / "quickstart.html").read_text(encoding="utf-8")
    assert "copybutton.js" in page


@pytest.mark.parametrize("name", [path.stem for path in sorted((DOCS / "notebooks").glob("*.ipynb"))])
def test_notebook_was_executed_and_can_be_downloaded(site, name):
    page = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
    assert page.count("cell_output") >= 2
    assert "<img" in page
    (link,) = re.findall(rf'href="\.\./(_downloads/\w+/{name}\.ipynb)"', page)
    assert (site / link).read_bytes() == (DOCS / "notebooks" / f"{name}.ipynb").read_bytes()


@pytest.mark.parametrize("name", [path.stem for path in sorted((DOCS / "notebooks").glob("*.ipynb"))])
def test_long_code_of_a_notebook_is_folded(site, name):
    cells = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    long = [cell for cell in cells if cell["cell_type"] == "code"
            and ("hide-input" in cell["metadata"].get("tags", ()) or len("".join(cell["source"]).splitlines()) > 20)]
    page = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
    assert page.count("<details") == len(long)
    assert page.count("Show the code") == len(long)


@pytest.mark.parametrize("name", [path.stem for path in sorted((DOCS / "notebooks").glob("*.ipynb"))])
def test_tables_of_a_notebook_are_tables(site, name):
    cells = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    tables = [output for cell in cells for output in cell.get("outputs", ())
              if "".join(output.get("data", {}).get("text/markdown", "")).startswith("|")]
    page = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
    assert page.count("<table") >= len(tables)  # text may contain further ones


def test_every_class_of_the_worker_tree_is_described(names):
    assert {f"pytorchrl.{name}" for name in WORKERS} <= names
    assert {"pytorchrl.scheme.Communication.ASYNC", "pytorchrl.scheme.Execution.PARALLEL"} <= names


def test_every_error_is_described(names):
    for name, value in vars(pytorchrl.errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert f"pytorchrl.errors.{name}" in names


def test_references_of_pages_are_public_names(names):
    found = 0
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\{(?:class|func|meth)\}`(?:[^`<]*<)?~?([\w.]+)>?`", text):
            assert target in names, f"{page.name}: {target}"
            found += 1
    assert found > 20


def test_options_pages_list_every_option(site):
    pages = [*(site / "options").glob("*.html"), *(site / "algorithms").glob("*.html")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in known_keywords():
        assert f">{name}</span>" in text, name
    scheme = (site / "options/scheme.html").read_text(encoding="utf-8")
    for name in inspect.signature(pytorchrl.Scheme).parameters:
        assert not (name.endswith("_factory") and f">{name}</span>" in scheme), name
    elsewhere = "".join(page.read_text(encoding="utf-8") for page in (site / "options").glob("names_elsewhere*.html"))
    for name in of_other_libraries():
        assert f">{name}</span>" in elsewhere, name
    # Only `train` and the command line have the option `preset`.
    assert ">preset</span>" not in scheme


def test_pages_of_the_command_line_list_every_flag_of_the_help(site, run_python):
    pages = [(site / name).read_text(encoding="utf-8") for name in ("flags.html", "command_line.html")]
    page = re.sub("<[^>]*>", "", "".join(pages))
    shown = run_python("-m", "pytorchrl", "train", "ppo", "--env", "CartPole-v1", "--help-all").stdout
    flags = set(re.findall(r"^\s+(--[a-z][a-z-]*)", shown, re.MULTILINE)) - {"--env", "--json", "--debug"}
    assert len(flags) > 40
    for flag in flags:
        assert re.search(rf"{flag}(?![a-z-])", page), flag


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', text), page


def test_build_does_not_change_the_sources(site):
    assert not [name for name in os.listdir(DOCS) if name.startswith(("jupyter", ".jupyter"))]
