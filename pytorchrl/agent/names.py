"""Report unknown names of options; each error message suggests the option that was probably meant.

Every owner of options reports unknown names through this module: parts of an agent, the scheme, the learner, `train`
and the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from pytorchrl.agent.names_elsewhere import HOMES, Here, elsewhere
from pytorchrl.errors import Problem
from pytorchrl.support.problems import error_of, raise_all

P = ParamSpec("P")
R = TypeVar("R")

Known = Mapping[str, tuple[str, str]]
"""For each option, by its name as the user writes it: a key of `HOMES`, and the option's name in its part.

The two names differ for options that `train` and the command line rename.
"""

# Smallest similarity of a suggested name to the unknown name. With difflib's default of 0.6, `col_in_flight` would be
# suggested for `config`.
_NEAR = 0.75
# If an owner has more options than this, error messages do not list them.
_MOST_LISTED = 30


def suggestion(name: str, known: Known, show: Callable[[str], str] = repr) -> str:
    """Return the hint for an unknown option, such as "; did you mean ...?", or "" if no hint is found.

    Args:
        name: The unknown name, with `-` or `_` between words.
        known: The options that exist where the user gave the name.
        show: Function that formats an option as the user writes it, for example as a flag.
    """
    name = name.replace("-", "_")
    if found := meaning(name, known, show):
        return found
    if same := [shown for shown, (_, own) in known.items() if own == name]:
        return _did_you_mean(same, None, show)
    if meanings := elsewhere().get(name):
        return f"; {_elsewhere(meanings, {home for home, _ in known.values()})}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    return _did_you_mean(near, None, show) if near else ""


def meaning(name: str, known: Known, show: Callable[[str], str] = repr) -> str:
    """Return the hint "; did you mean ...?" for a name that another library uses for an option in `known`.

    If `known` contains no such option, return "".
    """
    for here in elsewhere().get(name, ()):
        if found := _names_of(here, known):
            return _did_you_mean(found, here, show)
    return ""


def _names_of(here: Here, known: Known) -> list[str]:
    """Return the equivalents of another library's option, as far as `known` contains them.

    Args:
        here: The equivalents in this package.
        known: The options that exist where the user gave the name.

    Returns:
        Keys of `known`. If all equivalents are needed together (`Here.needs_all`), but `known` lacks one of them, the
        list is empty.
    """
    found = [shown for place in here.options for shown, own in known.items() if own == place]
    return [] if here.needs_all and len(found) < len(here.options) else found


def _did_you_mean(names: Iterable[str], here: Here | None, show: Callable[[str], str]) -> str:
    joined = (" and " if here is not None and here.needs_all else " or ").join(map(show, names))
    return f"; did you mean {joined}{_note(here)}?"


def _elsewhere(meanings: Iterable[Here], homes: set[str]) -> str:
    """Return the hint for an option of another library that has no equivalent where the user gave the name.

    The hint names an equivalent and the part that has this option, such as the scheme. If this package has no
    equivalent at all, the hint says what to do instead.

    Args:
        meanings: The possible meanings of the option's name.
        homes: Kinds of parts whose options are accepted where the user gave the name, as keys of `HOMES`.
    """
    *others, last = meanings
    here = others[0] if others and last.at else last
    if not here.at:
        return _plain(here.note)
    places = [f"{name!r} of {'another' if home in homes else 'the'} {HOMES[home]}" for home, name in here.options]
    return f"in this package, use {(' and ' if here.needs_all else ' or ').join(places)}{_note(here)}"


def _note(here: Here | None) -> str:
    return f" ({_plain(here.note)})" if here is not None and here.note else ""


def _plain(note: str) -> str:
    """Return `note` (see `Here.note`) without its backticks, for a message in a terminal."""
    return note.replace("`", "")


def refuse_unknown(given: Iterable[str], known: Known, lead: str = "there is no option") -> None:
    """Refuse names that are not in `known`; the error lists all such names.

    Args:
        given: The names that the user gave.
        known: The options that exist.
        lead: Words before each name in the message.

    Raises:
        ConfigError: A name is unknown; the message suggests the option that was probably meant, or lists the options.
    """
    problems: list[Problem] = []
    for name in given:
        if name not in known:
            hint = suggestion(name, known)
            if not hint and len(known) <= _MOST_LISTED:
                hint = f"; the options are {', '.join(sorted(known))}"
            problems.append(Problem(f"{lead} {name!r}{hint}", options=(name,)))
    raise_all(problems)


def options_of(owner: object) -> Known:
    """Return the options in `owner.Options`, by name; an empty mapping if `owner` has no such class.

    If `owner` has a method `known_keywords`, because its options are declared in several classes, return its result.
    """
    if hasattr(owner, "known_keywords"):
        known: Known = owner.known_keywords()
        return known
    options = getattr(owner, "Options", None)
    home = getattr(owner, "home", "")
    fields = dataclasses.fields(options) if dataclasses.is_dataclass(options) else ()
    return {field.name: (home, field.name) for field in fields}


def checked_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method to raise `ConfigError` for unknown, missing, unnamed and repeated arguments.

    The decorated method keeps its signature. Its known keywords are its own parameters and, if it accepts `**options`,
    the fields of its class's `Options`.
    """
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)][1:]
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            owner: type[object] = args[0] if isinstance(args[0], type) else type(args[0])
            home = getattr(owner, "home", "")
            known = {parameter.name: (home, parameter.name) for parameter in parameters}
            known |= options_of(owner) if takes_more else {}
            refuse_unknown(kwargs, known, f"{owner.__name__} has no option")
            raise error_of([_problem_of_call(owner.__name__, parameters, known, args[1:], kwargs)]) from None
        return function(*args, **kwargs)

    return checked


def _problem_of_call(owner: str, parameters: Sequence[inspect.Parameter], known: Iterable[str],
                     args: Sequence[object], kwargs: Mapping[str, object]) -> Problem:
    """Return why a call with known names does not fit its parameters: an argument is unnamed, repeated or missing."""
    unnamed = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if extra := args[len(unnamed):]:
        allowed = f"only {', '.join(unnamed)} without a name" if unnamed else "options by name only"
        example = next(name for name in known if name not in unnamed)
        return Problem(f"{owner} takes {allowed}, got {', '.join(map(repr, extra))}",
                       f"write the name of each option, as in {example}=...")
    if repeated := [name for name in unnamed[:len(args)] if name in kwargs]:
        return Problem(f"{owner} got {', '.join(repeated)} twice, without a name and by name", options=tuple(repeated))
    given = {*unnamed[:len(args)], *kwargs}
    missing = tuple(parameter.name for parameter in parameters
                    if parameter.default is parameter.empty and parameter.name not in given)
    return Problem(f"{owner} needs {', '.join(missing)}", options=missing)
