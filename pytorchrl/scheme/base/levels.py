"""Convert the options of several classes to flat keywords (keyword arguments of `Scheme`), and back.

Each class declares its options in its own `Options` class. A kind, such as asynchronous collection, inherits only from
the `Options` classes that it needs, so it has no fields for options that would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pytorchrl.agent.names import refuse_unknown
from pytorchrl.agent.options import Options
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.base.worker import CENTRAL, PARALLEL, check_execution

OptionsT = TypeVar("OptionsT", bound=Options)
KindT = TypeVar("KindT", bound="Kind")


class Kind(Options):
    """Base class of kinds. A kind is one variant of a level, and declares the options that this variant needs.

    For example, collection is a level of a scheme, and asynchronous collection is one of its kinds.
    """

    title: ClassVar[str]
    """Name of the kind in error messages, such as "asynchronous collection"."""
    chosen_by: ClassVar[str]
    """Flat keywords that choose the kind, such as "col_communication='asynchronous'"."""
    instead: ClassVar[Mapping[str, str]] = {}
    """For some options of the kind, text that is appended to the error if the option is given with another kind."""


def own_names(options: type[Options]) -> list[str]:
    """Return the names of the options that a class declares and does not inherit, in order of declaration."""
    inherited = {name for base in options.__bases__ if issubclass(base, Options) for name in base.declarations()}
    return [name for name in options.declarations() if name not in inherited]


def as_keywords(options: Options) -> dict[str, object]:
    """Return the value of every option, by name."""
    return {name: getattr(options, name) for name in options.declarations()}


def build(options: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """Build an object of the class `options` from the keywords in `given` that are fields of the class."""
    names = options.declarations()
    return options(**{name: value for name, value in given.items() if name in names})


def from_keywords(owner: str, options: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """Build an object of the class `options` from keywords; raise `ConfigError` if a keyword is not a field."""
    refuse_unknown(given, {name: ("scheme", name) for name in options.declarations()}, f"{owner} has no option")
    return options(**given)


def misplaced(given: Mapping[str, object], chosen: type[KindT], kinds: Sequence[type[KindT]]) -> list[str]:
    """Return an error message for each given option that the chosen kind lacks, but one of its alternatives has.

    An option that is given with its default value is accepted.

    Args:
        given: Values of the given options, by name.
        chosen: The chosen kind, such as the class of options of asynchronous collection.
        kinds: The chosen kind and its alternatives, such as all kinds of collection.
    """
    problems = []
    for name, value in given.items():
        homes = [kind for kind in kinds if name in kind.declarations()]
        if not homes or chosen in homes:
            continue
        declaration = homes[0].declarations()[name]
        if problem := declaration.problem(value):
            problems.append(problem)
        elif value != declaration.default:
            problems.append(
                f"{name}={_shown(value)} is for {' or '.join(kind.title for kind in homes)}, but this is "
                f"{chosen.title}; give {' or '.join(dict.fromkeys(kind.chosen_by for kind in homes))}, or leave {name} "
                f"out{homes[0].instead.get(name, '')}")
    return problems


def _shown(value: object) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


def raise_all(problems: Iterable[str]) -> None:
    """Raise one `ConfigError` that names all problems; do nothing if there are none."""
    if texts := list(dict.fromkeys(problems)):
        raise ConfigError("; ".join(texts))


class Reader:
    """Builds options from keyword arguments of `Scheme`, and collects the messages of all errors in `problems`."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given, self.problems = dict(given), list[str]()

    def read(self, options: type[OptionsT]) -> OptionsT | None:
        """Return an object of the class `options`; if a value is not allowed, record the problem and return None."""
        try:
            return build(options, self.given)
        except ConfigError as error:
            self.problems.append(str(error))
            return None

    def choose(self, kind: type[KindT], kinds: Sequence[type[KindT]]) -> KindT | None:
        """Build options of class `kind`; record a problem for each given keyword that only other `kinds` have."""
        self.problems += misplaced(self.given, kind, kinds)
        return self.read(kind)

    def refuse(self, level: str, names: Iterable[str]) -> None:
        """Record a problem if a keyword in `names` was given in addition to an object with the options of `level`."""
        if both := [name for name in names if name in self.given]:
            self.problems.append(f"{', '.join(both)} and {level}= are two forms of the same settings; give {both[0]} "
                                 f"as an option of {level}, or leave {level} out")

    def with_execution(self, options: Any, level: str) -> Any:  # `options`: an object of a subclass of `Kind`, or None
        """Return `options`, with a default for `{level}_execution`: "Parallel" for several workers, "Central" for one.

        If a given `{level}_execution` contradicts the number of workers, a problem is recorded.
        """
        if options is None:
            return None
        name, count = f"{level}_execution", options.num_workers
        execution = getattr(options, name)
        if execution is None:
            return replace(options, **{name: PARALLEL if count > 1 else CENTRAL})
        try:
            check_execution(level, execution, count)
        except ConfigError as error:
            self.problems.append(str(error))
        return options
