"""Argument parsers: flags from option tables, errors with the nearest flag."""

from __future__ import annotations

import argparse
import json
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pytorchrl.agent.names import Known, suggestion
from pytorchrl.agent.schedules import Schedule
from pytorchrl.cli.values import form_of, parser_for
from pytorchrl.scheme_options import GROUPS
from pytorchrl.terminal import printable

if TYPE_CHECKING:
    from pytorchrl.composition import OptionSpec

_TITLES = {
    "learner": "run", "algorithm": "algorithm", "storage": "storage", "actor": "actor", "environments": "environments", **GROUPS,
}


class Parser(argparse.ArgumentParser):
    """A parser that suggests a flag for each unknown one, and accepts no abbreviations.

    Args:
        known: Options of the command, name -> (home, own name); None: the command has only flags of its own.
        options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, known: Known | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._known = dict(known or {})
        # By default `-1e-3` and `-inf` are taken for flags, before anyone can say that they are out of range.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; for unknown words show the usage line and suggestions, and exit with status 2."""
        if not {"-h", "--help"} & set(arguments):
            # Checked before argparse reports missing flags: an unknown flag may replace one, as --env-id does for --env.
            self._refuse([word for word in arguments if word.startswith("--") and word.split("=")[0] not in {
                "--", *self._option_string_actions}])
        namespace, unknown = self.parse_known_args(list(arguments))
        self._refuse(unknown)
        return namespace

    def _refuse(self, words: Sequence[str]) -> None:
        """Exit with an error that names all unknown flags, or else the first of these words; do nothing if there are none."""
        flags = {name_of(flag): ("", name_of(flag)) for flag in self._option_string_actions if flag.startswith("--")}
        known = {**flags, **self._known}
        unknown = [word for word in words if word.startswith("-")]
        if unknown:
            self.error("; ".join(f"no flag {word!r}" + (suggestion(
                name_of(word.split("=")[0]), known, lambda name: flag_of(name) if name in flags else f"{name} in Python") or "; see --help")
                for word in unknown))
        if words:
            self.error(f"no argument {words[0]!r}; see --help")

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
        flag, group = flag_of(name), groups[spec.group]
        text = f"{spec.help.rstrip('.')} [{_shown(preset.get(name, spec.default))}]".replace("%", "%%")
        metavar = "|".join(map(_shown, spec.choices)) if spec.choices is not None else form_of(spec.hint)
        given: dict[str, Any] = {"dest": name, "type": parse, "default": argparse.SUPPRESS, "help": text,
                                 "metavar": metavar}
        if spec.hint is bool or {bool, str} <= set(typing.get_args(spec.hint)):
            group.add_argument(flag, nargs="?", const=True, **given)
            group.add_argument(f"--no-{flag[2:]}", dest=name, action="store_const", const=False,
                               default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        elif typing.get_origin(spec.hint) is tuple:
            group.add_argument(flag, nargs="+", action=_Joined, **{**given, "metavar": (metavar, metavar.split(",")[0])})
        else:
            group.add_argument(flag, **given)


def flag_of(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def name_of(flag: str) -> str:
    """Return the option name of a flag; `flag_of` is the inverse."""
    return flag.removeprefix("--").replace("-", "_")


class _Joined(argparse.Action):
    """Store the values in all words of a flag as one tuple: `64 64` is the same as `64,64`."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(item for value in values for item in value))


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
