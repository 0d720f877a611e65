"""Write the values of options as text, on the command line and in Python, and parse the text of the command line."""

from __future__ import annotations

import collections.abc
import enum
import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import TypeVar

from pytorchrl.agent.schedules import FORMS, Schedule, schedule_of
from pytorchrl.errors import ConfigError
from pytorchrl.support.code import CALL, Code, as_code, is_reference
from pytorchrl.support.display import shortened

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_UNIONS = (typing.Union, types.UnionType)
_MAPPINGS = (dict, collections.abc.Mapping)
CODE_FORM = "MODULE:NAME"
"""The form of code as text."""
_NAMES = {"JSON": "a JSON object like '{\"name\": 1}'", "SCHEDULE": f"a schedule ({FORMS})",
          CODE_FORM: f'code such as my_project:name, or, with arguments, {{"{CALL}": "my_project:name", "size": 3}}'}
_SCHEDULE = re.compile(r"(?P<name>[a-z]+(?=[:(])|(?=[\[(]))(?P<numbers>[\[(:].*)", re.DOTALL)
_LONGEST_JSON = 100_000
_LONGEST_ECHO = 100


def to_text(value: object) -> str:
    """Return the value of an option as a user would type it on the command line, such as `linear:0.001:0`.

    `parse` is the inverse for all values that have a form as text.
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Schedule):
        return ":".join(str(part).removesuffix(".0") for part in value.parts())
    if isinstance(value, tuple):
        return ",".join(map(to_text, value)) or "empty"
    if isinstance(value, collections.abc.Mapping):
        return json.dumps(dict(value))
    return str(value.value if isinstance(value, enum.Enum) else value)


def to_python(value: object) -> str:
    """Return the value of an option as it is written in Python; the text is the same in every process.

    A member of an enum is written as its value. Sets are sorted, and memory addresses are left out.
    """
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if isinstance(value, (dict, types.MappingProxyType)):
        return "{" + ", ".join(f"{to_python(key)}: {to_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return repr(sorted(value, key=repr))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def items_of(values: Mapping[str, object]) -> list[str]:
    """Return "name=value" for each option, in one line of moderate length, for the `repr` of objects.

    Functions and classes are written as their names.
    """
    return [shortened(f"{name}={getattr(value, '__qualname__', None) or to_python(value)}")
            for name, value in values.items()]


def items_of_call(name: str, values: Mapping[str, object]) -> list[str]:
    """Return the text "name(option=value, ...)", divided at its commas."""
    return f"{name}({', '.join(items_of(values))})".split(", ")


def parse(text: str, hint: object) -> object:
    """Parse text into a value of the type `hint`, which an option declares.

    Code is not imported: the value is a `Code`.

    Raises:
        ConfigError: The text has the wrong form; the message states the expected forms.
    """
    readers = _readers(hint)
    for _, read in readers:
        try:
            return read(text)
        except ConfigError:  # noqa: PERF203 - there are only a few readers
            raise
        except (ValueError, OverflowError):  # the text has another form
            continue
    expected = " or ".join(_NAMES.get(name, name) for name, _ in readers)
    raise ConfigError(f"expected {expected}, got {text[:_LONGEST_ECHO]!r}")


def form_of(hint: object) -> str:
    """Return the form of a value as text, such as `NUMBER|none`."""
    return "|".join(dict.fromkeys(name for name, _ in _readers(hint)))


def takes_code(hint: object) -> bool:
    """Return whether values of a type may be code: classes or functions, or a tuple of them."""
    return any(name in (CODE_FORM, f"{CODE_FORM},...", "SCHEDULE") for name, _ in _readers(hint))


T = TypeVar("T")
_Reader = tuple[str, Callable[[str], object]]


def _readers(hint: object) -> list[_Reader]:
    """Return a pair (form, parser) for each form of text, such as "NUMBER", that can be parsed into the type `hint`.

    The help shows the forms. The parsers are tried in this order, so the parser of plain text comes last.
    """
    if typing.get_origin(hint) in _UNIONS:
        members = typing.get_args(hint)
        found = [reader for member in members for reader in _readers(member)]
        if str in members and any(isinstance(member, enum.EnumMeta) for member in members):
            # Leave the text of an enum unparsed: the `Options` class converts it, and reports all errors at once.
            found = [(form, str) if reads in members else (form, reads) for form, reads in found if form != "TEXT"]
        order = ["none", "INT", "NUMBER", "SCHEDULE"]
        return sorted(found, key=lambda reader: order.index(reader[0]) if reader[0] in order else
                      99 if reader[0] == "TEXT" else 50)
    return _reader(hint)


def _reader(hint: object) -> list[_Reader]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    simple: dict[object, _Reader] = {
        bool: ("yes|no", _bool), int: ("INT", _int), float: ("NUMBER", float), str: ("TEXT", str),
        Schedule: ("SCHEDULE", _schedule), type(None): ("none", _none),
    }
    if hint in simple:
        return [simple[hint]]
    if origin is tuple:
        (form, read), *_ = _readers(arguments[0])
        return [(f"{form},...", _codes if form == CODE_FORM else lambda text: _tuple(read, text))]
    if origin is typing.Literal:
        return [("|".join(map(str, arguments)), lambda text: _literal(arguments, text))]
    if (origin or hint) in _MAPPINGS:
        return [("JSON", _mapping)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [("|".join(str(member.value) for member in hint), hint)]
    if isinstance(own := origin or hint, type) and issubclass(own, os.PathLike):
        return [("TEXT", str)]
    return [(CODE_FORM, _code)]


def _bool(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError(text)
    return _WORDS[text.lower()]


def _none(text: str) -> None:
    if text.lower() not in ("none", "null"):
        raise ValueError(text)


def _int(text: str) -> int:
    """Parse a whole number; `08` and `1e6` are allowed."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _schedule(text: str) -> Schedule | Code:
    """Parse a schedule: `linear:1e-3:0`, a call such as `linear(1e-3, 0)`, a list of points, or the name of a function.

    Calls and lists have Python's syntax.
    """
    if is_reference(text):
        return Code(text)
    said = _SCHEDULE.fullmatch(text.replace(" ", ""))
    if said is None:
        raise ValueError(text)
    name = said["name"] or ("piecewise" if text.lstrip()[0] in "[(" else "")
    return schedule_of([name, *filter(None, re.split(r"[\[\](),:]", said["numbers"]))])


def _tuple(read: Callable[[str], T], text: str) -> tuple[T, ...]:
    return tuple(read(item) for item in text.replace(" ", "").strip("()[]").split(",") if item)


def _code(text: str) -> Code:
    """Parse the name of code, or a JSON object that contains its arguments, too."""
    value = as_code(_mapping(text) if text.lstrip().startswith("{") else text)
    if not isinstance(value, Code):
        raise ValueError(text)
    return value


def _codes(text: str) -> tuple[Code, ...]:
    """Parse names of code, separated by commas, or one JSON object, as in `_code`."""
    return (_code(text),) if text.lstrip().startswith("{") else _tuple(_code, text)


def _literal(choices: tuple[object, ...], text: str) -> object:
    for choice in choices:
        if str(choice) == text:
            return choice
    raise ValueError(text)


def _mapping(text: str) -> dict[str, object]:
    if len(text) > _LONGEST_JSON:
        raise ConfigError(f"a JSON value may have at most {_LONGEST_JSON} characters, got {len(text)}")
    if not text.lstrip().startswith("{"):
        raise ValueError(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"expected {_NAMES['JSON']}, got {text[:_LONGEST_ECHO]!r}") from None
    return dict(value)
