"""Tests that requirement files and extras list exactly the packages that the code imports."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys

import pytest

from tests.conftest import ROOT
from tests.unit.packaging.project import EXTRAS, lines_of, name_of
from tests.unit.packaging.source import nodes_of, reads_source

CORE = {name_of(line) for line in lines_of("requirements.txt")}
# The extras whose packages this library uses. The others are for tests, documentation and checks, or, as `envs`, for
# environments that this library does not import.
OF_USERS = sorted(set(EXTRAS) - {"docs", "test", "dev", "envs"})
DISTRIBUTIONS = importlib.metadata.packages_distributions()
pytestmark = reads_source
# Libraries for comparison, which a benchmark measures in separate virtual environments; see the benchmark's page.
PEERS = {"stable-baselines3", "sample-factory", "rliable", "sbx", "sbx-rl"}
# Required packages that no module imports by name -> reason.
INDIRECT = {
    "imageio-ffmpeg": "moviepy uses it to write videos",
    "mpe2": "its environments are selected by name",
    "opencv-python-headless": "Gymnasium's preprocessing and video recording use it",
    "tensorboard": "torch.utils.tensorboard writes its files",
}


def listed_in(*extras):
    """Return the names of the packages that the core and some extras require, directly or through other extras."""
    names = set(CORE)
    for extra in extras:
        for requirement in EXTRAS[extra]:
            if name_of(requirement) == "pytorchrl":
                names |= listed_in(*requirement.partition("[")[2].partition("]")[0].split(","))
            else:
                names.add(name_of(requirement))
    return names


@functools.cache
def modules_of(folder):
    """Return the paths of all modules below a folder, except build results."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "_build" not in path.parts]


@functools.cache
def imported_by(path, *, for_checkers):
    """Return the top-level names that a module imports with a statement, or with `import_module` and a constant.

    With `for_checkers`, return only the imports for type checkers; otherwise, leave these imports out.
    """
    found, nodes = set(), nodes_of(path)
    def is_for_checkers(node):
        return isinstance(node, ast.If) and isinstance(node.test, ast.Name | ast.Attribute) and ast.unparse(
            node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    hidden = {id(node) for block in nodes if is_for_checkers(block) for line in block.body for node in ast.walk(line)}
    for node in nodes:
        if (id(node) in hidden) != for_checkers:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) \
                and getattr(node.func, "attr", getattr(node.func, "id", None)) == "import_module":
            names = [node.args[0].value]
        found |= {name.partition(".")[0] for name in names}
    return found


def foreign(folder, *, for_checkers=False):
    """Return the third-party distributions that a folder's modules import, each with the path of one such module."""
    own = {"pytorchrl", "tests", "conftest", *(path.stem for path in (ROOT / folder).rglob("*.py")),
           *(p.stem for p in ROOT.glob("examples/*"))}
    found = {}
    for path in modules_of(folder):
        for module in imported_by(path, for_checkers=for_checkers):
            if module not in own and module not in sys.stdlib_module_names:
                for distribution in DISTRIBUTIONS.get(module, [module]):
                    found.setdefault(name_of(distribution), path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize(("folder", "extras"), [
    ("pytorchrl", OF_USERS), ("examples", OF_USERS), ("tests", ["test", "docs"]), ("docs", ["docs"]),
    ("benchmarks", ["test"])])
def test_every_import_is_of_a_listed_package(folder, extras):
    listed = listed_in(*extras) | (PEERS if folder == "benchmarks" else set())
    missing = {name: path for name, path in foreign(folder).items() if name not in listed}
    assert missing == {}


def test_type_checking_imports_are_of_packages_that_checks_install():
    missing = {name: path for name,
               path in foreign("pytorchrl", for_checkers=True).items() if name not in listed_in("dev")}
    assert missing == {}


def test_every_core_requirement_is_imported():
    assert CORE - set(foreign("pytorchrl")) == set()


@pytest.mark.parametrize("extra", OF_USERS)
def test_every_package_of_an_extra_is_used_in_the_package(extra):
    """Check that the package imports each package of its extras, or names it in a string to load it by name."""
    words = words_of_the_package()
    for requirement in EXTRAS[extra]:
        name = name_of(requirement)
        assert name in INDIRECT or name.replace("-", "_") in words, requirement


@functools.cache
def words_of_the_package():
    """Return the top-level names that the package's modules import, and each string's text before its first dot."""
    words = set()
    for path in modules_of("pytorchrl"):
        words |= imported_by(path, for_checkers=False)
        words |= {node.value.partition(".")[0] for node in nodes_of(path)
                  if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return words
