"""Tests of the cost of imports, of the packages that they load, and of the layers of modules."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

import pytorchrl
from tests.conftest import ROOT
from tests.unit.packaging.source import MODULES, PACKAGE, name_of, nodes_of, reads_source

# The folders (and files) directly in the package -> those that each of them may import; docs/developer/map.md says why.
MAY_IMPORT = {
    "errors": set(),
    "support": {"errors"},
    "files": {"errors", "support"},
    "agent": {"errors", "support", "files"},
    "envs": {"errors", "support", "files", "agent"},
    "runtime": {"errors", "support", "files", "agent"},
    "scheme": {"errors", "support", "files", "agent", "runtime"},
    "analysis": {"errors", "support", "files"},
    "monitor": {"errors", "support", "files", "analysis"},
    "profile": {"errors", "support", "files", "monitor", "scheme"},
    "export": {"errors", "support", "files", "agent"},
    "callbacks": {"errors", "support", "files", "agent", "monitor"},
    "learner": {"errors", "support", "files", "agent", "envs", "scheme", "callbacks", "monitor"},
    "training": {"errors", "support", "files", "agent", "envs", "scheme", "callbacks", "export", "learner", "monitor",
                 "analysis"},
    "play": {"errors", "support", "files", "agent", "envs", "runtime", "scheme", "learner", "training"},
    "cli": {"errors", "support", "files", "agent", "envs", "scheme", "monitor", "analysis", "profile", "export",
            "callbacks", "learner", "training", "play"},
    "__main__": {"cli"},
}
# Functions that import the module whose name they receive.
IMPORTERS = ("import_module", "__import__", "import_extra")
MOST_FOLDERS, MOST_FILES = 16, 4


def room_of(module):
    """Return the name of the folder or file directly in the package that contains a module."""
    return module.split(".")[1]


def imports_of(path):
    """Yield the modules that a module imports by statements, or by calls such as `import_module("ray")`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "pytorchrl")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTERS:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str))


@reads_source
def test_folders_import_only_those_that_they_may():
    wrong = []
    for path in MODULES:
        if path == PACKAGE / "__init__.py":  # names that are loaded on first use
            continue
        own = room_of(name_of(path))
        wrong += [f"{name_of(path)} imports {module}" for module in imports_of(path)
                  if module.startswith("pytorchrl.") and module != "pytorchrl.__version__"
                  and room_of(module) not in MAY_IMPORT[own] | {own}]
    assert wrong == []


# The modules that the declarations of the scheme's options may import; none of them has a worker.
OPTIONS_MAY_IMPORT = ("pytorchrl.agent", "pytorchrl.errors", "pytorchrl.runtime", "pytorchrl.scheme.devices",
                      "pytorchrl.scheme.options", "pytorchrl.scheme.transport.encoder", "pytorchrl.support")


@reads_source
def test_options_of_the_scheme_import_no_worker():
    found = {name_of(path): [name for name in imports_of(path) if name.startswith("pytorchrl.")
                             and not name.startswith(OPTIONS_MAY_IMPORT)]
             for path in MODULES if path.parent == PACKAGE / "scheme" / "options"}
    assert len(found) >= 8
    assert not any(found.values()), found


def test_every_folder_has_a_rule_and_rules_allow_no_circle():
    found = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"} - {
        "__init__", "__pycache__"}
    assert set(MAY_IMPORT) == found
    placed = set()
    for room, allowed in MAY_IMPORT.items():  # each room stands below the rooms that it may import
        assert allowed <= placed, room
        placed.add(room)


def test_the_map_states_these_rules_and_names_files_that_exist():
    page = (ROOT / "docs/developer/map.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs/_static/map.svg").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \| [^|]* \|([^|]*)\| `([\w/]+\.py)` \|$", page, re.MULTILINE)
    everywhere = {"errors", "support", "files"}
    expected = {folder: allowed - everywhere for folder, allowed in MAY_IMPORT.items()}
    for folder in ("cli", "errors", "__main__"):
        del expected[folder]
    assert {folder: set(re.findall(r"`(\w+)`", allowed)) for folder, allowed, _ in rows if folder != "cli"} == expected
    for folder in MAY_IMPORT:
        assert folder == "__main__" or f">{folder}{'.py' if folder == 'errors' else '/'}</text>" in picture, folder
    for file in re.findall(r"`((?:\w+/)+\w+\.py)`", page):
        assert (PACKAGE / file).is_file() or (ROOT / file).is_file(), file


def test_the_listing_is_short():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_dir() for path in entries) <= MOST_FOLDERS
    assert sum(path.is_file() for path in entries) <= MOST_FILES


@reads_source
def test_only_the_ray_runtime_and_the_callback_of_ray_tune_import_ray():
    importers = {name_of(path) for path in MODULES if any(m.split(".")[0] == "ray" for m in imports_of(path))}
    assert importers == {"pytorchrl.runtime.ray.runtime", "pytorchrl.callbacks.search"}


def test_public_names_are_sorted_unique_and_available():
    names = pytorchrl.__all__
    assert names == sorted(set(names), key=str.lower)
    assert 18 <= len(names) <= 46
    for name in names:
        assert getattr(pytorchrl, name) is not None
    assert set(names) <= set(dir(pytorchrl))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = pytorchrl.nothing_like_this


def test_type_checkers_and_imports_see_the_same_public_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, alias.name) for node in block.body for alias in node.names}
    assert seen == {(home, name) for name, home in pytorchrl._HOME_OF.items()}
    assert set(pytorchrl._HOME_OF) | {"__version__"} == set(pytorchrl.__all__)


def test_constants_equal_their_strings():
    assert (pytorchrl.SYNC, pytorchrl.ASYNC) == ("synchronous", "asynchronous")
    assert (pytorchrl.CENTRAL, pytorchrl.PARALLEL) == ("Central", "Parallel")


def test_importing_everything_and_central_training_load_only_what_training_needs(run_python):
    """Check that importing everything loads no optional package, and no module of torch that `import torch` does not.

    Central training then imports neither Ray nor an optional package.

    Such modules, for example `torch._dynamo`, take seconds. `benchmarks/start.py` measures times. The file with names
    from other libraries is read only for error messages.
    """
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import pytorchrl, pytorchrl.analysis, pytorchrl.cli.compare, pytorchrl.cli.train\n"
        "for name in pytorchrl.__all__: getattr(pytorchrl, name)\n"
        "from pytorchrl.agent.names_elsewhere import libraries\n"
        "assert libraries.cache_info().currsize == 0\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)\n"
        "from pytorchrl.cli import main\n"
        "code = main(['train', 'ppo', '--env', 'CartPole-v1', '--target-steps', '100', '--eval-every', '50', "
        "'--eval-episodes', '1',\n"
        "             '--num-steps', '16', '--log-dir', 'run', '--no-tensorboard'])\n"
        "names = ('ray', 'matplotlib', 'moviepy', 'tensorboard', 'ale_py', 'mujoco')\n"
        "print(code, [name for name in names if name in sys.modules])\n")
    result = run_python("-W", "error", "-c", script)
    assert result.returncode == 0, result.stderr
    first, *_, last = result.stdout.splitlines()
    assert last == "0 []", result.stderr
    loaded = {name for name in first.split() if "cython" not in name}
    assert loaded == {"pytorchrl", "gymnasium", "numpy", "cloudpickle", "farama_notifications"}


def test_every_module_imports_by_itself():
    for path in MODULES:
        if path.name != "__main__.py":
            importlib.import_module(name_of(path))
