"""Write the arguments of `train` into `run.json`, and build the agent of a saved run.

`run.json` contains two descriptions. `agent` contains every option of each part of the agent, and is written even if
the run was started without `train`; `load` builds the agent from `agent`. `recipe` contains only the arguments of
`train` and the options of the preset, and names those that the user gave; `--config` and `compare` read `recipe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import gymnasium as gym

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.algorithms.registry import Registration, reference_to, registration_of
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.option_values.descriptions import (
    FACTORY,
    Find,
    by_name,
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
from pytorchrl.support.code import Code, Trust, import_module, is_installed, local_imports_off, may_import, refusal
from pytorchrl.support.untyped import OptionValue
from pytorchrl.training.strangers import Model, check_environment, check_size

Described = Mapping[str, object]
"""A description from `pytorchrl.agent.option_values.descriptions`, or a part of one."""
_ACTING = ("noise_std",)
"""Algorithm options that affect acting. `load` ignores all other algorithm options whose values are code."""


def describe(
    registration: Registration, env: object, options: Mapping[str, object], given: Iterable[str],
) -> dict[str, object]:
    """Return the arguments of `train` as JSON values, or an empty dictionary if the environment is not an id.

    Args:
        registration: The algorithm.
        env: The environment.
        options: The user's options and those of the preset.
        given: Names of the user's options.
    """
    if not isinstance(env, (str, Code)):
        return {}
    return {"algorithm": registration.reference, "env": str(env), "given": [name for name in given if name in options],
            "options": {name: to_json(value) for name, value in options.items()}}


def given_in(run: Described) -> tuple[str, str, dict[str, object]] | None:
    """Return the algorithm, the environment and the options that the user gave to `train`, for display.

    Code is replaced by its name. The result is None if the run was started without `train`.
    """
    try:
        recipe = mapping(run["recipe"])
        options, names = mapping(recipe["options"]), recipe["given"]
        given = {str(name): options[name] for name in names} if isinstance(names, list) else dict(options)
        return str(recipe["algorithm"]), str(recipe["env"]), {name: _shown(value) for name, value in given.items()}
    except (LookupError, TypeError):
        return None


def _shown(option: object) -> object:
    try:
        return by_name(option) if code_in(option) else from_json(option)
    except (CheckpointError, LookupError, TypeError, ValueError):
        return option


def read(run_dir: Path) -> Described:
    """Return the contents of the `run.json` in the directory of a run.

    Raises:
        CheckpointError: The directory contains no run, or `run.json` is damaged.
    """
    path = run_dir / RUN_FILE
    try:
        run = mapping(read_json(path))
        check_description(run)
        return {"agent": run["agent"], "seed": check_seed(run["seed"]), "recipe": run["recipe"]}
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(no_run(run_dir, RUN_FILE)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} does not describe a run: {error}") from error


def build(
    run: Described, run_dir: Path, algorithm: str | type[Algorithm] | None = None, *, trust: bool = False,
    model: Model | None = None,
) -> Agent:
    """Build the agent of a saved run.

    Args:
        run: The contents of `run.json`; see `read`.
        run_dir: Directory of the run, for error messages.
        algorithm: The algorithm of the run; None: the algorithm in `run.json`.
        trust: Whether to import code that `run.json` names. If not, only classes that this process has already
            imported are used, nothing is imported from the working directory, and the run is limited in what it can
            demand.
        model: The tensors of the model, which limit what a run that is not trusted can demand.

    Raises:
        ConfigError: `algorithm` is not an algorithm, or the environments cannot be built.
        CheckpointError: `run.json` describes no agent, demands too much, or needs code that is not imported.
    """
    given, agent = None if algorithm is None else registration_of(algorithm), run["agent"]
    find = find_by_import if trust else find_imported
    try:
        _import_registered(agent)
        with contextlib.nullcontext() if trust else local_imports_off():
            return _built(agent, None if given is None else given.algorithm, find, None if trust else model or {})
    except CheckpointError as error:
        hint = "" if trust or "has not imported" not in str(error) else (
            ". An algorithm of your own can also be named (algorithm='module:Class', `--algorithm module:Class`)")
        raise CheckpointError(f"the agent that {RUN_FILE} in {str(run_dir)!r} describes cannot be built: {error}{hint}"
                              ". Otherwise, build the same actor with checkpoint=<its model.pt>") from error
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{str(run_dir / RUN_FILE)!r} does not describe an agent of this version: "
                              f"{error}") from error


def _built(description: object, algorithm: type[Algorithm] | None, find: Find, model: Model | None) -> Agent:
    """Build an agent from the description of its factories; `model` is None if the run is trusted."""
    if model is not None:
        check_size(description)
    parts = {name: mapping(part) for name, part in mapping(description).items()}
    of_tests = parts.get("test_envs_factory")
    train_envs = _environments(parts["train_envs_factory"], find, model, is_played=of_tests is None)
    spaces = spaces_of(train_envs)

    def of_algorithm(part: Described) -> Described:
        name = part[FACTORY] if algorithm is None else reference_to(algorithm)
        return {FACTORY: name, "options": known_options(part)}

    def known_options(part: Described) -> Described:
        return {name: option for name, option in mapping(part["options"]).items()
                if name in _ACTING or _can_be_built(option, find)}

    def of_storage(part: Described) -> Described:
        return {**part, "options": known_options(part)}

    def of_actor(part: Described) -> Described:
        return {**part, "options": {**mapping(part["options"]), "checkpoint": None}}

    return Agent(
        factory_from_json(_of_policies(parts["algo_factory"], of_algorithm), find, spaces),
        factory_from_json(_of_policies(parts["actor_factory"], of_actor), find, spaces),
        factory_from_json(_of_policies(parts["storage_factory"], of_storage), find, spaces), train_envs,
        train_envs if of_tests is None else _environments(of_tests, find, model, is_played=True))


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


def _environments(description: Described, find: Find, model: Model | None, *, is_played: bool) -> EnvFactory:
    """Build a factory of environments; to find their spaces, one environment is built and closed.

    Options that matter only for training are left out: the directory of monitor files, in which a reader must write
    nothing, and a function of rewards that cannot be built.
    """
    cls = part_of(description, find)
    if not issubclass(cls, VecEnv):
        raise CheckpointError(f"{description[FACTORY]} is not a class of environments")
    described = {name: option for name, option in mapping(description["options"]).items()
                 if name != "log_dir" and (name != "reward_transform" or _can_be_built(option, find))}
    if model is not None:
        env = described["env_fn"]
        if isinstance(env, str) and (problem := problem_of_id(env, Trust.INSTALLED)):
            raise CheckpointError(problem)
        check_environment(described, model, is_played=is_played)
    options: dict[str, OptionValue] = options_of({"options": described}, find)
    if "agents" in options:
        agents = options.pop("agents").items()
        options["policy_of"] = {agent: policy for policy, names in agents for agent in names}
    return cls.create_factory(**options)


def problem_of_id(env: str, trust: Trust) -> str | None:
    """Return the error message for an environment id whose module must not be imported; None for any other id.

    Gymnasium or PettingZoo would import this module.
    """
    if (":" in env or names_module(env)) and not may_import(env.partition(":")[0], trust):
        return refusal(env)
    return None


def _import_registered(agent: object) -> None:
    """Import the class of an environment that this program has registered with Gymnasium, if it is a local module.

    Gymnasium would import it later, when the working directory is off Python's path.
    """
    for part in mapping(agent).values():
        env = mapping(mapping(part)["options"]).get("env_fn")
        entry_point = getattr(gym.registry.get(str(env)), "entry_point", None)
        if isinstance(entry_point, str) and not is_installed(module := entry_point.partition(":")[0]):
            import_module(module, str(env))
