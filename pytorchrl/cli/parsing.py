"""Argument parsers: flags from option tables, errors with the nearest flag."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pytorchrl.agent.schedules import Schedule
from pytorchrl.cli.values import form_of, parser_for
from pytorchrl.terminal import printable

if TYPE_CHECKING:
    from pytorchrl.composition import OptionSpec

_TITLES = {
    "learner": "run", "scheme": "scheme: where each operation runs, and who waits for whom",
    "algorithm": "algorithm", "storage": "storage", "actor": "actor", "environments": "environments",
}


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest flag when it meets an unknown one, and takes no abbreviations.

    Args:
        synonyms: Flags that there are not -> the one that is meant.
        options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, synonyms: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._synonyms = dict(synonyms or {})
        # By default `-1e-3` and `-inf` are taken for flags, before anyone can say that they are out of range.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse; on an unknown word show the usage line and the nearest flag, and exit with 2."""
        namespace, unknown = self.parse_known_args(list(arguments))
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            name = word.split("=")[0]
            near = [self._synonyms[name]] if name in self._synonyms else difflib.get_close_matches(
                name, self._option_string_actions, n=1)
            kind = "flag" if word.startswith("-") else "argument"
            self.error(f"no {kind} {word!r}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
        return namespace

    def error(self, message: str) -> NoReturn:
        """Usage and message on stderr, exit code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"pytorchrl: error: {printable(message)}\n")


def add_option_flags(parser: argparse.ArgumentParser, specs: Mapping[str, OptionSpec], preset: Mapping[str, Any],
                     ) -> None:
    """One flag for each option that a text can stand for; flags not given are not in the namespace.

    Args:
        parser: Where to add them, in one group a part.
        specs: The options.
        preset: Values that hold where the option is not given, in place of its default.
    """
    groups = {part: parser.add_argument_group(title) for part, title in _TITLES.items()}
    for name, spec in specs.items():
        parse = parser_for(spec.hint)
        if parse is None:
            continue
        flag, group = flag_of(name), groups[spec.part]
        text = f"{spec.help.rstrip('.')} [{_shown(preset.get(name, spec.default))}]".replace("%", "%%")
        metavar = "|".join(map(_shown, spec.choices)) if spec.choices is not None else form_of(spec.hint)
        given: dict[str, Any] = {"dest": name, "type": parse, "default": argparse.SUPPRESS, "help": text,
                                 "metavar": metavar}
        if spec.hint is bool or {bool, str} <= set(typing.get_args(spec.hint)):
            group.add_argument(flag, nargs="?", const=True, **given)
            group.add_argument(f"--no-{flag[2:]}", dest=name, action="store_const", const=False,
                               default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        else:
            group.add_argument(flag, **given)


def flag_of(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    """A default as one would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(_shown, value)) or "empty"
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, Schedule):
        return ":".join(part if isinstance(part, str) else f"{part:.12g}" for part in value.parts())
    return str(value)
