"""How every part of an agent declares, checks, prints and carries its settings.

A part `X` has one frozen dataclass `X.Options`, the only home of its defaults. `X.create_factory(**options)`
checks names, types and ranges at once and returns a `Factory`: a picklable, printable recipe that workers call.
The command line makes its flags from the same declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pytorchrl.agent.names import options_of, refuse_unknown
from pytorchrl.agent.schedules import Schedule, as_schedule, out_of_range
from pytorchrl.errors import ConfigError, ContractError, FactoryError

T = TypeVar("T")
_UNION_TYPES = (typing.Union, types.UnionType)
# Characters of arguments that an error repeats.
_LONGEST_ECHO = 200


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    exclusive: bool = False,
    choices: tuple[Any, ...] | None = None,
    updatable: bool = False,
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """Declare one field of an `Options` class.

    Args:
        default: Its only default; leave out for a required option.
        help: One sentence for users, with the unit.
        low: Smallest value allowed, which also holds for all values of a `Schedule`.
        high: Largest value allowed.
        exclusive: Whether `low` itself is refused, except as the last value of a `Schedule`.
        choices: The closed set of allowed values.
        updatable: Whether `update_algorithm_parameter` may change it while training.
        default_factory: Makes the default where it is mutable.
    """
    metadata = {
        "help": help, "low": low, "high": high, "exclusive": exclusive, "choices": choices, "updatable": updatable,
    }
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of all `Options` classes, which checks every field's type, range and choice when it is built.

    If an option may be a `Schedule`, a function of the remaining share of the experiment, or a list of points
    (env step, value), is converted to one.
    """

    def __post_init__(self) -> None:
        """Convert lists to tuples and functions to schedules, then check each field; report all problems at once."""
        hints = typing.get_type_hints(type(self))
        problems = []
        for field in dataclasses.fields(self):
            try:
                value = _settled(field, hints[field.name], getattr(self, field.name))
            except ConfigError as error:
                problems.append(str(error))
                continue
            object.__setattr__(self, field.name, value)  # the class is frozen, and only this method may set a field
            problem = _problem(field, hints[field.name], value)
            if problem:
                problems.append(problem)
        if problems:
            raise ConfigError("; ".join(problems))

    def _refuse_changed(self, names: Sequence[str], needs: str) -> None:
        """Raise `ConfigError` if one of these options differs from its default; without `needs`, it has no effect."""
        changed = [name for name in names if getattr(self, name) != type(self).__dataclass_fields__[name].default]
        if changed:
            raise ConfigError(f"{', '.join(changed)} needs {needs}")


def _problem(field: dataclasses.Field[Any], hint: Any, value: Any) -> str | None:
    if not field.metadata:
        return None
    choices = field.metadata["choices"]
    if choices is not None and not (_fits(hint, value) and (callable(value) or value in choices)):  # a function needs no name among the choices
        # Of a class, such as torch.nn.ReLU for "relu", the name counts.
        text = (value.__name__ if isinstance(value, type) else str(value)).lower()
        near = difflib.get_close_matches(text, [str(c) for c in choices], n=1)
        return f"{field.name} must be one of {list(choices)}, got {value!r}" + (
            f"; did you mean {near[0]!r}?" if near else "")
    if not _fits(hint, value):
        return f"{field.name} must be {_type_name(hint)}, got {value!r}"
    # A schedule may end at an excluded bound, because it reaches the bound only at the last step.
    last = value.values[-1:] if isinstance(value, Schedule) else ()
    for number, is_last in [*((number, False) for number in _numbers(value)), *((number, True) for number in last)]:
        wrong = out_of_range(number, field.metadata["low"], field.metadata["high"], field.metadata["exclusive"] and not is_last)
        if wrong:
            return f"{field.name} must be {wrong}, got {value!r}"
    return None


def _settled(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Return the value in the form that options store: a schedule for a function or points, a tuple for a list."""
    members = (hint, *typing.get_args(hint))
    if field.metadata and Schedule in members[1:]:
        return as_schedule(value, field.name, field.metadata["low"], field.metadata["high"], field.metadata["exclusive"])
    return tuple(value) if isinstance(value, list) and any(typing.get_origin(member) is tuple for member in members) else value


def _numbers(value: Any) -> list[float]:
    """Return the numbers in a value, except the last of a schedule."""
    if isinstance(value, Schedule):
        return list(value.values[:-1])
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [value]
    if isinstance(value, tuple):
        return [n for item in value for n in _numbers(item)]
    return []


def _fits(hint: Any, value: Any) -> bool:  # noqa: C901 - one branch a kind of annotation reads best in one place
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in _UNION_TYPES:
        return any(_fits(argument, value) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_fits(arguments[0], item) for item in value)
        return len(value) == len(arguments) and all(map(_fits, arguments, value))
    if origin is typing.Literal:
        return value in arguments
    if hint is None or hint is type(None):
        return value is None
    if origin is not None:
        return callable(value) if not isinstance(origin, type) else isinstance(value, origin)
    if hint is float:  # a whole number is fine where a float is due; a bool or a text never is
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) in _UNION_TYPES:
        return " or ".join(_type_name(argument) for argument in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a tuple or list, each item {_type_name(typing.get_args(hint)[0])}"
    return {int: "a whole number", float: "a number", bool: "True or False", str: "a text",
            type(None): "None"}.get(hint) or getattr(hint, "__name__", str(hint)).replace("typing.", "")


@dataclass(frozen=True)
class Factory(Generic[T]):
    """A recipe for one part of an agent: a class and its checked options.

    Calling it builds the part. Workers call it with what only they know (device, seed, other parts).
    """

    cls: type[T]
    options: Any

    def __call__(self, **context: Any) -> T:
        """Build the part; `context` is what the worker provides, by keyword."""
        return self.cls(self.options, **context)  # type: ignore[call-arg]

    def __repr__(self) -> str:
        """The call that makes this factory again, with the options that differ from their defaults."""
        changed = [f"{field.name}={getattr(self.options, field.name)!r}" for field in dataclasses.fields(self.options)
                   if getattr(self.options, field.name) != _default(field)]
        return f"{self.cls.__name__}.create_factory({', '.join(changed)})"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_is_whole(cls: type) -> None:
    """Raise `ContractError` if a class does not define every abstract method of its base."""
    if inspect.isabstract(cls):
        missing = sorted(cls.__abstractmethods__)  # type: ignore[attr-defined] # an abstract class has them
        base = next(base for base in cls.__mro__[1:] if missing[0] in vars(base))
        raise ContractError(f"{cls.__name__} does not define {', '.join(missing)}; define what {base.__name__} documents "
                            "under that name")


def build_options(owner: type, options: dict[str, Any]) -> Any:
    """Return `owner.Options(**options)`.

    Raises:
        ConfigError: A name is unknown or missing, a value is not allowed, or `owner.Options` is not declared as a dataclass.
        ContractError: The class does not define every abstract method of its base.
    """
    check_is_whole(owner)
    check_declaration(owner)
    refuse_unknown(options, options_of(owner), f"{owner.__name__} has no option")
    missing = [
        field.name for field in dataclasses.fields(owner.Options) if field.name not in options  # type: ignore[attr-defined]
        and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{owner.__name__} needs {', '.join(missing)}")
    return owner.Options(**options)  # type: ignore[attr-defined]


def check_declaration(owner: type) -> None:
    """Refuse an `Options` class of a user's own part if Python would ignore some of its fields.

    Raises:
        ConfigError: `owner.Options` does not inherit from `Options`, has fields but no @dataclass of its own, or changes
            the default of an option without an annotation. The message names the class and the fields.
    """
    own = getattr(owner, "Options", None)
    if not (isinstance(own, type) and issubclass(own, Options)):
        raise ConfigError(f"{owner.__name__}.Options must be a class that inherits from the Options of the part it extends, got {own!r}")
    for kind in own.__mro__:
        if kind is Options or not issubclass(kind, Options):
            continue
        annotated = {name for name, hint in inspect.get_annotations(kind).items() if "ClassVar" not in str(hint)}
        if annotated and "__dataclass_fields__" not in vars(kind):
            raise ConfigError(f"{kind.__qualname__} declares {', '.join(sorted(annotated))} but is not a dataclass; write "
                              "@dataclass(frozen=True, kw_only=True) above it")
        inherited = {name for base in kind.__bases__ for name in getattr(base, "__dataclass_fields__", {})}
        bare = [name for name, value in vars(kind).items() if name not in inspect.get_annotations(kind)
                and (name in inherited or isinstance(value, dataclasses.Field))]
        if bare:
            raise ConfigError(f"{kind.__qualname__} sets {', '.join(bare)} without an annotation, so it has no effect; write "
                              f"`{bare[0]}: <type> = ...` under @dataclass(frozen=True, kw_only=True)")


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent's parts, and the facts about the agent that decide whether they contradict each other.

    A part is checked twice: by `Scheme`, before anything is built, and by its constructor. Either may lack some of this; it is
    then None, and no part concludes anything from it.
    """

    algorithm: Any = None
    actor: Any = None
    storage: Any = None
    has_memory: bool | None = None
    """Whether the actor has memory between observations."""
    num_envs: int | None = None
    """E, environments of one collector."""


class Part:
    """The base of all parts of an agent, which workers build from checked options.

    A subclass has `Options` and `create_factory`. Calling the class itself without checked options, as in `PPO()` or
    `VecEnv("CartPole-v1")`, is refused, and the error shows the right call.
    """

    home: ClassVar[str]
    """The kind of part, a key of `names_elsewhere.HOMES`."""

    @classmethod
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return how options of this part contradict those of other parts, and what to do; None if they do not.

        A subclass with options of its own overrides it.
        """
        return None

    @classmethod
    def refuse_contradiction(cls, agent: AgentOptions) -> None:
        """Raise `ConfigError` if `contradiction` finds one."""
        if problem := cls.contradiction(agent):
            raise ConfigError(problem)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and list(inspect.signature(cls.__init__).parameters)[1:2] == ["options"]:
            cls.__init__ = _takes_checked_options(cls.__init__)  # type: ignore[method-assign]


def _takes_checked_options(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that refuses a first argument other than checked options."""
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        options = args[0] if args else kwargs.get("options")
        if not isinstance(options, Options):
            name = type(self).__name__
            given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
            raise FactoryError(f"{name}({given[:_LONGEST_ECHO]}) needs checked options, with which workers build it; make a factory "
                               f"by {name}.create_factory(...)")
        init(self, *args, **kwargs)

    return checked
