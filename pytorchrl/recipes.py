"""Write the options of an agent into `run.json`, and read them back without importing anything that they name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import Registration, imported_registration, registration_of
from pytorchrl.agent.schedules import Schedule, schedule_of
from pytorchrl.agent.seeding import check_seed
from pytorchrl.composition import option_specs
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.run_directory import RUN_FILE, no_run
from pytorchrl.untyped import Json

_CODE = "__code__"
"""Key that marks an option in `run.json` as code; its value is `module:qualname`, or the `repr` of unnamed code."""
_ACTING = ("noise_std",)
"""Algorithm options that affect acting. `load` ignores all other algorithm options whose values are code."""


@dataclass(frozen=True)
class Recipe:
    """The arguments with which `compose` builds the agent of a saved run, and the run's seed."""

    algorithm: type[Algorithm]
    env: str
    options: Mapping[str, object]
    seed: int


def describe(registration: Registration, env: object, options: Mapping[str, object]) -> dict[str, object]:
    """Return the recipe of an agent as JSON; an empty recipe if JSON cannot describe its environment or options."""
    # An option that is neither a plain value nor code, such as an open file, cannot be described.
    recorded = {name: _to_json(value) for name, value in options.items()}
    if isinstance(env, str) and _is_plain(recorded):
        return {"algorithm": registration.reference, "env": env, "options": recorded}
    return {}


def read(run_dir: Path, algorithm: str | type[Algorithm] | None = None) -> Recipe:
    """Read the recipe of a run.

    Args:
        run_dir: Directory of the run.
        algorithm: The algorithm of the run; None: the algorithm in `run.json`, if this process has imported it.

    Raises:
        ConfigError: `algorithm` is not an algorithm.
        CheckpointError: The directory contains no run, the run's file is damaged, or the run's agent was composed by
            hand in Python or uses classes that this process has not imported.
    """
    given = None if algorithm is None else registration_of(algorithm)
    path = run_dir / RUN_FILE
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        recipe, seed = run["recipe"], check_seed(run["seed"])
    except FileNotFoundError:
        raise CheckpointError(no_run(run_dir, RUN_FILE)) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe a run: {error!r}") from error
    if not recipe:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was composed in Python and cannot be built from its files; "
            "build the same actor with checkpoint=<its model.pt>")
    try:
        registration = given or imported_registration(recipe["algorithm"])
        if registration is None:
            raise CheckpointError(_not_imported(run_dir, recipe["algorithm"]))
        options = _options_of(run_dir, registration.algorithm, recipe["options"])
        return Recipe(registration.algorithm, str(recipe["env"]), options, seed)
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe an agent of this version: {error}") from error


def _not_imported(run_dir: Path, reference: str) -> str:
    module, _, name = reference.partition(":")
    return (f"the run in {str(run_dir)!r} uses the algorithm {reference!r}, which this process has not imported; "
            f"load never imports code that a run's files name, so import {name} from {module} before calling load, or "
            f"pass it: load(..., algorithm={reference!r}), `pytorchrl enjoy ... --algorithm {reference}`")


def _options_of(run_dir: Path, algorithm: type[Algorithm], recorded: Mapping[str, object]) -> dict[str, object]:
    """Return the recorded options as arguments of `compose`, leaving out code that loading does not need."""
    specs = option_specs(algorithm)
    code = {name: value for name, value in recorded.items() if has_code(value)}
    if needed := [name for name in code if name not in specs or specs[name].part != "algorithm" or name in _ACTING]:
        raise CheckpointError(
            f"the run in {str(run_dir)!r} was composed in Python with code that load does not import: "
            f"{', '.join(f'{name}={json.dumps(code[name])}' for name in needed)}; build the same actor with "
            f"checkpoint=<its model.pt>")
    plain = {name: value for name, value in recorded.items() if name not in code}
    if unknown := [name for name in plain if name not in specs]:
        raise ConfigError(f"it has the unknown option {unknown[0]!r}")
    return {name: from_json(value) for name, value in plain.items()}


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _to_json(value: object) -> object:
    """Return an option in the form that JSON stores; `from_json` is the inverse."""
    if isinstance(value, Schedule):
        return {"schedule": value.parts()}
    if isinstance(value, (tuple, list)):
        return [_to_json(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not callable(value):
        return value
    # Instances, for example of functools.partial, have no name, and methods of built-in types have no module.
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return {_CODE: f"{module}:{name}" if module and name else repr(value)}


def has_code(value: object) -> bool:
    """Return whether an option in `run.json` is marked as code, or is a list with such an item."""
    return any(map(has_code, value)) if isinstance(value, list) else isinstance(value, dict) and set(value) == {_CODE}


def from_json(value: Json) -> object:
    """Return an option from the form that JSON stores."""
    if isinstance(value, dict) and set(value) == {"schedule"}:
        return schedule_of(value["schedule"])
    return tuple(value) if isinstance(value, list) else value
