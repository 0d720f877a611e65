"""Each default of an option has one home: the `Options` class that declares the option.

Functions, fields of data classes, and calls of `get` and `getattr` refer to that default, as in
`vec_env_size: int = Options.vec_env_size`, or require a value. The tables of exceptions may only shrink.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections import defaultdict

import pytest

from pytorchrl.agent.options import Options
from tests.unit.packaging.source import MODULES, name_of, nodes_of, reads_source

pytestmark = reads_source
# Parameter of a function -> why a default that equals the default of an option of the same name is not a second home.
OTHER_PARAMETERS = {
    "num_epochs": "how often one call of generate_batches passes over the data, which storages know nothing more about",
    "num_mini_batch": "a size of the agents that count, which only tests and benchmarks build",
    "learning_starts": "a size of the agents that count, which only tests and benchmarks build",
    "hidden_sizes": "an extractor that users build by hand has sizes of its own",
    "activation": "an extractor that users build by hand has an activation of its own",
    "dueling": "whether a network has a part; off-policy actors have no such option",
    "noisy": "whether a network has a part; off-policy actors have no such option",
    "overwrite": "permission for a single call to replace files",
    "resume": "permission for a single call to use files",
    "num_threads": "threads of a native vector environment, which workers receive and pass on",
    "distribute_gradients": "what a single call of a gradient worker is to do",
}
# Option -> why several classes write the same default of it.
COINCIDENCES = {
    "lr": "learning rate of an algorithm's own paper, beside its loss",
    "lr_pi": "learning rate of an algorithm's own paper, beside its loss",
    "lr_q": "learning rate of an algorithm's own paper, beside its loss",
    "max_grad_norm": "limit of an algorithm's own paper, beside its loss",
    "polyak": "DQN and MPO copy their networks to the targets, each at its own interval",
    "n_step": "replay of sequences and replay of rollouts count the steps of a return differently",
}


def options_classes():
    """Return all classes of options of the package; modules that declare none are not imported."""
    for path in MODULES:
        if "option(" in path.read_text(encoding="utf-8"):
            importlib.import_module(name_of(path))
    found, waiting = set(), [Options]
    while waiting:
        found |= set(new := [cls for cls in waiting.pop().__subclasses__() if cls.__module__.startswith("pytorchrl.")])
        waiting += new
    return found


def own_defaults(cls):
    """Return the defaults that a class itself declares, by name; a factory of defaults is called."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return {name: default for name in vars(cls).get("__annotations__", {}) if name in fields
            and (default := cls.declarations()[name].default) is not dataclasses.MISSING}


def literal_defaults(function):
    """Return the pairs (parameter, text) of those defaults of a function that are written as literals."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[len(positional) - len(arguments.defaults):], arguments.defaults, strict=True),
             *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(parameter.arg, ast.unparse(default)) for parameter, default in pairs
            if isinstance(default, (ast.Constant, ast.Tuple))]


def literal_fields(cls):
    """Return the pairs (field, text) of those defaults of a data class that are written as literals."""
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return []
    return [(node.target.id, ast.unparse(node.value)) for node in cls.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, (ast.Constant, ast.Tuple))]


def literal_fallback(call):
    """Return the pair (name, text) of a call such as `getattr(x, "name", 1)` or `x.get("name", 1)`."""
    last = call.args[-2:]
    is_lookup = ast.unparse(call.func) == "getattr" if len(call.args) == 3 else (
        len(call.args) == 2 and isinstance(call.func, ast.Attribute) and call.func.attr in ("get", "pop", "setdefault"))
    if is_lookup and isinstance(last[0], ast.Constant) and isinstance(last[1], (ast.Constant, ast.Tuple)):
        return [(last[0].value, ast.unparse(last[1]))]
    return []


READERS = {ast.FunctionDef: literal_defaults, ast.ClassDef: literal_fields, ast.Call: literal_fallback}


def second_homes(nodes, declared):
    """Return the literal defaults in pairs (module, node) that repeat the default of an option with the same name."""
    return sorted({f"{where}: {name}={value}" for where, node in nodes if type(node) in READERS
                   for name, value in READERS[type(node)](node) if value in declared.get(name, ())
                   and not (isinstance(node, ast.FunctionDef) and name in OTHER_PARAMETERS)})


def all_declared():
    """Return option -> its defaults as text; None, which means "not given", is left out."""
    declared = defaultdict(set)
    for cls in options_classes():
        for name, default in own_defaults(cls).items():
            if default is not None:
                declared[name].add(repr(getattr(default, "value", default)))  # an enum is given as a string
    return declared


def test_nothing_repeats_the_default_of_an_option():
    nodes = [(name_of(path), node) for path in MODULES for node in nodes_of(path)]
    assert second_homes(nodes, all_declared()) == []


@pytest.mark.parametrize(("code", "pairs"), [
    ("def f(a, size=8, *, mode='x', other=Options.other, flag=None): ...",
     [("size", "8"), ("mode", "'x'"), ("flag", "None")]),
    ("@dataclass(frozen=True)\nclass A:\n    size: int = 8\n    mode: str = Options.mode\n    flag: int",
     [("size", "8")]),
    ("class A:\n    size: int = 8", []),
    ("getattr(options, 'size', 8)", [("size", "8")]), ("getattr(options, 'size', Options.size)", []),
    ("options.get('size', 8)", [("size", "8")]), ("options.pop('size', 8)", [("size", "8")]),
    ("options.setdefault('size', 8)", [("size", "8")]), ("options.get('size')", []), ("options.put('size', 8)", [])])
def test_a_repeated_default_is_found(code, pairs):
    statement = ast.parse(code).body[0]
    node = getattr(statement, "value", statement)
    assert READERS[type(node)](node) == pairs
    declared = {"size": {"8"}, "mode": {"'y'"}, "flag": set()}
    assert second_homes([("f", node)], declared) == (["f: size=8"] if pairs else [])


def test_no_class_declares_an_inherited_option_again_with_the_same_default():
    again = [f"{cls.__qualname__}.{name}" for cls in options_classes() for name, default in own_defaults(cls).items()
             for base in cls.__bases__ if issubclass(base, Options) and name in base.declarations()
             and base.declarations()[name].default == default]
    assert again == []


def referring(cls):
    """Return the names of the options whose default is the default of another class, as in `option(Other.size)`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
            and node.value.args and isinstance(node.value.args[0], ast.Attribute)}


def test_no_two_classes_write_the_same_default_of_an_option():
    """Check that a default that is not None is written once; other classes with the same default refer to it."""
    homes = defaultdict(list)
    for cls in options_classes():
        for name, default in own_defaults(cls).items():
            if default is not None and name not in referring(cls):
                homes[name, repr(default)].append(cls)
    twice = {name: sorted(cls.__qualname__ for cls in found) for (name, _), found in homes.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in COINCIDENCES} == {}
    assert set(COINCIDENCES) <= set(twice), "a row of COINCIDENCES is no longer needed"
