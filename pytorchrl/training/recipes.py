"""Write the arguments of `train` into `run.json`, and build the agent of a saved run.

`run.json` contains two descriptions. `agent` contains every option of each part of the agent, and is written even if
the run was started without `train`; `load` builds the agent from `agent`. `recipe` contains only the arguments of
`train` and the options of the preset; `--config` and `compare` read `recipe`.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import Registration, reference_to, registration_of
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.option_values.descriptions import (
    FACTORY,
    Find,
    code_in,
    factory_from_json,
    find_by_import,
    find_imported,
    from_json,
    mapping,
    options_of,
    part_of,
    spaces_of,
    to_json,
)
from pytorchrl.agent.seeding import check_seed
from pytorchrl.envs.lookup import names_module
from pytorchrl.errors import CheckpointError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.run_directory import RUN_FILE, check_description, no_run
from pytorchrl.support.untyped import OptionValue

Described = Mapping[str, object]
"""A description from `pytorchrl.agent.option_values.descriptions`, or a part of one."""
_ACTING = ("noise_std",)
"""Algorithm options that affect acting. `load` ignores all other algorithm options whose values are code."""


def describe(registration: Registration, env: object, options: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of `train` as JSON values, or an empty dictionary if the environment is not an id."""
    if not isinstance(env, str):
        return {}
    return {"algorithm": registration.reference, "env": env,
            "options": {name: to_json(value) for name, value in options.items()}}


def read(run_dir: Path, algorithm: str | type[Algorithm] | None = None, *, trust: bool = False) -> tuple[Agent, int]:
    """Build the agent of a saved run.

    Args:
        run_dir: Directory of the run.
        algorithm: The algorithm of the run; None: the algorithm in `run.json`.
        trust: Whether to import code that `run.json` names. If not, only classes that this process has already
            imported are used.

    Returns:
        The agent and the seed of the run.

    Raises:
        ConfigError: `algorithm` is not an algorithm, or the environments cannot be built.
        CheckpointError: The directory contains no run, `run.json` is damaged, or the run needs code that is not
            imported.
    """
    given = None if algorithm is None else registration_of(algorithm)
    path = run_dir / RUN_FILE
    try:
        run = mapping(read_json(path))
        check_description(run)
        agent, seed = run["agent"], check_seed(run["seed"])
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(no_run(run_dir, RUN_FILE)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe a run: {error}") from error
    find = find_by_import if trust else find_imported
    try:
        return _built(agent, None if given is None else given.algorithm, find, trust=trust), seed
    except CheckpointError as error:
        raise CheckpointError(_refusal(run_dir, str(error), trust=trust)) from error
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe an agent of this version: {error}") from error


def _refusal(run_dir: Path, problem: str, *, trust: bool) -> str:
    remedy = ("" if trust else "load does not import code that a run's files name; import the class first, name your "
              "own algorithm (algorithm='module:Class', `--algorithm module:Class`), or, if you trust the run, pass "
              "trust=True (`--trust` on the command line). ")
    return (f"the run in {str(run_dir)!r} needs code that is not available: {problem}. {remedy}"
            "Otherwise, build the same actor with checkpoint=<its model.pt>")


def _built(description: object, algorithm: type[Algorithm] | None, find: Find, *, trust: bool) -> Agent:
    """Build an agent from the description of its factories."""
    parts = {name: mapping(part) for name, part in mapping(description).items()}
    train_envs = _environments(parts["train_envs_factory"], find, trust=trust)
    of_tests = parts.get("test_envs_factory")
    spaces = spaces_of(train_envs)

    def of_algorithm(part: Described) -> Described:
        name = part[FACTORY] if algorithm is None else reference_to(algorithm)
        return {FACTORY: name, "options": {name: option for name, option in mapping(part["options"]).items()
                                           if name in _ACTING or _can_be_built(option, find)}}

    def of_actor(part: Described) -> Described:
        return {**part, "options": {**mapping(part["options"]), "checkpoint": None}}

    return Agent(
        factory_from_json(_of_policies(parts["algo_factory"], of_algorithm), find, spaces),
        factory_from_json(_of_policies(parts["actor_factory"], of_actor), find, spaces),
        factory_from_json(parts["storage_factory"], find, spaces), train_envs,
        train_envs if of_tests is None else _environments(of_tests, find, trust=trust))


def _of_policies(part: Described, change: Callable[[Described], Described]) -> Described:
    """Apply `change` to the description of a factory.

    If the factory combines the factories of several policies, apply `change` to each of their descriptions instead.
    """
    options = mapping(part["options"])
    if "policies" not in options:
        return change(part)
    policies = {policy: change(mapping(factory)) for policy, factory in mapping(options["policies"]).items()}
    return {**part, "options": {**options, "policies": policies}}


def _can_be_built(option: object, find: Find) -> bool:
    """Return whether `find` finds all classes and functions that are needed to build an option from its description."""
    try:
        return not code_in(option) or from_json(option, find) is not None
    except CheckpointError:
        return False


def _environments(description: Described, find: Find, *, trust: bool) -> EnvFactory:
    """Build a factory of environments; to find their spaces, one environment is built and closed."""
    cls = part_of(description, find)
    if not issubclass(cls, VecEnv):
        raise CheckpointError(f"{description[FACTORY]} is not a class of environments")
    options: dict[str, OptionValue] = options_of(description, find)
    if not trust:
        _check_environment(options["env_fn"])
    if "agents" in options:
        agents = options.pop("agents").items()
        options["policy_of"] = {agent: policy for policy, names in agents for agent in names}
    return cls.create_factory(**options)


def _check_environment(env: object) -> None:
    """Refuse an environment id if Gymnasium or PettingZoo would import a module that belongs to no installed package.

    Modules that this process has already imported, and modules of installed packages, are accepted. Any other module,
    for example in the working directory, is refused, because importing it would execute its code.

    Raises:
        CheckpointError: The module is neither imported nor part of an installed package.
    """
    if not isinstance(env, str) or not (":" in env or names_module(env)):
        return
    module = env.partition(":")[0]
    if module in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])  # a dotted name would import the package
    except ValueError:
        spec = None
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    found = [*(spec.submodule_search_locations or ()), spec.origin] if spec is not None else []
    places = [Path(place).resolve() for place in found if place is not None]
    if not all(any(folder in place.parents for folder in folders) for place in places):
        raise CheckpointError(f"the environment {env!r} is code in the module {module!r}, which this process has not "
                              "imported and which belongs to no installed package")
