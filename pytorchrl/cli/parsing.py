"""Build argument parsers from the declarations of options; errors suggest the most similar flag."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from pytorchrl.agent.names import Known, suggestion
from pytorchrl.agent.option_values.text import CODE_FORM, form_of, parse, takes_code, to_text
from pytorchrl.errors import ConfigError
from pytorchrl.support.terminal import printable
from pytorchrl.support.untyped import Forwarded

if TYPE_CHECKING:
    from pytorchrl.training.composition import OptionSpec

_COMMON = frozenset((
    "target_steps", "log_dir", "eval_every", "eval_episodes", "checkpoint_every", "resume", "overwrite",
    "lr", "lr_q", "lr_pi", "optimizer", "gamma", "num_epochs", "num_mini_batch", "mini_batch_size", "entropy_coef",
    "clip_param", "max_grad_norm", "start_steps", "update_every", "num_updates", "polyak", "epsilon_steps",
    "num_steps", "gae_lambda", "replay_size", "prioritized", "n_step", "length", "burn_in",
    "feature_extractor", "hidden_sizes", "recurrent_net", "normalize_obs", "normalize_reward", "checkpoint",
    "num_envs", "wrappers", "callbacks", "frame_stack", "max_episode_steps", "env_kwargs", "policies",
    "preset", "num_col_workers", "col_communication", "max_policy_lag", "num_replay_workers", "num_grad_workers",
    "grad_communication", "distribute_gradients", "train_batch_size", "updates_per_step", "runtime", "device", "seed",
    "on_worker_failure"))
"""The options that the short help lists."""


class Parser(argparse.ArgumentParser):
    """A parser that suggests a similar flag for each unknown flag, and accepts no abbreviations.

    Args:
        known: All options of the command, including those without a flag; errors suggest similar options among them.
            None: errors suggest only flags.
        options: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, *, known: Known | None = None, **options: Forwarded) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._known = dict(known or {})
        # By default, argparse treats `-1e-3` and `-inf` as flags. With this pattern, they are values.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; if any are unknown, show the usage line and suggestions, and exit with status 2."""
        if not {"-h", "--help", "--help-all"} & set(arguments):
            # Unknown flags are reported before argparse can report a missing flag, because the unknown flag may be
            # a misspelling of the missing one, such as --env-id for --env.
            self._refuse([word for word in arguments if word.startswith("--") and word.split("=")[0] not in {
                "--", *self._option_string_actions}])
        namespace, unknown = self.parse_known_args(list(arguments))
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

    Args:
        parser: The parser.
        specs: The options; each group of options becomes a group of flags.
        preset: Values of the preset, which the help shows in place of defaults.
        show_all: Whether the help lists all flags instead of the common flags only.
    """
    groups = {group: parser.add_argument_group(title) for group, title in titles().items()}
    for name, spec in specs.items():
        flag, group = flag_of(name), groups[spec.group]
        origin: object = typing.get_origin(spec.hint)
        text = f"{spec.help.rstrip('.')} [{to_text(preset.get(name, spec.default))}]".replace("%", "%%")
        given: dict[str, Forwarded] = {  # keyword arguments of add_argument
            "dest": name, "type": functools.partial(_parsed, hint=spec.hint), "default": argparse.SUPPRESS,
            "metavar": values_of(spec), "help": text if show_all or is_common(spec) else argparse.SUPPRESS}
        if spec.hint is bool or {bool, str} <= set(typing.get_args(spec.hint)):
            group.add_argument(flag, nargs="?", const=True, **given)
            group.add_argument(f"--no-{flag[2:]}", dest=name, action="store_const", const=False,
                               default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        elif origin is tuple and not takes_code(spec.hint):
            first, *_ = values_of(spec).split(",")
            group.add_argument(flag, nargs="+", action=_Joined, **{**given, "metavar": (values_of(spec), first)})
        else:
            group.add_argument(flag, **given)


def is_common(spec: OptionSpec) -> bool:
    """Return whether an option is in the short help, which lists common options and those of the user's algorithm."""
    return spec.name in _COMMON or (spec.part == "algorithm" and spec.is_users)


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
