"""Build argument parsers from the declarations of options; errors suggest the most similar flag."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from pytorchrl.agent.names import Known, suggestion
from pytorchrl.agent.option_values.text import CODE_FORM, form_of, parse, takes_code, to_text
from pytorchrl.errors import ConfigError
from pytorchrl.support.terminal import printable
from pytorchrl.support.untyped import Forwarded

if TYPE_CHECKING:
    from pytorchrl.training.composition import OptionSpec

_SHORT = frozenset((
    "target_steps", "log_dir", "seed", "eval_every", "checkpoint_every", "resume", "preset", "lr", "lr_q", "lr_pi",
    "hidden_sizes", "width", "num_envs", "num_col_workers", "col_communication", "device"))
"""The options that the short help lists."""
_WIDEST = 28
"""Number of columns in which the short help shows a flag and its value beside their description."""
_CLAUSE = re.compile(r"[;:(]|[.,](?= )")
"""The end of the first clause of a description."""


class _Help(argparse.HelpFormatter):
    """Formatter that wraps descriptions, and leaves lines of examples and tables, which are indented, as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_WIDEST)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that suggests a similar flag for each unknown flag, and accepts no abbreviations.

    Args:
        known: All options of the command, including those without a flag; errors suggest similar options among them.
            None: errors suggest only flags.
        is_short: Whether the help is short; see `rare`.
        options: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, *, known: Known | None = None, is_short: bool = False, **options: Forwarded) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **options})
        self._known, self._is_short = dict(known or {}), is_short
        # By default, argparse treats `-1e-3` and `-inf` as flags. With this pattern, they are values.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def rare(self, text: str) -> str:
        """Return the help of a flag that is left out of the short help."""
        return argparse.SUPPRESS if self._is_short else text

    def parse(self, arguments: Sequence[str], *, spare: str = "") -> argparse.Namespace:
        """Parse the arguments; if any are unknown, show the usage line and suggestions, and exit with status 2.

        If `spare` is a name, the first word that belongs to no flag may stand anywhere, and is stored under this name.
        """
        if not {"-h", "--help", "--help-all"} & set(arguments):
            # Unknown flags are reported before argparse can report a missing flag, because the unknown flag may be
            # a misspelling of the missing one, such as --env-id for --env.
            self._refuse([word for word in arguments if word.startswith("--") and word.split("=")[0] not in {
                "--", *self._option_string_actions}])
        namespace, unknown = self.parse_known_args(list(arguments))
        if spare:
            word = next((word for word in unknown if not word.startswith("-")), None)
            setattr(namespace, spare, word)
            unknown = [other for other in unknown if other is not word]
        self._refuse(unknown)
        return namespace

    def _refuse(self, words: Sequence[str]) -> None:
        """Exit with an error that names all flags in `words`, or the first word if no word is a flag.

        If `words` is empty, do nothing.
        """
        flags = {name_of(flag): ("", name_of(flag)) for flag in self._option_string_actions if flag.startswith("--")}
        known = {**flags, **self._known}
        unknown = [word for word in words if word.startswith("-")]
        if unknown:
            self.error("; ".join(f"unknown flag {word!r}" + (suggestion(
                name_of(word.split("=")[0]), known,
                lambda name: flag_of(name) if name in flags else f"{name} in Python") or "; see --help")
                for word in unknown))
        if words:
            self.error(f"unexpected argument {words[0]!r}; see --help")

    def error(self, message: str) -> NoReturn:
        """Write the usage and the message to stderr, and exit with code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"pytorchrl: error: {printable(message)}\n")


def titles() -> dict[str, str]:
    """Return the title of each group of options, in the order in which `--help` lists the groups."""
    # This module is imported here because it imports torch, which commands that only read files do not need.
    from pytorchrl.training.composition import GROUPS

    return {"learner": "run: length, files, evaluation and checkpoints", "algorithm": "algorithm", "storage": "storage",
            "actor": "actor", "environments": "environments", **GROUPS}


def add_option_flags(
    parser: argparse.ArgumentParser, specs: Mapping[str, OptionSpec], preset: Mapping[str, object], *, show_all: bool,
) -> None:
    """Add a flag for each option; a flag that is not given sets no attribute.

    The short help has one list of common flags, each with the first clause of its description.

    Args:
        parser: The parser.
        specs: The options; each group of options becomes a group of flags.
        preset: Values of the preset, which the help shows in place of defaults.
        show_all: Whether the help lists all flags instead of the common flags only.
    """
    groups = {group: parser.add_argument_group(title) if show_all else parser for group, title in titles().items()}
    for name, spec in specs.items():
        flag, group = flag_of(name), groups[spec.group]
        origin: object = typing.get_origin(spec.hint)
        text = in_flags(spec.help.rstrip("."), specs)
        text = f"{text if show_all else _CLAUSE.split(text)[0]} [{to_text(preset.get(name, spec.default))}]"
        given: dict[str, Forwarded] = {  # keyword arguments of add_argument
            "dest": name, "type": functools.partial(_parsed, hint=spec.hint), "default": argparse.SUPPRESS,
            "metavar": values_of(spec) if show_all else _short_form(spec),
            "help": text.replace("%", "%%") if show_all or is_common(spec) else argparse.SUPPRESS}
        if spec.hint is bool or {bool, str} <= set(typing.get_args(spec.hint)):
            group.add_argument(flag, nargs="?", const=True, **given)
            group.add_argument(f"--no-{flag[2:]}", dest=name, action="store_const", const=False,
                               default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        elif origin is tuple and not takes_code(spec.hint):
            first, *_ = values_of(spec).split(",")
            form = (values_of(spec), first) if show_all else (first, first)
            group.add_argument(flag, nargs="+", action=_Joined, **{**given, "metavar": form})
        else:
            group.add_argument(flag, **given)


def is_common(spec: OptionSpec) -> bool:
    """Return whether an option is in the short help, which lists common options and those of the user's algorithm."""
    return spec.name in _SHORT or (spec.part == "algorithm" and spec.is_users)


def in_flags(text: str, specs: Collection[str]) -> str:
    """Return the help of an option in the words of the command line, such as `--num-steps 5` for `num_steps=5`.

    Args:
        text: The help, which names options and values as in Python.
        specs: Names of the options that have a flag.
    """
    for python, typed in (("None", "none"), ("True", "yes"), ("False", "no")):
        text = re.sub(rf"\b{python}\b", typed, text)
    text = re.sub(r"""(?<![\w\[])(["'`])([\w.:<>*()-]+)\1""", r"\2", text)
    text = re.sub(r"\b(\w+)(=(?=\w))?", lambda found: flag_of(found[1]) + " " * bool(found[2])
                  if found[1] in specs and (found[2] or "_" in found[1]) else found[0], text)
    rest = text.partition(" ")[0][1:]
    return text[:1].lower() + text[1:] if rest == rest.lower() else text


def _short_form(spec: OptionSpec) -> str:
    """Return a short placeholder for an option's value: its type, or its choices if there are two."""
    form = values_of(spec).removeprefix("none|").removesuffix("|INT,...")
    form = form.replace("hronous", "")  # `Communication` understands sync and async
    return form if form.count("|") < 2 else "NAME"


def values_of(spec: OptionSpec) -> str:
    """Return the placeholder for an option's value in the help: its choices if it has any, otherwise its type."""
    if spec.choices is None:
        return form_of(spec.hint)
    # The text "none" is left out here, because it is one of the choices if None is allowed.
    others = [form for form in form_of(spec.hint).split("|") if form not in ("TEXT", "none", CODE_FORM)]
    own = [CODE_FORM] if takes_code(spec.hint) else []
    return "|".join(dict.fromkeys([*others, *map(to_text, spec.choices), *own]))


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def name_of(flag: str) -> str:
    """Return the option name of a flag; `flag_of` is the inverse."""
    return flag.removeprefix("--").replace("-", "_")


class _Joined(argparse.Action):
    """Action that stores all values after a flag as one tuple: `64 64` is the same as `64,64`."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Sequence[object]] | None, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(item for value in values or () for item in value))


def positive_seconds(text: str) -> float:
    """Parse a finite number of seconds above 0.

    Raises:
        ArgumentTypeError: The text is no such number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def _parsed(text: str, hint: object) -> object:
    """Parse the value of a flag; argparse shows only the messages of its own class of errors."""
    try:
        return parse(text, hint)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
