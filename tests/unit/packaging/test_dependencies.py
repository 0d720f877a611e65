"""What is imported is listed, and what is listed is imported: by requirement files and extras, compared with syntax
trees."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys

import pytest

from tests.conftest import ROOT
from tests.unit.packaging.project import EXTRAS, lines_of, name_of

CORE = {name_of(line) for line in lines_of("requirements.txt")}
# Extras of users. Those of developers are for tests, pages and checks.
OF_USERS = sorted(set(EXTRAS) - {"docs", "test", "dev"})
DISTRIBUTIONS = importlib.metadata.packages_distributions()
# Peers that a benchmark measures, each in a virtual environment that its page tells how to make.
PEERS = {"stable-baselines3", "sample-factory"}
# What is listed without an import of its own name, and who needs it.
INDIRECT = {
    "imageio-ffmpeg": "moviepy writes films with it",
    "mpe2": "its environments are given by name",
    "opencv-python-headless": "Gymnasium's preprocessing and films use it",
    "tensorboard": "torch.utils.tensorboard writes its files",
}
# Core requirements without an import in the package, and where they are used.
ELSEWHERE = {"scipy": "benchmarks"}


def listed_in(*extras):
    """Names of the core's packages and of these extras', with those of the extras of this project that they name."""
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
    """(path, syntax tree) of every module below a folder; what is built there does not count."""
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
            for path in sorted((ROOT / folder).rglob("*.py")) if "_build" not in path.parts]


@functools.cache
def imported_by(tree, *, for_checkers):
    """Top-level names that a module imports, by a statement or by a constant name: for type checkers only, or in
    earnest."""
    found, nodes = set(), list(ast.walk(tree))
    def is_for_checkers(node):
        return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
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
    """Distribution -> a module below the folder that imports it, for all that is neither Python's own nor ours."""
    own = {"pytorchrl", "tests", "conftest", *(path.stem for path in (ROOT / folder).rglob("*.py")),
           *(p.stem for p in ROOT.glob("examples/*"))}
    found = {}
    for path, tree in modules_of(folder):
        for module in imported_by(tree, for_checkers=for_checkers):
            if module not in own and module not in sys.stdlib_module_names:
                for distribution in DISTRIBUTIONS.get(module, [module]):
                    found.setdefault(name_of(distribution), path)
    return found


@pytest.mark.parametrize(("folder", "extras"), [
    ("pytorchrl", OF_USERS), ("examples", OF_USERS), ("tests", ["test", "docs"]), ("docs", ["docs"]),
    ("benchmarks", ["test"])])
def test_every_import_is_of_a_listed_package(folder, extras):
    listed = listed_in(*extras) | (PEERS if folder == "benchmarks" else set())
    missing = {name: path for name, path in foreign(folder).items() if name not in listed}
    assert missing == {}


def test_imports_for_type_checkers_are_of_packages_that_checks_install():
    missing = {name: path for name,
               path in foreign("pytorchrl", for_checkers=True).items() if name not in listed_in("dev")}
    assert missing == {}


def test_every_core_requirement_is_imported():
    used = foreign("pytorchrl")
    assert CORE - set(used) == set(ELSEWHERE)
    for name, folder in ELSEWHERE.items():
        assert name in foreign(folder)


@pytest.mark.parametrize("extra", OF_USERS)
def test_every_package_of_an_extra_is_named_in_the_package(extra):
    """Optional packages are loaded by name, which stands in an import or in a text, as a whole or before a dot."""
    words = words_of_the_package()
    for requirement in EXTRAS[extra]:
        name = name_of(requirement)
        assert name in INDIRECT or name.replace("-", "_") in words, requirement


@functools.cache
def words_of_the_package():
    """Names that modules of the package import, and their strings, each up to the first dot."""
    words = set()
    for _, tree in modules_of("pytorchrl"):
        words |= imported_by(tree, for_checkers=False)
        words |= {node.value.partition(".")[0] for node in ast.walk(tree)
                  if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return words
