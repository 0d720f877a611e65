"""Tests of the files through which messages, options, errors and checkpoints pass, and of the page that names them."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Path -> the section of the tour that describes it, and the largest numbers of files and of returns to a file.
SECTIONS = {
    "rollout, parallel and asynchronous": ("A rollout of an asynchronous scheme", 6, 0),
    "rollout, parallel and synchronous": (None, 5, 0),
    "rollout, central and synchronous": ("A rollout of a central, synchronous scheme", 3, 0),
    "gradient, parallel and synchronous": ("A gradient", 9, 4),
    "weights, parallel and asynchronous": ("New weights", 5, 7),
    "train(gae_lambda=...)": ("An option", 12, 12),
    "error": ("An error", 17, 9),
    "checkpoint": ("A checkpoint", 10, 0),
}


def load(script):
    """Return the module of a script in `benchmarks/`."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "benchmarks" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # the script imports another module of its folder
        spec.loader.exec_module(module)
    return module


@functools.cache
def files_of(name):
    """Return the files on a path, relative to the package, and how often it returns to a file; see `benchmarks/`."""
    if name == "train(gae_lambda=...)":
        path = load("option_path").trace(name)
    else:
        script = load("message_paths")
        special = {"error": script.trace_error, "checkpoint": script.trace_checkpoint}
        path = special[name]() if name in special else script.trace(*script.PATHS[name])
    return [file.removeprefix("pytorchrl/") for file in path["files"] if file != "storage"], path["returns"]


def section_of_tour(title):
    """Return the files that a section of the tour names, in the order of the first mention, relative to the package."""
    tour = (ROOT / "docs/developer/tour.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", tour, re.MULTILINE | re.DOTALL)[1]
    names = dict.fromkeys(re.findall(r"`([\w/]+\.py)`", section))
    package = ROOT / "pytorchrl"
    return [name if (package / name).is_file() else f"scheme/{name}" for name in names]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_message_passes_through_few_files(name):
    _, most_files, most_returns = SECTIONS[name]
    files, returns = files_of(name)
    assert len(files) <= most_files, files
    assert returns <= most_returns, files


def test_a_rollout_starts_in_the_collection_worker():
    assert files_of("rollout, parallel and asynchronous")[0][0] == "scheme/collection/c_worker.py"


@pytest.mark.parametrize("name", [name for name, (section, *_) in SECTIONS.items() if section])
def test_the_tour_names_the_files_in_the_order_of_the_path(name):
    files, _ = files_of(name)
    named = section_of_tour(SECTIONS[name][0])
    assert [file for file in named if file in files] == files
