"""Check whether the parts of an agent fit together, based on the declarations of their classes.

An algorithm declares the kind of data that it learns from (`learns_from`), its class of actor (`actor_class`), the
supported values of the actor's options (`actor_options`) and the supported kinds of action space (`action_spaces`). A
storage declares the kind of data that it provides (`provides`). An actor declares the kinds of action space that it
supports (`action_spaces`). Error messages list all imported classes that would fit, including the user's own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

import gymnasium as gym
from torch import nn

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.env.spaces import INTEGER_BOX
from pytorchrl.agent.options import AgentOptions, Part, PartFactory
from pytorchrl.errors import ConfigError, Problem, SpaceError
from pytorchrl.support.problems import error_of, problems_of, raise_all
from pytorchrl.support.untyped import UserPart


class AlgorithmDeclarations(Protocol):
    """Class attributes in which an algorithm declares the data and actors that it can use; see `Algorithm`."""

    learns_from: DataKind
    actor_class: ClassVar[type[nn.Module]]
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]]
    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]]


class StorageDeclarations(Protocol):
    """Class attributes in which a storage declares the data that it provides; see `Storage`."""

    provides: DataKind
    has_priorities: ClassVar[bool]
    draws_rollouts: ClassVar[bool]


def learned_kind(algorithm: PartFactory[object], actor: object = None) -> DataKind:
    """Return the kind of data that an algorithm learns from.

    For several policies, return the kind that requires the freshest data. An algorithm that learns from transitions
    learns from sequences if its actor has memory, provided that it supports such an actor.

    Args:
        algorithm: Factory of the algorithm.
        actor: Factory of the actor; None, or an actor that the algorithm cannot train, does not matter.

    Raises:
        ConfigError: Neither the algorithm's options nor its class declares `learns_from`.
    """
    kind = _declared_kind(algorithm, "learns_from", "the kind of data that it learns from")
    wanted = getattr(algorithm.cls, "actor_class", None)
    is_usable = isinstance(wanted, type) and issubclass(getattr(actor, "cls", object), wanted)
    memory = getattr(getattr(actor, "options", None), "recurrent_net", None) if is_usable else None
    return _kind_with_memory(kind, algorithm.cls, memory)


def learned_kind_of(algorithm: type[AlgorithmDeclarations], memory: object) -> DataKind:
    """Return the kind of data that an algorithm learns from, given the value of its actor's option `recurrent_net`."""
    return _kind_with_memory(algorithm.learns_from, algorithm, memory)


def _kind_with_memory(kind: DataKind, algorithm: type[object], memory: object) -> DataKind:
    supported: tuple[object, ...] = getattr(algorithm, "actor_options", {}).get("recurrent_net", ())
    is_sequence = kind is DataKind.TRANSITIONS and memory is not None and memory in supported
    return DataKind.SEQUENCES if is_sequence else kind


def provided_kind(storage: PartFactory[object]) -> DataKind:
    """Return the kind of data that a storage provides.

    For several policies, return the kind that requires the freshest data.

    Raises:
        ConfigError: Neither the storage's options nor its class declares `provides`.
    """
    return _declared_kind(storage, "provides", "the kind of data that its batches contain")


def freshest(kinds: Iterable[DataKind]) -> DataKind:
    """Return the member of `kinds` that requires the freshest data; `kinds` must not be empty."""
    found = set(kinds)
    return next(kind for kind in DataKind if kind in found)


def algorithms_for(*kinds: DataKind) -> str:
    """Return the names of all known algorithms that learn from one of the `kinds` of data."""
    return names(cls for cls in _known_algorithms() if cls.learns_from in kinds)


def check_fit(
    algorithm: PartFactory[AlgorithmDeclarations], actor: PartFactory[nn.Module],
    storage: PartFactory[StorageDeclarations], num_envs: int | None = None,
) -> None:
    """Refuse an agent whose algorithm cannot learn with its actor or storage, or whose options contradict each other.

    Args:
        algorithm: Factory of the algorithm, or of the algorithms of several policies.
        actor: Factory of the actor, or of the actors of the same policies.
        storage: Factory of the storage, or of the storages of the same policies.
        num_envs: E, the number of environments of one collector; None if it is not known yet.

    Raises:
        SpaceError: The algorithm does not support the actor's action space.
        ConfigError: The parts do not fit together, options contradict each other, or a class lacks a declaration; the
            message names the parts and the classes that would fit.
    """
    if hasattr(algorithm.options, "policies"):
        check_policies(*(part.options.policies for part in (algorithm, actor, storage)))
        return
    found = (_data_problem(algorithm, actor, storage), _actor_problem(algorithm.cls, actor.cls, actor.options))
    problems = [problem for problem in found if problem]
    if not problems:
        _check_options(algorithm, actor, storage, num_envs)
        return
    for problem in problems:
        if isinstance(problem, SpaceError):  # a different storage would not solve this problem
            raise problem
    kind = provided_kind(storage)
    memory = getattr(actor.options, "recurrent_net", None)
    fitting = [cls for cls in _algorithms_for(actor.cls, actor.options)
               if learned_kind_of(cls, memory) is kind and _takes_priorities(cls, storage.cls)]
    hint = f"algorithms for this {actor.cls.__name__} and {storage.cls.__name__}: {names(fitting)}" if fitting else ""
    *others, last = map(str, problems)
    raise error_of([*map(Problem, others), Problem(last, hint)])


def _check_options(
    algorithm: PartFactory[object], actor: PartFactory[object], storage: PartFactory[object], num_envs: int | None,
) -> None:
    """Raise `ConfigError` if options of algorithm, actor and storage contradict each other; list all contradictions."""
    has_memory = getattr(actor.cls, "has_memory", None)  # an actor need not derive from `Actor`
    agent = AgentOptions(
        algorithm.options, actor.options, storage.options, has_memory and has_memory(actor.options), num_envs)
    problems = [part.cls.contradiction(agent) for part in (algorithm, actor, storage) if issubclass(part.cls, Part)]
    raise_all(Problem(problem) for problem in problems if problem)


def check_policies(
    algorithms: Mapping[str, PartFactory[AlgorithmDeclarations]], actors: Mapping[str, PartFactory[nn.Module]],
    storages: Mapping[str, PartFactory[StorageDeclarations]],
) -> None:
    """Check the parts of each policy with `check_fit`; each argument is a mapping from policies to factories."""
    for policy, algorithm in algorithms.items():
        _check_policy(policy, algorithm, actors[policy], storages[policy])


def check_actor(algorithm: type[AlgorithmDeclarations], actor: type[nn.Module], options: object) -> None:
    """Refuse an actor that the algorithm cannot train.

    Args:
        algorithm: Class of the algorithm.
        actor: Class of the actor.
        options: The actor's options.

    Raises:
        SpaceError: The algorithm does not support the actor's action space.
        ConfigError: The actor is not of the class that the algorithm trains, or its options do not fit the algorithm.
    """
    problem = _actor_problem(algorithm, actor, options)
    if problem:
        raise problem


def check_action_space(actor: type[object], space: gym.Space[object]) -> None:
    """Refuse an action space that a class of actor does not support.

    Raises:
        SpaceError: The class does not support the space; the message lists the actors that do.
    """
    problem = _space_problem(actor, space)
    if problem:
        trained = {cls for algorithm in _known_algorithms() for cls in _with_subclasses(algorithm.actor_class)}
        others = trained | set(_parts("actor"))
        fitting = [cls for cls in others if not _space_problem(cls, space)]
        raise SpaceError(f"{actor.__name__} needs {problem}, got {space}; {_for_space('actors', fitting, space)}")


def check_algorithm_space(algorithm: type[AlgorithmDeclarations], space: gym.Space[object]) -> None:
    """Refuse an action space that an algorithm, or the class of actor that it trains, does not support.

    Raises:
        SpaceError: The algorithm does not support the space; the message lists the algorithms that do.
    """
    problem = _algorithm_space_problem(algorithm, space)
    if problem:
        raise problem


def _check_policy(policy: str, algorithm: PartFactory[AlgorithmDeclarations], actor: PartFactory[nn.Module],
                  storage: PartFactory[StorageDeclarations]) -> None:
    try:
        check_fit(algorithm, actor, storage)
    except ConfigError as error:
        raise error_of(dataclasses.replace(problem, text=f"policy {policy!r}: {problem.text}")
                       for problem in problems_of(error)) from error


def _declared_kind(factory: PartFactory[object], name: str, what: str) -> DataKind:
    # With several policies, the kind of data is declared in the options; otherwise, in the class.
    kind = getattr(factory.options, name, None) or getattr(factory.cls, name, None)
    if not isinstance(kind, DataKind):
        allowed = ", ".join(f"DataKind.{kind.name} ({kind.value})" for kind in DataKind)
        raise ConfigError(f"{factory.cls.__name__} must declare {name}, {what}, got {kind!r}; set it in the class to "
                          f"one of {allowed}")
    return kind


def _data_problem(
    algorithm: PartFactory[AlgorithmDeclarations], actor: PartFactory[nn.Module],
    storage: PartFactory[StorageDeclarations],
) -> ConfigError | None:
    wanted, provided = learned_kind(algorithm, actor), provided_kind(storage)
    name = algorithm.cls.__name__
    if wanted is not provided:
        text = f"{name} learns from {wanted.value}, but {storage.cls.__name__} provides {provided.value}"
    elif not _takes_priorities(algorithm.cls, storage.cls):
        text = f"{storage.cls.__name__} computes priorities from TD errors, but {name} has no td_errors()"
    else:
        return None
    fitting = [cls for cls in known_storages() if cls.provides is wanted and _takes_priorities(algorithm.cls, cls)]
    return ConfigError(f"{text}; storages for {name}: {names(fitting)}")


def _takes_priorities(algorithm: type[AlgorithmDeclarations], storage: type[StorageDeclarations]) -> bool:
    """Return whether an algorithm computes the TD errors that a storage needs, if it needs any."""
    return not storage.has_priorities or hasattr(algorithm, "td_errors")


def _actor_problem(
    algorithm: type[AlgorithmDeclarations], actor: type[nn.Module], options: object,
) -> ConfigError | None:
    wanted, name = getattr(algorithm, "actor_class", None), algorithm.__name__
    if not isinstance(wanted, type):
        return ConfigError(f"{name} must declare actor_class, the class of actor that it trains, got {wanted!r}; set "
                           "it in the class, for instance to OnPolicyActor")
    space = getattr(options, "action_space", None)
    if space is not None and (problem := _algorithm_space_problem(algorithm, space)):
        return problem
    if not issubclass(actor, wanted):
        recipes = [_recipe(algorithm, cls) for cls in _sorted(_with_subclasses(wanted))]
        texts = [f"{name} cannot train {actor.__name__}; actors for {name}: {', '.join(dict.fromkeys(recipes))}"]
    else:
        texts = [f"{name} needs {actor.__name__} with {_allowed(algorithm, option)}, got {option}={value!r}"
                 for option, value in _wrong_options(algorithm, options).items()]
    if texts and (fitting := _algorithms_for(actor, options)):
        texts.append(f"algorithms for this {actor.__name__}: {names(fitting)}")
    return ConfigError("; ".join(texts)) if texts else None


def _algorithm_space_problem(algorithm: type[AlgorithmDeclarations], space: gym.Space[object]) -> SpaceError | None:
    problem = _unusable(algorithm, space)
    if not problem:
        return None
    fitting = [cls for cls in _known_algorithms() if not _unusable(cls, space)]
    return SpaceError(f"{algorithm.__name__} needs {problem}, got {space}; {_for_space('algorithms', fitting, space)}")


def _unusable(algorithm: type[AlgorithmDeclarations], space: gym.Space[object]) -> str | None:
    """Return the kind of space that an algorithm and its actor need; None if they support `space`."""
    if not isinstance(space, algorithm.action_spaces):
        return f"{' or '.join(kind.__name__ for kind in algorithm.action_spaces)} actions"
    return _space_problem(algorithm.actor_class, space)


def _space_problem(actor: type[object], space: gym.Space[object]) -> str | None:
    find = getattr(actor, "action_space_problem", None)  # an actor need not derive from `Actor`
    return find(space) if find else None


def _for_space(parts: str, fitting: Sequence[type[object]], space: gym.Space[object]) -> str:
    if not fitting:
        return INTEGER_BOX if isinstance(space, gym.spaces.Box) else (
            "wrap the environment with gymnasium.wrappers.TransformAction and one of these spaces")
    return f"{parts} for such {type(space).__name__} actions: {names(fitting)}"


def _wrong_options(algorithm: type[AlgorithmDeclarations], options: object) -> dict[str, object]:
    """Return the actor's option values that the algorithm does not support, by name of the option."""
    values = {name: getattr(options, name, None) for name in algorithm.actor_options}
    return {name: value for name, value in values.items() if value not in algorithm.actor_options[name]}


def _allowed(algorithm: type[AlgorithmDeclarations], option: str) -> str:
    return f"{option}={' or '.join(map(repr, algorithm.actor_options[option]))}"


def _recipe(algorithm: type[AlgorithmDeclarations], actor: type[object]) -> str:
    """Return text for an error message: the actor's name, and the options that the algorithm requires of the actor."""
    options = getattr(actor, "Options", None)
    defaults = {field.name: field.default for field in dataclasses.fields(options)} if options is not None else {}
    needed = [_allowed(algorithm, name) for name, values in algorithm.actor_options.items()
              if name in defaults and defaults[name] not in values]
    return f"{actor.__name__} with {', '.join(needed)}" if needed else actor.__name__


def _algorithms_for(actor: type[nn.Module], options: object) -> list[type[AlgorithmDeclarations]]:
    """Return the known algorithms that can train an actor."""
    space = getattr(options, "action_space", None)
    trainers = [cls for cls in _known_algorithms() if issubclass(actor, cls.actor_class)]
    return [cls for cls in trainers if not _wrong_options(cls, options)
            and (space is None or not _unusable(cls, space))]


# A class is known if it has been imported, is not abstract, and has the required declarations. This library's own
# algorithms, actors and storages are always known, because importing one of them imports all of the same kind.


def _known_algorithms() -> list[type[AlgorithmDeclarations]]:
    return [cls for cls in _parts("algorithm") if isinstance(getattr(cls, "learns_from", None), DataKind)
            and isinstance(getattr(cls, "actor_class", None), type)]


def known_storages() -> list[type[StorageDeclarations]]:
    """Return all imported, non-abstract storage classes that declare `provides`, including those of the user."""
    return [cls for cls in _parts("rollouts", "replay") if isinstance(getattr(cls, "provides", None), DataKind)]


def _parts(*homes: str) -> list[type[UserPart]]:
    """Return all imported, non-abstract subclasses of `Part` whose class attribute `home` is one of `homes`."""
    known = [cls for cls in _with_subclasses(Part) if not inspect.isabstract(cls)]
    return [cls for cls in known if getattr(cls, "home", None) in homes]


def _with_subclasses(cls: type[object]) -> list[type[object]]:
    found = {cls: None}
    for subclass in cls.__subclasses__():
        found |= dict.fromkeys(_with_subclasses(subclass))
    return list(found)


def _sorted(classes: Iterable[type[object]]) -> list[type[object]]:
    return sorted(classes, key=lambda cls: cls.__name__)


def names(classes: Iterable[type[object]]) -> str:
    """Return the names of classes for a message, sorted and without repetition; "none" if there are none."""
    return ", ".join(dict.fromkeys(cls.__name__ for cls in _sorted(classes))) or "none"
