"""Register each algorithm under a name, with the storage and the actor that `train` and the command line use for it."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from torch import nn

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.variants import VARIANTS
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.options import check_declaration
from pytorchrl.agent.storages import Storage
from pytorchrl.errors import ConfigError
from pytorchrl.support.code import Trust, find_code, is_reference

A = TypeVar("A", bound=type[Algorithm])

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Registration:
    """An algorithm and the parts with which `train` combines it.

    Attributes:
        name: Name of the algorithm in `train`, on the command line and in names of run directories.
        algorithm: Class of the algorithm.
        storage: Class of the storage that the algorithm learns from.
        actor: Class of the actor that the algorithm trains.
        prioritized_storage: Class of the storage for `prioritized=True`; None if the algorithm does not support
            priorities.
        rollout_storage: Class of the storage for `kind="batch"`; None means `storage`.
        environments: Class of the environments; None means `VecEnv`.
        variant: Name of the variant, a key of `VARIANTS`; "" for the algorithm itself.
    """

    name: str
    algorithm: type[Algorithm]
    storage: type[Storage]
    actor: type[nn.Module]
    prioritized_storage: type[Storage] | None = None
    rollout_storage: type[Storage] | None = None
    environments: type[VecEnv] | None = None
    variant: str = ""

    @property
    def options(self) -> Mapping[str, object]:
        """The options of `train` that the variant sets; empty for the algorithm itself."""
        return VARIANTS[self.variant].options if self.variant else {}

    @property
    def is_own(self) -> bool:
        """Whether `algorithm` itself is registered. If not, the other attributes are those of a base class."""
        own = _by_name.get(self.name)
        return own is not None and own.algorithm is self.algorithm

    @property
    def label(self) -> str:
        """The name for display: that of the variant, or `name` if `is_own` is true, or the class's name."""
        return self.variant or (self.name if self.is_own else self.algorithm.__name__)

    @property
    def reference(self) -> str:
        """The name in `run.json`: `label` for an algorithm of this package, `module:Class` for any other algorithm."""
        is_built_in = self.algorithm.__module__.split(".")[0] == __name__.split(".")[0]
        return self.label if self.is_own and is_built_in else reference_to(self.algorithm)


_by_name: dict[str, Registration] = {}


def algorithm(
    name: str, *, storage: type[Storage], actor: type[nn.Module] | None = None,
    prioritized_storage: type[Storage] | None = None,
    rollout_storage: type[Storage] | None = None, environments: type[VecEnv] | None = None,
) -> Callable[[A], A]:
    """Register the decorated algorithm, so that `train(name, ...)` and `pytorchrl train name` accept its name.

        @algorithm("reinforce", storage=VanillaOnPolicyBuffer)
        class Reinforce(OnPolicyAlgorithm): ...

    Args:
        name: A unique name of letters, digits and `_.-` that begins with a letter.
        storage: Class of the storage that the algorithm learns from.
        actor: Class of the actor that the algorithm trains; None means the algorithm's `actor_class`.
        prioritized_storage: Class of the storage for `prioritized=True`; None if the algorithm does not support
            priorities.
        rollout_storage: Class of the storage of whole rollouts, for `kind="batch"`; None means `storage`.
        environments: Class of the environments; None means `VecEnv`.

    Raises:
        ConfigError: The name is not allowed or already taken, or the class is not an algorithm or declares no actor.
    """
    def register(cls: A) -> A:
        trained = actor or getattr(cls, "actor_class", None)
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise ConfigError(f"@algorithm({name!r}) is for classes that derive from Algorithm, got {cls!r}")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"the name of an algorithm must match {_NAME.pattern}, got {name!r}")
        if trained is None:
            raise ConfigError(f"@algorithm({name!r}) needs actor, the class of actor that {cls.__name__} trains")
        if name in VARIANTS:
            raise ConfigError(f"@algorithm({name!r}) on {reference_to(cls)}: a variant of {VARIANTS[name].algorithm} "
                              "already has this name; choose a different one")
        taken = _by_name.get(name)
        # If a notebook runs a cell again, the new class replaces the previous class of the same name.
        if taken is not None and reference_to(taken.algorithm) != reference_to(cls):
            raise ConfigError(f"@algorithm({name!r}) on {reference_to(cls)}: {reference_to(taken.algorithm)} already "
                              "has this name; choose a different one")
        _by_name[name] = Registration(
            name, cls, storage, trained, prioritized_storage, rollout_storage, environments)
        return cls

    return register


def registered() -> Mapping[str, Registration]:
    """Return all registered algorithms by name, in alphabetical order."""
    return MappingProxyType(dict(sorted(_by_name.items())))


def names() -> list[str]:
    """Return the names of all registered algorithms, in alphabetical order, and then those of their variants."""
    return [*registered(), *sorted(VARIANTS)]


def registration_of(algorithm: str | type[Algorithm], trust: Trust = Trust.ALL) -> Registration:
    """Return the registration of an algorithm.

    Args:
        algorithm: A registered name, the name of a variant, a class, or "module:Class".
        trust: The modules that may be imported to find "module:Class".

    Raises:
        ConfigError: No algorithm has this name, the module cannot be imported, or neither the class nor one of its base
            classes is registered.
    """
    if isinstance(algorithm, type):
        return _of_class(algorithm)
    if isinstance(algorithm, str):
        if algorithm in _by_name:
            return _by_name[algorithm]
        if algorithm in VARIANTS:
            return dataclasses.replace(_by_name[VARIANTS[algorithm].algorithm], variant=algorithm)
        if is_reference(algorithm):
            return _of_class(find_code(algorithm, trust))
    near = difflib.get_close_matches(str(algorithm).lower(), names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"algorithm must be one of {names()}, a class or 'module:Class', got "
                      f"{algorithm!r}{hint}")


def reference_to(cls: type) -> str:
    """Return the reference `module:Class` to a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _of_class(cls: object) -> Registration:
    """Return the registration of a class or, if there is none, a copy of the nearest base class's registration."""
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise ConfigError(f"algorithm must be a class that derives from Algorithm, got {cls!r}")
    by_class = {registration.algorithm: registration for registration in _by_name.values()}
    found = next((by_class[base] for base in cls.__mro__ if base in by_class), None)
    if found is None or inspect.isabstract(cls):
        raise ConfigError(f"{cls.__name__} is {'abstract' if inspect.isabstract(cls) else 'not registered'}; "
                          f'write @algorithm("{cls.__name__.lower()}", storage=...) above a class that defines every '
                          'abstract method')
    check_declaration(cls)
    return dataclasses.replace(found, algorithm=cls)


def subclasses(cls: type) -> list[type]:
    """Return all imported subclasses; if a class was defined more than once, its latest definition comes first."""
    found: list[type] = []
    direct: list[type] = cls.__subclasses__()
    for subclass in reversed(direct):
        found += [subclass, *subclasses(subclass)]
    return found
