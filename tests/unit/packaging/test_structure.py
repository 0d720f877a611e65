"""Tests of the structure of the source: import cycles, sizes, annotations and docstrings.

The lists of exceptions may only shrink.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import importlib
import itertools
import re
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from tests.conftest import ROOT
from tests.unit.packaging.project import tomllib
from tests.unit.packaging.source import MODULES, PACKAGE, name_of, nodes_of, reads_source

pytestmark = reads_source
FOLDERS_OF_CODE = ("pytorchrl", "tests", "benchmarks", "examples", "docs")

LONGEST_FILE, LONGEST_FUNCTION, LONGEST_LINE, SHORT_FILE = 700, 60, 120, 60
# Shorter modules that only one other module imports -> why they are modules of their own.
SHORT_MODULES = {
    "pytorchrl.agent.algorithms.impala": "each algorithm has a module, in which a reader finds its whole loss",
    "pytorchrl.agent.storages.vtrace": "each public storage has a module",
}
# This storage accepts the arguments of every storage and ignores them.
UNTYPED_KEYWORDS = {"pytorchrl.scheme.replay.rollouts.__init__"}
# The allowed number of annotations that contain `Any` or a name of `pytorchrl.support.untyped`.
MOST_ANY = 275


NAMES = {name_of(path) for path in MODULES}
PACKAGES = {name_of(path) for path in MODULES if path.name == "__init__.py"}


def imports_of(path):
    """Return the package's modules that a module imports anywhere, including imports that only type checkers see.

    `pytorchrl.__version__` does not count as an import.
    """
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names if (node.module,
                                                                              alias.name) != ("pytorchrl",
                                                                                              "__version__")]
            found |= {name if name in NAMES else node.module for name in full}
    return found & NAMES


@functools.cache
def graph_of_modules():
    """Return module -> other modules of the package that the module imports, both by their dotted names."""
    return {name_of(path): imports_of(path) - {name_of(path)} for path in MODULES}


def cycles_of(graph):
    """Return the strongly connected components with more than one node, found by Tarjan's algorithm; each is sorted."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            position = stack.index(node)
            component = stack[position:]
            del stack[position:]
            if len(component) > 1:
                found.append(sorted(component))
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def graph_of_folders(parent):
    """Return a map from each direct subfolder of a package to the other direct subfolders that it imports."""
    def folder_of(module):
        if not module.startswith(f"{parent}."):
            return None
        child = ".".join(module.split(".")[:parent.count(".") + 2])
        return child if child in PACKAGES else None
    graph = {}
    for module, imported in graph_of_modules().items():
        if own := folder_of(module):
            graph.setdefault(own, set()).update(other for other in map(folder_of, imported) if other not in (None, own))
    return graph


@pytest.mark.parametrize(("graph", "cycles"), [
    ({"a": {"b"}, "b": {"c"}, "c": set()}, []), ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
    ({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"d"}}, [["b", "c"], ["d", "e"]]),
    ({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"b"}}, [["a", "b", "c", "d"]])])
def test_import_cycles_are_found(graph, cycles):
    assert cycles_of(graph) == cycles


def test_no_modules_import_each_other():
    assert cycles_of(graph_of_modules()) == []


def test_no_folders_import_each_other():
    assert [cycle for parent in sorted(PACKAGES) for cycle in cycles_of(graph_of_folders(parent))] == []


def test_no_file_is_long():
    long = [path.relative_to(ROOT).as_posix() for folder in FOLDERS_OF_CODE for path in (ROOT / folder).rglob("*.py")
            if "_build" not in path.parts and len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE]
    assert long == []


def test_no_function_of_the_package_is_long():
    """Check the lengths of functions with their docstrings."""
    lengths = {f"{name_of(path)}.{node.name}": node.end_lineno - node.lineno + 1 for path in MODULES
               for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert len(lengths) > 1000
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_short_modules_with_one_importer_have_a_reason():
    importers = Counter(other for imported in graph_of_modules().values() for other in imported)
    short = {name_of(path) for path in MODULES if path.stem not in ("__init__", "__main__")
             and len(path.read_text(encoding="utf-8").splitlines()) < SHORT_FILE}
    assert {name for name in short if importers[name] == 1} == set(SHORT_MODULES), "move the code to its only user"


def test_no_line_is_long():
    """Check that no setting or comment exempts a file or a line from the maximum line length."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    lint = settings["lint"]
    ignored = [lint["ignore"], *lint["per-file-ignores"].values(), *lint.get("extend-per-file-ignores", {}).values()]
    assert settings["line-length"] == LONGEST_LINE
    assert not [rule for rules in ignored for rule in rules if "E501".startswith(rule)]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "--select", "E501",
               "--line-length", str(LONGEST_LINE), "--output-format", "concise", "--exclude", "docs/_build",
               *FOLDERS_OF_CODE, "setup.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not [line for line in result.stdout.splitlines() if " E501 " in line]
    assert result.returncode == 0, result.stderr


def annotations_of(path):
    """Yield the annotations of a module's parameters, return values and variables."""
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            of = node.args
            arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]
            yield from (argument.annotation for argument in arguments if argument.annotation is not None)
            if node.returns is not None:
                yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def untyped():
    """Return the names that `untyped.py` defines."""
    module, *_ = nodes_of(PACKAGE / "support" / "untyped.py")
    return {node.target.id for node in module.body if isinstance(node, ast.AnnAssign)}


def untyped_annotations(names):
    """Yield (path, line) for each annotation that uses one of `names`, except in `untyped.py`."""
    for path in MODULES:
        if path.name != "untyped.py":
            yield from ((path, node.lineno) for annotation in annotations_of(path) for node in ast.walk(annotation)
                        if isinstance(node, ast.Name) and node.id in names)


def test_any_is_rare_in_annotations():
    count = len(list(untyped_annotations({"Any", *untyped()})))
    assert count <= MOST_ANY, "use a more specific type: object, a Protocol, a TypeVar, a union"


def test_only_one_module_uses_any():
    """Check that `untyped.py` alone imports `Any`, and that other modules use no `typing.Any`.

    The names of `untyped.py` state why a type is unknown.
    """
    imports = [name_of(path) for path in MODULES for node in nodes_of(path)
               if isinstance(node, ast.ImportFrom) and any(alias.name == "Any" for alias in node.names)]
    assert imports == ["pytorchrl.support.untyped"]
    assert [name_of(path) for path in MODULES for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and node.attr == "Any"] == []


# Modules that raise built-in errors -> why the errors do not derive from `PyTorchRLError`; see docs/api/errors.md.
CAUGHT = "the package itself catches the error, and reports or converts it"
BUILTIN_ERRORS = {
    "pytorchrl": "an unknown name of a module", "pytorchrl.agent.env": "an unknown name of a module",
    "pytorchrl.agent.multi": "an unknown name of a module", "pytorchrl.envs": "an unknown name of a module",
    "pytorchrl.agent.multi.algorithm": "an unknown attribute",
    "pytorchrl.agent.actors.distributions": "an abstract method", "pytorchrl.agent.actors.memory": "an abstract method",
    "pytorchrl.agent.actors.memory_kernels": "an abstract method",
    "pytorchrl.support.display": "an abstract method", "pytorchrl.support.threads": "an abstract method",
    "pytorchrl.agent.actors.extractors": "an index that is out of range, as in `torch.nn.Embedding`",
    "pytorchrl.agent.env.deadlines": f"{CAUGHT}; an object that cannot be pickled",
    "pytorchrl.learner.learner": f"{CAUGHT}; an object that cannot be pickled",
    "pytorchrl.envs.testing": "an environment with deliberate faults",
    "pytorchrl.cli": "an exit", "pytorchrl.cli.train": "an exit", "pytorchrl.support.signals": "an exit, or Ctrl-C",
    "pytorchrl.files.atomic": f"{CAUGHT}; a file that cannot be written",
    "pytorchrl.files.lines": f"{CAUGHT}; a file that cannot be written",
    "pytorchrl.files.tensors": f"{CAUGHT}; a file that cannot be written",
    "pytorchrl.files.run_directory": f"{CAUGHT}; a point that is never reached",
    "pytorchrl.runtime.simulated": "a queue with the errors of `queue.Queue`",
    "pytorchrl.scheme.transport.codecs": "a message that was damaged on its way, as in zstandard",
    **dict.fromkeys((
        "pytorchrl.agent.algorithms.optimizers", "pytorchrl.agent.option_values.descriptions",
        "pytorchrl.agent.option_values.text", "pytorchrl.agent.seeding", "pytorchrl.agent.storages.observation_columns",
        "pytorchrl.agent.storages.ring", "pytorchrl.callbacks.time_limit", "pytorchrl.learner.files",
        "pytorchrl.agent.dataset", "pytorchrl.files.reading", "pytorchrl.runtime.collective",
        "pytorchrl.scheme.recording.record", "pytorchrl.scheme.updates.lags"), CAUGHT),
}


def raises_builtin(node):
    """Return whether a node is a `raise` statement that names a built-in exception."""
    error = node.exc if isinstance(node, ast.Raise) else None
    error = error.func if isinstance(error, ast.Call) else error
    return isinstance(error, ast.Name) and isinstance(getattr(builtins, error.id, None), type)


def test_only_listed_modules_raise_builtin_errors():
    found = [name_of(path) for path in MODULES if any(map(raises_builtin, nodes_of(path)))]
    assert sorted(found) == sorted(BUILTIN_ERRORS)


def test_no_docstring_begins_with_a_headless_clause():
    found = [f"{name_of(path)}: {doc.splitlines()[0]}" for path in MODULES for node in nodes_of(path)
             if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node))
             and re.match(r"(What|Whose|Who|Those|How)\b", doc)]
    assert found == []


def sections_of_arguments():
    """Yield (place, names in the section "Args" of the docstring, names of the parameters) of functions and classes."""
    for path in MODULES:
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            section = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{ast.get_docstring(node)}\n", re.MULTILINE)
            own = [node] if isinstance(node, ast.FunctionDef) else [
                function for function in node.body if getattr(function, "name", None) == "__init__"]
            if section is None or not own:
                continue
            entries = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1], re.MULTILINE)
            of = own[0].args
            named = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]
            described = {name.lstrip("*") for entry in entries for name in entry.split(", ")}
            yield f"{name_of(path)}.{node.name}", described, {argument.arg for argument in named} - {"self", "cls"}


def test_docstrings_describe_the_parameters_that_exist():
    found = list(sections_of_arguments())
    assert len(found) > 400
    assert [place for place, described, taken in found if described != taken] == []


def unstated_raises():
    """Yield (place, exception) of public functions with a statement that raises an exception not in the docstring."""
    for path in MODULES:
        for node in nodes_of(path):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text is None or node.name.startswith("_"):
                continue
            for raised in (inner for inner in ast.walk(node) if isinstance(inner, ast.Raise)):
                name = ast.unparse(raised.exc.func).rpartition(".")[2] if isinstance(raised.exc, ast.Call) else ""
                if name.endswith(("Error", "Exit", "Interrupt")) and name[0].isupper() and name not in text:
                    yield f"{name_of(path)}.{node.name}", name


def test_public_functions_state_the_exceptions_that_they_raise():
    caught = {  # by the functions themselves
        ("pytorchrl.learner.learner.checkpoint_within", "TimeoutError"),
        ("pytorchrl.files.reading.read_checked", "ValueError"),
    }
    assert set(unstated_raises()) == caught


def test_examples_in_docstrings_give_the_results_shown():
    modules = [name_of(path) for path in MODULES if ">>> " in path.read_text(encoding="utf-8")]
    results = [doctest.testmod(importlib.import_module(name)) for name in modules]
    assert sum(result.attempted for result in results) >= 6
    assert sum(result.failed for result in results) == 0


def test_no_public_type_has_the_name_of_another():
    """Check that each name of a public class or type alias, at the top level of a module, occurs in one module only."""
    homes = defaultdict(list)
    for path in MODULES:
        for node in nodes_of(path)[0].body:
            names = [node.name] if isinstance(node, ast.ClassDef) else [
                target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            for name in names:
                if re.fullmatch(r"[A-Z][a-z]\w*", name):  # not a constant or a type variable such as `T`
                    homes[name].append(name_of(path))
    assert len(homes) > 300
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def constructors():
    """Yield (qualified name, number of parameters) of every constructor that is defined explicitly."""
    for path in MODULES:
        for node in nodes_of(path):
            for function in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    of = function.args
                    yield f"{name_of(path)}.{node.name}", len([*of.posonlyargs, *of.args, *of.kwonlyargs]) - 1


def test_constructors_take_no_more_than_ten_parameters():
    found = dict(constructors())
    assert len(found) > 100
    assert {name: count for name, count in found.items() if count > 10} == {}


def test_no_parameter_takes_any_keyword_in_the_scheme():
    """Check that no function of the scheme has `**options: Any`; keywords must be declared with their types."""
    found = {f"{name_of(path)}.{node.name}" for path in MODULES
             if "scheme" in path.parts for node in nodes_of(path)
             if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None
             and (node.args.kwarg.annotation is None or ast.unparse(node.args.kwarg.annotation) in ("Any", "object"))}
    assert found == UNTYPED_KEYWORDS


# Types of option values that need an encoding, and collections that may contain them.
ENCODED = {"Enum", "Communication", "Execution", "PathLike", "Path", "Schedule", "Computed", "partial", "generic"}
COLLECTIONS = {"Mapping", "MappingProxyType", "dict", "tuple", "set", "frozenset"}


def names_in(node):
    return {part.attr if isinstance(part, ast.Attribute) else part.id for part in ast.walk(node)
            if isinstance(part, (ast.Attribute, ast.Name))}


def encodes_values(function):
    """Return whether a function looks like an encoder of option values.

    An encoder tells collections apart from paths, enums or schedules by `isinstance`, or writes the `repr` of an enum's
    value.
    """
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    tested = {name for node in calls if node.func.id == "isinstance" for name in names_in(node.args[1])}
    written = [node.args[0] for node in calls if node.func.id == "repr"]
    return bool(tested & ENCODED and tested & COLLECTIONS) or any(
        (isinstance(value, ast.Call) and names_in(value.func) == {"str"})
        or (isinstance(value, ast.Attribute) and value.attr == "value") for value in written)


def test_only_one_package_encodes_values_of_options():
    """Check that values of options become text or JSON only in `agent.option_values`."""
    home = PACKAGE / "agent" / "option_values"
    found = {f"{name_of(path)}.{node.name}" for path in MODULES for node in nodes_of(path)
             if isinstance(node, ast.FunctionDef) and encodes_values(node)}
    own = {name for name in found if name.startswith(f"{name_of(home / '__init__.py')}.")}
    assert {name.rpartition(".")[2] for name in own} == {"to_text", "to_python", "to_json"}
    assert found - own == set()


# Modules whose deques without a `maxlen` belong to one thread or are used under their owner's lock.
DEQUES_OF_ONE_THREAD = {
    "agent/env/restarts.py", "agent/multi/replay.py", "agent/storages/hindsight.py",
    "agent/storages/rollout_sequences.py", "agent/storages/sequences.py", "learner/reporting.py",
    "scheme/gradients/staging.py", "scheme/replay/inserter.py", "scheme/replay/rollouts.py",
    "scheme/supervision/supervisor.py", "scheme/updates/asynchronous.py", "scheme/updates/times.py"}


def modules_that_make(names):
    """Return the modules that call or inherit from one of `names`; a `deque` counts only without a `maxlen`."""
    found = set()
    for path in MODULES:
        for node in nodes_of(path):
            made = [node.func] if isinstance(node, ast.Call) and "maxlen" not in {word.arg for word in node.keywords} \
                else node.bases if isinstance(node, ast.ClassDef) else []
            if names & {getattr(place, "attr", getattr(place, "id", None)) for place in made}:
                found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_every_module_that_creates_threads_or_queues_is_listed():
    page = (ROOT / "docs" / "developer" / "threads.md").read_text(encoding="utf-8")
    makers = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadingHTTPServer", "Background", "Queue", "SimpleQueue",
              "make_queue"}
    found, deques = modules_that_make(makers), modules_that_make({"deque"})
    assert len(found) > 10
    assert deques > DEQUES_OF_ONE_THREAD
    assert [module for module in sorted(found | deques - DEQUES_OF_ONE_THREAD) if f"`{module}`" not in page] == []


def test_every_lock_states_what_it_guards():
    """Check that a comment, in the line of each new lock or directly above, says what the lock guards."""
    found, silent = 0, []
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("Lock", "RLock", "Condition",
                                                                                   "Semaphore"):
                found += 1
                above = list(itertools.takewhile(lambda line: line.strip().startswith("#"),
                                                 reversed(lines[:node.lineno - 1])))
                if not any("# guards " in line for line in (lines[node.lineno - 1], *above)):
                    silent.append(f"{name_of(path)}:{node.lineno}")
    assert found >= 20
    assert silent == []
