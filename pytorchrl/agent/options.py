"""Declare, check, print and pickle the settings of every part of an agent.

The options of a part `X` and their defaults are declared only in the frozen dataclass `X.Options`.
`X.create_factory(**options)` checks names, types and ranges immediately and returns a `Factory`, a picklable and
printable recipe that workers call.
The command line generates its flags from the same declarations.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from pytorchrl.agent.declarations import Declaration, declarations_of
from pytorchrl.agent.names import options_of, refuse_unknown
from pytorchrl.agent.option_values.text import to_python
from pytorchrl.errors import ConfigError, ContractError, FactoryError, Problem
from pytorchrl.support.problems import error_of, problems_of, raise_all
from pytorchrl.support.untyped import FieldValue, OptionsOfSubclass

if TYPE_CHECKING:
    from typing_extensions import Self

T_co = TypeVar("T_co", covariant=True)
# An error quotes at most this many characters of the given arguments.
_LONGEST_ECHO = 200


def option(  # noqa: PLR0913 - each parameter is a part of a declaration
    default: object = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    exclusive: bool = False,
    choices: tuple[object, ...] | None = None,
    updatable: bool = False,
    check: Callable[..., object] | None = None,
    default_factory: Callable[[], object] | None = None,
) -> FieldValue:
    """Declare one field of an `Options` class.

    Args:
        default: The default; leave it out for a required option.
        help: One sentence for users, with the unit of the value.
        low: Smallest allowed value; it also applies to all values of a `Schedule`.
        high: Largest allowed value; it also applies to all values of a `Schedule`.
        exclusive: Whether `low` itself is refused, except as the last value of a `Schedule`.
        choices: All allowed values; None if the option has no list of values.
        updatable: Whether `update_algorithm_parameter` may change the option during training.
        check: Function that receives a value of the right type, raises `ConfigError` if the value is wrong, and returns
            the value to store.
        default_factory: Function that returns a mutable default; None if the default is not mutable.
    """
    metadata = {
        "help": help, "low": low, "high": high, "exclusive": exclusive, "choices": choices, "updatable": updatable,
        "check": check,
    }
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base class of all `Options` classes; an instance checks the types, ranges and choices of its fields.

    Some values are converted. An option that may be a `Schedule` also accepts a function of the remaining share of the
    experiment, or a list of points (env step, value). An option that is annotated with an enum also accepts the value
    of a member.

    A class may inherit the options of several classes. If it overrides `__post_init__` or `contradictions`, the method
    must call that of `super()` first.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_conflicts(cls)

    def __post_init__(self) -> None:
        """Convert each value to the form in which it is stored, and check it; report all problems in one error."""
        problems: list[Problem] = []
        for name, declaration in self.declarations().items():
            value = getattr(self, name)
            if value is declaration.field.default and declaration.is_default_valid:
                continue
            try:
                self._store(declaration, value)
            except ConfigError as error:
                problems += problems_of(error)
        raise_all(problems)
        if found := list(self.contradictions()):
            contradiction = error_of(found)
            contradiction.contradictory = self
            raise contradiction

    def _store(self, declaration: Declaration, value: object) -> None:
        """Check a value, and store it in the form that its declaration describes."""
        try:
            value = declaration.stored(value)
        except ConfigError as error:
            raise error_of(dataclasses.replace(problem, options=(declaration.name,))
                           for problem in problems_of(error)) from error
        object.__setattr__(self, declaration.name, value)  # the class is frozen, and only its own methods set fields

    def replaced(self, **values: object) -> Self:
        """Return a copy with other values of some options, which are checked, but not for contradictions.

        Raises:
            ConfigError: A value is not allowed.
        """
        other = copy.copy(self)
        for name, value in values.items():
            other._store(self.declarations()[name], value)
        return other

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for each contradiction between these options, and for each option without an effect.

        A subclass that overrides this method must also yield the problems of `super().contradictions()`.
        """
        yield from ()

    @classmethod
    def declarations(cls) -> Mapping[str, Declaration]:
        """Return the declarations of all options of this class, by name, in the order of its fields."""
        return declarations_of(cls)  # type: ignore[arg-type] # mypy confuses __hash__ of instances and class

    def changed(self) -> tuple[str, ...]:
        """Return the names of the options that differ from their defaults; required options always differ."""
        found = self.declarations()
        return tuple(name for name, declaration in found.items() if getattr(self, name) != declaration.default)

    def _without_effect(self, names: Sequence[str], needs: str, *others: str) -> Iterator[Problem]:
        """Yield a problem if an option in `names` differs from its default.

        Args:
            names: Options that have no effect, because another setting that they need is missing.
            needs: The missing setting, as the error message names it.
            others: Names of the options that the missing setting concerns.
        """
        changed = self.changed()
        if wrong := [name for name in names if name in changed]:
            yield Problem(f"{', '.join(wrong)} needs {needs}", f"give it, or leave {', '.join(wrong)} out",
                          (*wrong, *others))


def _refuse_conflicts(cls: type[Options]) -> None:
    """Raise `ConfigError` if a class inherits an option from several bases that declare it differently.

    Python would silently use the declaration of one base. If the class itself declares the option again, there is no
    conflict.
    """
    found: dict[str, tuple[type, object]] = {}
    for base in cls.__bases__:
        for name, field in getattr(base, "__dataclass_fields__", {}).items():
            first, other = found.setdefault(name, (base, field))
            differing = [part for part in ("type", "default", "default_factory", "metadata")
                         if getattr(field, part) != getattr(other, part)]
            if differing and name not in inspect.get_annotations(cls):
                homes = [declaring(kind, name).__qualname__ for kind in (first, base)]
                raise ConfigError(f"{cls.__qualname__} inherits {name} from {' and '.join(homes)}, which declare it "
                                  "differently; declare it once, in a class that both inherit, or again in "
                                  f"{cls.__qualname__}")


def declaring(cls: type, name: str) -> type:
    """Return the most derived class that declares an option of a class of options."""
    return next(kind for kind in cls.__mro__ if name in inspect.get_annotations(kind))


class PartFactory(Protocol[T_co]):
    """The members of a factory that describe the part it builds; `agent.factories` adds the arguments of the call."""

    @property
    def cls(self) -> type[T_co]:
        """The class of the part."""

    @property
    def options(self) -> OptionsOfSubclass:
        """The checked options of the part."""

    def with_options(self, **values: object) -> Self:
        """Return a copy of the factory with other values of some options."""


@dataclass(frozen=True)
class Factory(Generic[T_co]):
    """A recipe for one part of an agent: a class and its checked options.

    Calling the factory builds the part. Workers pass the arguments that only they know (device, seed, other parts).
    """

    cls: type[T_co]
    options: OptionsOfSubclass

    def __call__(self, **context: object) -> T_co:
        """Build the part, with the keyword arguments `context` from the worker."""
        build: Callable[..., T_co] = self.cls
        return build(self.options, **context)

    def with_options(self, **values: object) -> Self:
        """Return a copy of the factory with other values of some options.

        Raises:
            ConfigError: A value is not allowed, or options contradict each other.
        """
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **values))

    def __repr__(self) -> str:
        """Return the call that creates an equal factory, with the options that differ from their defaults."""
        changed = {name: getattr(self.options, name) for name in self.options.changed()}
        return creation_text(self.cls.__name__, (), changed)


def creation_text(owner: str, arguments: Iterable[object], keywords: Mapping[str, object]) -> str:
    """Return the call of `create_factory` of the class `owner` with these arguments, as it is written in Python."""
    texts = [*map(to_python, arguments), *(f"{name}={to_python(value)}" for name, value in keywords.items())]
    return f"{owner}.create_factory({', '.join(texts)})"


def check_is_complete(cls: type) -> None:
    """Raise `ContractError` if a class does not define every abstract method of its base."""
    if inspect.isabstract(cls):
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        base = next(base for base in cls.__mro__[1:] if missing[0] in vars(base))
        raise ContractError(f"{cls.__name__} does not define {', '.join(missing)}; define every method that "
                            f"{base.__name__} declares abstract")


def build_options(owner: type, options: Mapping[str, object]) -> OptionsOfSubclass:
    """Return `owner.Options(**options)`.

    Raises:
        ConfigError: A name is unknown or missing, a value is not allowed, or `owner.Options` is not declared as a
            dataclass.
        ContractError: The class does not define every abstract method of its base.
    """
    check_is_complete(owner)
    check_declaration(owner)
    refuse_unknown(options, options_of(owner), f"{owner.__name__} has no option")
    own = options_class(owner)
    missing = [name for name, declaration in own.declarations().items()
               if declaration.is_required and name not in options]
    if missing:
        raise_all([Problem(f"{owner.__name__} needs {', '.join(missing)}", options=tuple(missing))])
    return own(**options)


def options_class(owner: type) -> type[Options]:
    """Return `owner.Options`, the class of the options of a part that `check_declaration` accepts."""
    own = getattr(owner, "Options", None)
    assert isinstance(own, type)
    assert issubclass(own, Options), own
    return own


def check_declaration(owner: type) -> None:
    """Refuse an `Options` class of a user's own part if Python would ignore some of its fields.

    Raises:
        ConfigError: `owner.Options` does not inherit from `Options`, has fields but no @dataclass decorator, or
            changes the default of an option without annotating it. The message names the class and the fields.
    """
    own = getattr(owner, "Options", None)
    if not (isinstance(own, type) and issubclass(own, Options)):
        raise ConfigError(f"{owner.__name__}.Options must be a class that inherits from the Options of the part it "
                          f"extends, got {own!r}")
    for kind in own.__mro__:
        if kind is Options or not issubclass(kind, Options):
            continue
        annotations = inspect.get_annotations(kind)
        annotated = {name for name, hint in annotations.items() if "ClassVar" not in str(hint)}
        if annotated and "__dataclass_fields__" not in vars(kind):
            raise ConfigError(f"{kind.__qualname__} declares {', '.join(sorted(annotated))} but is not a dataclass; "
                              "write @dataclass(frozen=True, kw_only=True) above it")
        inherited = {name for base in kind.__bases__ for name in getattr(base, "__dataclass_fields__", {})}
        bare = [name for name, value in vars(kind).items() if name not in annotations
                and (name in inherited or isinstance(value, dataclasses.Field))]
        if bare:
            raise ConfigError(f"{kind.__qualname__} sets {', '.join(bare)} without an annotation, which has no "
                              f"effect; write `{bare[0]}: <type> = ...` under @dataclass(frozen=True, kw_only=True)")


@dataclass(frozen=True)
class AgentOptions:
    """The values with which `Part.contradiction` checks the options of an agent's parts against each other.

    Each part is checked twice: by `Scheme`, before anything is built, and by the part's constructor. A value that is
    not known at that time is None, and the rules that depend on it are skipped.
    """

    algorithm: OptionsOfSubclass = None
    actor: OptionsOfSubclass = None
    storage: OptionsOfSubclass = None
    has_memory: bool | None = None
    """Whether the actor has memory between observations."""
    num_envs: int | None = None
    """E, the number of environments of one collector."""


class Part:
    """The base class of all parts of an agent, which workers build from checked options.

    A subclass defines `Options` and `create_factory`. Calling the class itself without checked options, as in `PPO()`
    or `VecEnv("CartPole-v1")`, raises an error that shows the right call.
    """

    home: ClassVar[str]
    """The kind of part, a key of `names_elsewhere.HOMES`."""

    @classmethod
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return an error message with a remedy if options of this part contradict other options; otherwise None.

        A subclass overrides this method if its own options may contradict others.
        """
        return None

    @classmethod
    def refuse_contradiction(cls, agent: AgentOptions) -> None:
        """Raise `ConfigError` if options of this part contradict other options; see `contradiction`."""
        if problem := cls.contradiction(agent):
            raise ConfigError(problem)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and list(inspect.signature(cls.__init__).parameters)[1:2] == ["options"]:
            cls.__init__ = _takes_checked_options(cls.__init__)  # type: ignore[method-assign]


def _takes_checked_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it refuses a first argument other than checked options."""
    @functools.wraps(init)
    def checked(self: object, *args: object, **kwargs: object) -> None:
        options = args[0] if args else kwargs.get("options")
        if not isinstance(options, Options):
            name = type(self).__name__
            given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
            raise FactoryError(f"{name}({given[:_LONGEST_ECHO]}) needs checked options, which workers pass to it; "
                               f"create a factory with {name}.create_factory(...)")
        init(self, *args, **kwargs)

    return checked
