"""List the options of the scheme by group, for `train`, the command line and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.settings import LEVELS, declaration_of, default_of_keyword, names_of_level

GROUPS: Mapping[str, str] = {
    "collection": "collection: workers that step environments, and the queue to the learner",
    "replay": "replay: shards between collection workers and the learner",
    "gradients": "gradients: gradient workers and their batches",
    "updates": "updates: how gradients become new weights",
    "runtime": "runtime: processes, devices, seeds and records",
    "supervision": "supervision: lost and hanging workers",
}
"""The title of each group of settings in `--help`."""
_GROUP_OF = {"queue": "collection", "recording": "runtime", "process": "runtime"}


@dataclass(frozen=True)
class SchemeOption:
    """One setting of the scheme.

    Attributes:
        name: Name of the setting, the same in `Scheme` and `train`.
        group: Group of the setting in `--help`, a key of `GROUPS`.
        hint: Type of the setting.
        default: Default of the setting.
        help: Description in one or two sentences.
        choices: All allowed values, if they are a closed set; otherwise None.
    """

    name: str
    group: str
    hint: object
    default: object
    help: str
    choices: tuple[object, ...] | None = None


def scheme_options() -> list[SchemeOption]:
    """Return the settings of the scheme; the first is `preset`, which selects an architecture such as IMPALA.

    The scheme's setting `size` is left out, because the storage also has an option `size`. In `train`, the option
    `replay_size` takes its place.
    """
    found = [SchemeOption(
        "preset", "collection", str | None, None,
        "An architecture from the literature, such as `impala` for `Scheme.impala`; its settings apply unless you give "
        "others.",
        (None, *PRESETS))]
    for level in LEVELS:
        for name in names_of_level(level):
            if name == "size":
                continue
            declaration = declaration_of(name)
            found.append(SchemeOption(
                name, _GROUP_OF.get(level, level), declaration.type, default_of_keyword(name), declaration.help,
                declaration.choices))
    return found
