"""Each default of an option has one home: the `Options` class that declares the option.

Functions refer to the default of a class, as in `vec_env_size: int = Options.vec_env_size`, or require the argument.
The tables of exceptions may only shrink.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections import defaultdict

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
# Option -> why several classes that do not inherit from each other declare it with the same default.
COINCIDENCES = {
    "lr_pi": "learning rate of an algorithm's own paper, beside its loss",
    "lr_q": "learning rate of an algorithm's own paper, beside its loss",
    "n_step": "replay of sequences and replay of rollouts count the steps of a return differently",
    "num_epochs": "a real algorithm, and one that only counts",
    "num_mini_batch": "a real algorithm, and one that only counts",
    "optimizer": "A2C, which is between the two classes, has another optimizer",
    "vec_env_size": "environments that only count refer to the default of `VecEnv`",
    "checkpoint": "a file with one policy, and one with all policies",
    "log_dir": "the run's folder, and the folder that environments receive from it",
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


def second_homes(functions, declared):
    """Return the literal defaults of functions that repeat the default of an option with the same name."""
    return sorted({f"{where}: {name}={value}" for where, function in functions
                   for name, value in literal_defaults(function) if name not in OTHER_PARAMETERS
                   and value in declared[name]})


def all_declared():
    """Return option -> its defaults as text; None, which means "not given", is left out."""
    declared = defaultdict(set)
    for cls in options_classes():
        for name, default in own_defaults(cls).items():
            if default is not None:
                declared[name].add(repr(getattr(default, "value", default)))  # an enum is given as a string
    return declared


def test_no_function_repeats_the_default_of_an_option():
    functions = [(name_of(path), node) for path in MODULES for node in nodes_of(path)
                 if isinstance(node, ast.FunctionDef)]
    assert second_homes(functions, all_declared()) == []


def test_a_repeated_default_is_found():
    function = ast.parse("def f(a, size=8, *, mode='x', other=Options.other, flag=None): ...").body[0]
    assert literal_defaults(function) == [("size", "8"), ("mode", "'x'"), ("flag", "None")]
    assert second_homes([("f", function)], {"size": {"8"}, "mode": {"'y'"}, "flag": set()}) == ["f: size=8"]


def test_no_class_declares_an_inherited_option_again_with_the_same_default():
    again = [f"{cls.__qualname__}.{name}" for cls in options_classes() for name, default in own_defaults(cls).items()
             for base in cls.__bases__ if issubclass(base, Options) and name in base.declarations()
             and base.declarations()[name].default == default]
    assert again == []


def test_no_two_classes_declare_an_option_with_the_same_default():
    homes = defaultdict(list)
    for cls in options_classes():
        for name, default in own_defaults(cls).items():
            homes[name, repr(default)].append(cls)
    twice = {name: sorted(cls.__qualname__ for cls in found) for (name, _), found in homes.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in COINCIDENCES} == {}
    assert set(COINCIDENCES) <= set(twice), "a row of COINCIDENCES is no longer needed"
