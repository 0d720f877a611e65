"""Tests that the API reference describes every public name.

A name is public if the `__all__` of `pytorchrl` or of a public module contains it, or if code on a page or in
`examples/` imports it. All classes and functions of an imported module are public, unless the module has an `__all__`.
The table in `docs/api/index.md` lists the public modules.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import types

import pytest
from tests.conftest import ROOT

pytest.importorskip("myst_nb")
pytest.importorskip("furo")
pytestmark = [pytest.mark.site, pytest.mark.timeout(600), pytest.mark.xdist_group("site")]

_BLOCK = re.compile(
    r"^```(?:python|\{code-cell\}[^\n]*)\n(?:---\n.*?^---\n|(?::[^\n]*\n)+)?(.*?)^```$", re.MULTILINE | re.DOTALL)
# The first line of a notebook's cell may be a command of Jupyter, such as `%%writefile file.py`.
_MAGIC = re.compile(r"\A%%.*\n")


def value_of(name):
    """Return the object with this full name, or None if the name is not that of a module or of an attribute."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            value = getattr(value, part, None)
        return value
    return None


def public_modules():
    """Return the names of the modules in the table of `docs/api/index.md`."""
    table = (ROOT / "docs/api/index.md").read_text(encoding="utf-8").partition("## Public modules")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(pytorchrl[\w.]*)`", cell)]


def module_of(name):
    """Return the longest part of a full name that is the name of a module."""
    while not is_module(name):
        name = name.rpartition(".")[0]
    return name


@functools.cache
def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def names_of_modules():
    """Yield the full names in the `__all__` of every public module."""
    for module in public_modules():
        for name in getattr(importlib.import_module(module), "__all__", ()):
            yield f"{module}.{name}"


def imported_names(code):
    """Yield the full names that code imports from this library."""
    for node in ast.walk(ast.parse(_MAGIC.sub("", code))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pytorchrl":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pytorchrl."))


def code_of_pages():
    """Yield the Python code on the pages of the site, in the readme and in the examples."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    for page in [ROOT / "README.md", *pages]:
        yield from (re.sub(r"^%.*$", "", code, flags=re.MULTILINE)  # magic commands of notebooks are not Python
                    for code in _BLOCK.findall(page.read_text(encoding="utf-8")))
    for example in (ROOT / "examples").glob("*.py"):
        yield example.read_text(encoding="utf-8")


def members_of(module):
    """Yield the full names of a module's public classes and functions."""
    own = [name for name, value in vars(module).items()
           if isinstance(value, type | types.FunctionType) and value.__module__ == module.__name__]
    for name in getattr(module, "__all__", own):
        if not name.startswith("_"):
            yield f"{module.__name__}.{name}"


def public_names():
    """Return the full names of everything that is public."""
    named = {*names_of_modules(), *(name for code in code_of_pages() for name in imported_names(code))}
    modules = {name for name in named if isinstance(value_of(name), types.ModuleType)}
    return sorted((named - modules) | {member for name in modules for member in members_of(value_of(name))})


def directives_of_the_reference():
    """Return the full names in the directives on the pages of the API reference."""
    pages = (ROOT / "docs/api").glob("*.md")
    return sorted({name for page in pages
                   for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)})


def test_the_reference_describes_names_of_public_modules_only():
    allowed, found = public_modules(), directives_of_the_reference()
    assert len(found) > 150
    assert len(set(allowed)) == len(allowed)
    assert [name for name in found if module_of(name) not in allowed] == []


def test_pages_and_examples_import_from_public_modules_only():
    names = sorted({name for code in code_of_pages() for name in imported_names(code)})
    assert [name for name in names if module_of(name) not in public_modules()] == []


def test_public_names_are_found():
    found = set(public_names())
    assert {"pytorchrl.PPO", "pytorchrl.scheme.RWorkerSet", "pytorchrl.callbacks.Callback"} <= found  # by `__all__`
    assert {"pytorchrl.profile.work_shares.WorkSampler", "pytorchrl.monitor.view.read_run"} <= found  # by an import
    assert "pytorchrl.training.presets.register" in found  # by the import of a module
    assert len(found) > 150
    assert not [name for name in found if value_of(name) is None]


def test_every_public_name_is_described(names):
    # A name may be described where it is defined, or under the name of a package that exports it.
    described = {(name.split(".")[-1], id(value_of(name))) for name in names}
    missing = [name for name in public_names() if (name.split(".")[-1], id(value_of(name))) not in described]
    assert not missing, f"add these names to a page in docs/api: {', '.join(missing)}"
