"""Enums and base classes of the options of a scheme, and helpers that convert options to keywords and back.

Each class of options contains only declarations: names, types, defaults, ranges and help texts. The class that uses
them refers to them as its `Options`. A kind, such as asynchronous collection, inherits only from the classes that it
needs, so it has no fields for options that would have no effect.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pytorchrl.agent.names import refuse_unknown
from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.scheme.transport.encoder import Compression
from pytorchrl.support.problems import raise_all

if TYPE_CHECKING:
    from typing_extensions import Self

OptionsT = TypeVar("OptionsT", bound=Options)
_RESOURCES = ("num_cpus", "num_gpus", "memory", "object_store_memory")


class _Choice(str, Enum):
    """An enum of strings; the error for an unknown string suggests the most similar member."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        allowed = [choice.value for choice in cls]
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{cls.__name__.lower()} must be one of {allowed}, got {value!r}{hint}")

    def __str__(self) -> str:
        return str(self.value)


class Communication(_Choice):
    """Whether workers wait for each other. The short forms "sync" and "async" are understood, too."""

    SYNC = "synchronous"
    ASYNC = "asynchronous"

    @classmethod
    def _missing_(cls, value: object) -> Self:
        short = {member.value.removesuffix("hronous"): member for member in cls}
        return short.get(str(value)) or super()._missing_(value)


class Execution(_Choice):
    """Where an operation runs: in the parent worker or in remote workers."""

    CENTRAL = "Central"
    PARALLEL = "Parallel"


SYNC, ASYNC = Communication.SYNC, Communication.ASYNC
CENTRAL, PARALLEL = Execution.CENTRAL, Execution.PARALLEL
DEFAULT_EXECUTION = CENTRAL
"""Where operations run if the user of a worker class leaves `col_execution` or `grad_execution` out. Options of a
`Scheme` have the default None, which depends on the number of workers."""


def check_execution(level: str, execution: Execution | str, num_workers: int) -> Execution:
    """Return `execution` as an enum member; raise `ConfigError` if it is central and there are several workers.

    Args:
        level: "col" for collection workers, or "grad" for gradient workers.
        execution: "Central" or "Parallel".
        num_workers: Number of these workers.
    """
    execution = Execution(execution)
    if execution is CENTRAL and num_workers > 1:
        above = "GWorkerSet.create_factory" if level == "col" else "Scheme.from_factory"
        raise ConfigError(f"{level}_execution='Central' contradicts num_{level}_workers={num_workers}: the local "
                          f"worker would do all the work; give {level}_execution='Parallel' to the level above (its "
                          f"default in {above} is 'Central'), or 1 worker")
    return execution


def check_resources(name: str, resources: Mapping[str, object]) -> Mapping[str, object]:
    """Return a copy of `resources` that can be pickled, as a read-only mapping cannot.

    Args:
        name: Name of the option that has the value `resources`, for the error message.
        resources: The amount of each resource, by name. Names that Ray does not know are custom resources of a cluster.

    Raises:
        ConfigError: An amount is invalid, or the name of a resource seems misspelled.
    """
    problems: list[Problem] = []
    for key, amount in resources.items():
        near = [] if key in _RESOURCES else difflib.get_close_matches(str(key), _RESOURCES, n=1)
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < math.inf:
            problems.append(Problem(f"{name}[{key!r}] must be a number >= 0, got {amount!r}"))
        elif near:
            problems.append(Problem(f"{name} has {key!r}", f"did you mean {near[0]!r}?"))
        elif key == "num_gpus" and amount > 1 and amount != int(amount):
            problems.append(
                Problem(f"{name}['num_gpus'] must be a fraction up to 1 or a whole number, got {amount!r}"))
    raise_all(problems)
    return dict(resources)


def check_codec(kind: str) -> Callable[[bool | str], bool | str]:
    """Return a function that returns the value of `compress_<kind>_to_send`, and refuses codecs that cannot be used."""
    def check(value: bool | str) -> bool | str:
        Compression.of(kind, value)
        return value
    return check


class Kind(Options):
    """Base class of kinds. A kind is one variant of a level, and declares the options that this variant needs.

    For example, collection is a level of a scheme, and asynchronous collection is one of its kinds.
    """

    chosen: ClassVar[tuple[str, ...]]
    """Conditions under which flat keywords choose the kind, such as "with col_communication='asynchronous'"."""
    instead: ClassVar[Mapping[str, str]] = {}
    """For some options of the kind, text that is appended to the error if the option is given with another kind."""


def own_names(options: type[Options]) -> list[str]:
    """Return the names of the options that a class declares and does not inherit, in order of declaration."""
    inherited = {name for base in options.__bases__ if issubclass(base, Options) for name in base.declarations()}
    return [name for name in options.declarations() if name not in inherited]


def as_keywords(options: Options) -> dict[str, object]:
    """Return the value of every option, by name."""
    return {name: getattr(options, name) for name in options.declarations()}


def changed_options(options: Options, owner: type[Options], but: tuple[str, ...] = ()) -> dict[str, object]:
    """Return the options that the class `owner` declares and that differ from their defaults, by name.

    Args:
        options: An instance of `owner` or of a subclass.
        owner: The class.
        but: Options to leave out.
    """
    return {name: getattr(options, name) for name in options.changed()
            if name in owner.declarations() and name not in but}


def build(options: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """Build an object of the class `options` from the keywords in `given` that are fields of the class."""
    names = options.declarations()
    return options(**{name: value for name, value in given.items() if name in names})


def from_keywords(owner: str, options: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """Build an object of the class `options` from keywords; raise `ConfigError` if a keyword is not a field."""
    refuse_unknown(given, {name: ("scheme", name) for name in options.declarations()}, f"{owner} has no option")
    return options(**given)


def options_of(owner: type[OptionsT], collection: Options) -> OptionsT:
    """Return `collection` if it is an instance of `owner`; otherwise, return an `owner` with default values.

    The caller can therefore read the options that `owner` defines, whatever class of options `collection` has.
    """
    return collection if isinstance(collection, owner) else owner()


SHORT_QUEUE, LONG_QUEUE = 1, 16
"""Values for `queue_size=None`: for data that are best used soon, and for data of any age."""
FEW_IN_FLIGHT, MANY_IN_FLIGHT = 1, 2
"""Values for `col_in_flight=None`, for the same two kinds of data."""


@dataclass(frozen=True, kw_only=True)
class QueueOptions(Options):
    """The capacity of the queue in front of an asynchronous learner."""

    queue_size: int | None = option(
        None, low=1, help="Largest number of train batches that are requested or wait for an asynchronous learner, and "
        "so the bound of the policy lag in train batches. While the learner has to wait for data, only col_in_flight "
        "limits requests. With replay shards, the largest number of batches that are requested or waiting, over all "
        "shards. None: 1; for data of any age (replay, buffer=\"circular\"), 16.")


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions(Options):
    """The number of batches that are prepared in advance."""

    prefetch: int | None = option(
        None, low=0, help="Number of microbatches (0 or 1) that remote collection workers collect in advance, while "
        "the gradient of another one is computed; None: 1 where possible. With replay shards, the number of batches "
        "requested from each shard in advance; None: 4.")
