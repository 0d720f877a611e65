"""Describe the values of options, including factories, as JSON, and build them again from their descriptions.

Numbers, strings, booleans, lists and mappings are their own descriptions. Any other value is described by an object:

| value | description |
|---|---|
| a factory | `{"__factory__": "module:Class", "options": {name: value, ...}}` |
| a schedule | `{"schedule": [name, number, ...]}` |
| a class or function | `{"__code__": "module:qualname"}` |
| a `Code` | `"module:qualname"`, or, with arguments, `{"call": "module:qualname", name: argument, ...}` |
| a `functools.partial` | `{"__partial__": [function, [argument, ...], {name: argument, ...}]}` |
| a space of the environments | `{"__space__": ["observation_space"]}` or `["observation_space", policy]` |
| a tuple in a mapping | `{"__tuple__": [item, ...]}`; a tuple anywhere else is described by a list |
| a mapping with keys that are not strings | `{"__mapping__": [[key, value], ...]}` |
| a number that is not finite | `{"__float__": "inf"}` |
| anything else | `{"__other__": repr}`, from which no value can be built |
"""

from __future__ import annotations

import enum
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from pytorchrl.agent.algorithms.registry import subclasses
from pytorchrl.agent.env.tokens import TokenTask
from pytorchrl.agent.env.vec_env import EnvFactory
from pytorchrl.agent.options import Factory, Part, build_options
from pytorchrl.agent.schedules import Computed, Schedule, schedule_of
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.support.code import CALL, IF_TRUSTED, Code, Trust, find_code, is_reference
from pytorchrl.support.untyped import Json, UserPart

Find = Callable[[str], object]
"""A function that finds a class or function by its reference: `find_imported` or `find_by_import`."""
Spaces = Mapping[str, object]
"""The spaces of the training environments, under the keys "observation_space" and "action_space"."""

FACTORY, FLOAT = "__factory__", "__float__"
_CODE, _SCHEDULE, _PARTIAL, _SPACE, _TUPLE, _MAPPING, _OTHER = (
    "__code__", "schedule", "__partial__", "__space__", "__tuple__", "__mapping__", "__other__")
_SPECIAL = (_CODE, _SCHEDULE, _PARTIAL, _SPACE, _TUPLE, _MAPPING, FLOAT, _OTHER)
_OWN = "pytorchrl"  # the package whose modules may always be imported
_LONGEST = 80  # characters of a text that an error shows
KINDS: tuple[type, ...] = (
    Part, torch.nn.Module, torch.optim.Optimizer, gym.Env, gym.Wrapper, gym.vector.VectorEnv, TokenTask)
"""The base classes of the code that a file may name without trust."""
# Module of the callbacks, and names of the wrappers, that a file may give arguments without trust: they neither write
# other files nor open windows.
_HARMLESS_CALLBACKS = "pytorchrl.callbacks.shipped"
_HARMLESS_WRAPPERS = frozenset((
    "AddWhiteNoise", "AtariPreprocessing", "ClipAction", "ClipReward", "DelayObservation", "DiscretizeAction",
    "DiscretizeObservation", "DtypeObservation", "FilterObservation", "FlattenObservation", "FrameStackObservation",
    "GrayscaleObservation", "MaxAndSkipObservation", "NormalizeObservation", "NormalizeReward", "ObstructView",
    "RepeatAction", "RescaleAction", "RescaleObservation", "ReshapeObservation", "ResizeObservation", "StickyAction",
    "TimeAwareObservation", "TimeLimit"))


def to_json(
    value: object, spaces: Spaces | None = None, *, keep_tuples: bool = True, is_inside: bool = False,
) -> object:
    """Return the description of a value. `from_json` is the inverse.

    Args:
        value: A value of an option, or a factory.
        spaces: Spaces that are described by their names; None: no spaces.
        keep_tuples: Whether tuples in mappings are described as tuples. Otherwise, they are described as lists, like
            all other tuples, because options accept lists in place of tuples.
        is_inside: Whether the value itself is part of a mapping.
    """
    described = functools.partial(to_json, spaces=spaces, keep_tuples=keep_tuples)
    if isinstance(value, Factory):
        options = {name: getattr(value.options, name) for name in value.options.declarations()}
        return {FACTORY: reference(value.cls), "options": {name: described(item) for name, item in options.items()}}
    if spaces is not None and (place := _place(value, spaces)):
        return {_SPACE: place}
    value = _simple(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return {FLOAT: str(value)} if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Code):
        arguments = {name: described(item) for name, item in value.arguments.items()}
        return {CALL: value.reference, **arguments} if arguments else value.reference
    if isinstance(value, Schedule):
        return {_SCHEDULE: value.parts()}
    if isinstance(value, (tuple, list)):
        items = [described(item, is_inside=is_inside) for item in value]
        return {_TUPLE: items} if keep_tuples and is_inside and isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _mapping(value, functools.partial(described, is_inside=True))
    if isinstance(value, functools.partial):
        return {_PARTIAL: [described(value.func), described(value.args, is_inside=is_inside),
                           described(value.keywords)]}
    named = reference(value) if callable(value) else ""
    return {_CODE: named} if named else {_OTHER: repr(value)}


def _mapping(value: Mapping[object, object], described: Callable[[object], object]) -> object:
    entries = {key: described(item) for key, item in value.items()}
    if all(isinstance(key, str) for key in entries) and not _is_special(entries):
        return entries
    return {_MAPPING: [[to_json(key, is_inside=True), item] for key, item in entries.items()]}  # keys stay tuples


def _simple(value: object) -> object:
    """Return a simpler value that options accept in place of `value`, such as a string in place of a path."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.function if isinstance(value, Computed) else value


def _is_special(value: Mapping[object, object]) -> bool:
    """Return whether a mapping has a key that marks a description by `to_json`, for example of a schedule."""
    return FACTORY in value or (len(value) == 1 and next(iter(value)) in _SPECIAL)


def spaces_of(envs: EnvFactory) -> Spaces:
    """Return the spaces of environments, under the keys "observation_space" and "action_space"."""
    return {"observation_space": envs.observation_space, "action_space": envs.action_space}


def from_json(value: object, find: Find | None = None, spaces: Spaces | None = None, *, exact: bool = False) -> object:
    """Build a value from its description. `to_json` is the inverse.

    Args:
        value: The description.
        find: Function that finds a class or function by its reference; None means `find_imported`.
        spaces: Spaces to which the description may refer.
        exact: Whether lists stay lists. Otherwise, they become tuples. Lists in mappings always stay lists.

    Raises:
        CheckpointError: The code is not found, or no value can be built from the description.
        ConfigError: An option of a factory is unknown or not allowed.
    """
    if isinstance(value, list):
        items = [from_json(item, find, spaces, exact=exact) for item in value]
        return items if exact else tuple(items)
    if not isinstance(value, dict):
        return value
    if FACTORY in value:
        return factory_from_json(value, find, spaces)
    if _is_special(value):
        (key, content), = value.items()
        return _special(key, content, find, spaces)
    return {key: from_json(item, find, spaces, exact=True) for key, item in value.items()}


def _special(key: str, content: object, find: Find | None, spaces: Spaces | None) -> object:
    if key == _CODE:
        return (find or find_imported)(str(content))
    if key == FLOAT:
        return float(str(content))
    if not isinstance(content, list):
        text = " ".join(str(content).split())  # the text of a table, for example, has many lines
        raise CheckpointError(
            f"no value can be built from {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}; when you train, "
            "give code that builds the value, such as a function as the environment, in place of the value")
    if key == _SCHEDULE:
        return schedule_of(content)
    if key == _SPACE:
        found: object = spaces
        for name in content:
            found = mapping(found)[str(name)]
        return found
    given: Json = [from_json(item, find, spaces, exact=True) for item in content]
    if key == _TUPLE:
        return tuple(given)
    if key == _MAPPING:
        return dict(given)
    function, arguments, named = given
    if find is not find_by_import:
        check_arguments(function)
    return functools.partial(function, *arguments, **named)


def factory_from_json(
    description: Mapping[str, object], find: Find | None = None, spaces: Spaces | None = None,
) -> Factory[UserPart]:
    """Build a factory from its description; see `from_json` for the arguments and errors."""
    cls = part_of(description, find)
    return Factory(cls, build_options(cls, options_of(description, find, spaces)))


def part_of(description: Mapping[str, object], find: Find | None = None) -> type:
    """Return the class to which the description of a factory refers; the class must be a part of an agent.

    Raises:
        CheckpointError: The class is not found, or is not a part of an agent.
    """
    found = (find or find_imported)(str(description[FACTORY]))
    if not (isinstance(found, type) and hasattr(found, "Options")):
        raise CheckpointError(f"{description[FACTORY]} is not a part of an agent")
    return found


def options_of(
    description: Mapping[str, object], find: Find | None = None, spaces: Spaces | None = None,
) -> dict[str, object]:
    """Return the options in a description of a factory; see `from_json` for the other arguments and the errors."""
    return {name: from_json(option, find, spaces) for name, option in mapping(description["options"]).items()}


def mapping(value: object) -> Mapping[str, object]:
    """Return `value`, an entry of a JSON file, if it is a mapping; otherwise, raise `TypeError`."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping, got {value!r:.100}")
    return value


def by_name(described: object) -> object:
    """Return a description in which classes, functions and partials are named like a `Code`, as a user would write it.

    Code that cannot be named, such as a lambda function, is described as before.
    """
    if isinstance(described, list):
        return list(map(by_name, described))
    if isinstance(described, dict) and is_reference(described.get(_CODE)):
        return described[_CODE]
    partial = described.get(_PARTIAL) if isinstance(described, dict) else None
    if isinstance(partial, list) and len(partial) == 3 and isinstance(partial[2], dict):
        function, arguments, named = partial
        if is_reference(found := by_name(function)) and not arguments and not code_in(named):
            return {CALL: found, **named}
    return described


def code_in(value: object) -> list[str]:
    """Return the values of the keys `__code__` and `__other__` in a description, at any depth.

    A value of `__code__` is a reference to code. A value of `__other__` is the `repr` of an object that cannot be
    built from the description.
    """
    if isinstance(value, list):
        return [text for item in value for text in code_in(item)]
    if isinstance(value, dict):
        own = [str(value[key]) for key in (_CODE, _OTHER) if key in value]
        return own + [text for item in value.values() for text in code_in(item)]
    return []


def reference(value: object) -> str:
    """Return `module:qualname` of a class or function; return an empty string for a value without a name.

    A class or function of the running script belongs to the module `__main__`. Its reference names the script's file
    instead, which another process in the same directory can import.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}:{name}"


def _place(value: object, spaces: Spaces) -> list[str]:
    """Return the keys under which `spaces` contains `value`; return an empty list if it does not contain `value`."""
    for name, space in spaces.items():
        if type(value) is type(space) and value == space:
            return [name]
        of_policies = space if isinstance(space, Mapping) else {}
        for policy, part in of_policies.items():
            if type(value) is type(part) and value == part:
                return [name, policy]
    return []


def find_part(reference: str, trust: Trust, *more: type) -> object:
    """Return the class or function that a file names.

    Unless everything is trusted, this is a class that derives from one of `KINDS` or `more`. Other code, such as
    `os.system`, would execute what the file passes to it.

    Raises:
        ConfigError: There is no such class, or its module must not be imported.
    """
    if trust is Trust.ALL:
        return find_code(reference, trust)
    kinds = (*KINDS, *more)
    found: object = next((cls for base in kinds for cls in subclasses(base) if reference in _references(cls)), None)
    module, _, name = reference.partition(":")
    if found is None and module in sys.modules:
        found = vars(sys.modules[module]).get(name)  # not `getattr`, which can execute code of the module
    elif found is None and (trust is Trust.INSTALLED or module.partition(".")[0] == _OWN):
        found = find_code(reference, Trust.INSTALLED)
    if isinstance(found, type) and issubclass(found, kinds):
        return found
    raise ConfigError(f"{reference} is a function, or a class that this process has not imported, or no part of an "
                      f"agent; {IF_TRUSTED}")


def check_arguments(cls: object) -> None:
    """Raise `CheckpointError` if a file must not give arguments to a class, which could write files with them."""
    module, name = getattr(cls, "__module__", ""), getattr(cls, "__name__", "")
    is_harmless = module == _HARMLESS_CALLBACKS or (
        module.startswith("gymnasium.wrappers.") and name in _HARMLESS_WRAPPERS)
    may_write = not (isinstance(cls, type) and issubclass(cls, KINDS)) or issubclass(cls, gym.Wrapper)
    if may_write and not is_harmless:
        raise CheckpointError(f"{reference(cls) or repr(cls)} with arguments of the file could write other files; "
                              f"{IF_TRUSTED}")


def find_imported(reference: str) -> object:
    """Return the imported class to which `reference` refers: a network, optimizer, environment, wrapper or agent part.

    Raises:
        CheckpointError: There is no such class.
    """
    return _found(reference, Trust.READ)


def find_by_import(reference: str) -> object:
    """Import the module of a class or function, which executes the module's code, and return the class or function.

    Raises:
        CheckpointError: The module cannot be imported, or has no such name.
    """
    return _found(reference, Trust.ALL)


def _found(reference: str, trust: Trust) -> object:
    try:
        return find_part(reference, trust)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _references(cls: type) -> tuple[str, str]:
    """Return two references to a class. For a class of the running script, they differ: `__main__:C` and `script:C`."""
    return f"{cls.__module__}:{cls.__qualname__}", reference(cls)
