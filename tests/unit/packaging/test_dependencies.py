"""Tests that requirement files and extras list exactly the packages that the code imports."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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
PEERS = {"stable-baselines3", "sb3-contrib", "sample-factory", "rliable", "sbx", "sbx-rl"}
# Functions that import the module whose name they receive.
IMPORTERS = ("import_module", "import_extra")
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
    """Return the top-level names that a module imports with a statement, or with a function and a constant.

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
                and getattr(node.func, "attr", getattr(node.func, "id", None)) in IMPORTERS:
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


def requirements():
    """Return the requirements of the core and of all extras that name other packages."""
    lines = [*lines_of("requirements.txt"), *(line for listed in EXTRAS.values() for line in listed)]
    return [found for found in map(Requirement, lines) if name_of(found.name) != "pytorchrl"]


def pins():
    """Return the version of each package with which the project is developed."""
    found = map(Requirement, lines_of("constraints.txt"))
    return {name_of(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in found}


def bound_of(requirement, operator):
    """Return the version in the part of a requirement with this operator, or None."""
    return next((Version(part.version) for part in requirement.specifier if part.operator == operator), None)


def test_installed_and_pinned_versions_are_within_every_range():
    versions = {name: {version} for name, version in pins().items()}
    for distribution in importlib.metadata.distributions():
        versions.setdefault(name_of(distribution.name), set()).add(Version(distribution.version))
    outside = [f"{requirement}, not {version}" for requirement in requirements() if requirement.specifier
               for version in versions.get(name_of(requirement.name), ()) if version not in requirement.specifier]
    assert outside == []


def test_upper_bounds_exclude_the_first_versions_that_nobody_has_tried():
    """Check that a bound is the version after the pinned one, so that neither is forgotten when the other changes."""
    found = {name_of(each.name): bound for each in requirements() if (bound := bound_of(each, "<")) is not None}
    assert {"gymnasium", "mujoco"} <= set(found)
    pinned = pins()
    assert found == {
        name: Version(f"{pinned[name].major}.{pinned[name].minor + 1}" if bound.minor else str(pinned[name].major + 1))
        for name, bound in found.items()}


def test_versions_that_pages_advise_are_within_the_ranges():
    advised = [Requirement(found) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
               for found in re.findall(r"pip install '([\w.-]+[<>=][^']*)'", path.read_text(encoding="utf-8"))]
    assert advised
    for advice in advised:
        for allowed in requirements():
            lowest, below = bound_of(allowed, ">="), bound_of(advice, "<")
            if name_of(allowed.name) == name_of(advice.name) and lowest and below:
                assert lowest < below, f"a page advises {advice}, but the project requires {allowed}"
