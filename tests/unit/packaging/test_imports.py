"""Tests of the cost of imports, of the packages that they load, and of the layers of modules."""

from __future__ import annotations

import ast
import importlib

import pytest

import pytorchrl
from tests.unit.packaging.source import MODULES, PACKAGE, name_of, nodes_of, reads_source

# Modules that every layer may import. Options are declared in every layer, so the module `options` belongs to
# no layer.
EVERYWHERE = ("errors", "terminal", "tracebacks", "options", "deprecation", "worker_names", "untyped",
              "saved_files", "sealed_files", "sealed_lines", "appended_files", "exits", "turns")
# The layers that each layer may import, in addition to itself and to the modules that every layer may import.
ALLOWED = {
    "errors": set(),
    "deprecation": set(),
    "terminal": set(),
    "tracebacks": set(),
    "worker_names": set(),
    "untyped": set(),
    "saved_files": set(),
    "sealed_lines": set(),
    "sealed_files": set(),
    "appended_files": set(),
    "exits": set(),
    "turns": set(),
    "options": {"agent"},
    "agent": set(),
    "envs": {"agent"},
    "runtime": set(),
    "scheme": {"runtime", "agent"},
    "learner": {"scheme", "agent"},
    "cli": {"learner", "agent"},
    "package": {"learner", "scheme", "agent"},
}
# Modules that belong to the layer of `learner.py` and may use ready-made environments.
LEARNER_LAYER = {"learner", "checkpoints", "interrupts", "reporting", "run_directory", "composition", "scheme_options",
                 "recipes", "descriptions", "background",
                 "training", "presets", "video", "plotting", "profiling", "targets", "evaluations", "run_files",
                 "measurements", "work_shares", "configuration", "option_text", "analysis", "time_shares", "monitor",
                 "callbacks", "learner_options", "acting", "export", "offline"}


def layer_of(module):
    if module == "pytorchrl.agent.options":
        return "options"
    name = [*module.split("."), ""][1]
    if name in LEARNER_LAYER:
        return "learner"
    return {"": "package", "__main__": "cli", "__init__": "package"}.get(name, name)


def imports_of(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "pytorchrl")


@reads_source
def test_layers_import_only_allowed_layers():
    wrong = []
    for path in MODULES:
        own = layer_of(name_of(path))
        allowed = ALLOWED[own] | {own, *EVERYWHERE} | ({"envs"} if own == "learner" else set())
        for module in imports_of(path):
            is_version = module in ("pytorchrl", "pytorchrl.__version__")
            if module.split(".")[0] == "pytorchrl" and not is_version and layer_of(module) not in allowed:
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


@reads_source
def test_only_the_ray_runtime_imports_ray():
    importers = {name_of(path) for path in MODULES if any(m.split(".")[0] == "ray" for m in imports_of(path))}
    assert importers == {"pytorchrl.runtime.ray_runtime"}


def test_public_names_are_sorted_unique_and_available():
    names = pytorchrl.__all__
    assert names == sorted(set(names), key=str.lower)
    assert 18 <= len(names) <= 40
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


def test_importing_everything_loads_only_what_training_needs(run_python):
    """Check that importing everything loads no optional package, and no module of torch that `import torch` does not.

    Such modules, for example `torch._dynamo`, take seconds. `benchmarks/start.py` measures times.
    """
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import pytorchrl, pytorchrl.analysis, pytorchrl.cli.compare, pytorchrl.cli.train\n"
        "for name in pytorchrl.__all__: getattr(pytorchrl, name)\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)\n")
    result = run_python("-c", script)
    assert result.returncode == 0, result.stderr
    loaded = {name for name in result.stdout.split() if "cython" not in name}
    assert loaded == {"pytorchrl", "gymnasium", "numpy", "cloudpickle", "farama_notifications"}


def test_every_module_imports_by_itself():
    for path in MODULES:
        if path.name != "__main__.py":
            importlib.import_module(name_of(path))
