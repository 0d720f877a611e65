"""List the options of the scheme by level, for `train`, the command line and the documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from pytorchrl.agent.options import Options
from pytorchrl.scheme import Scheme
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.replay.storage_options import STORAGE_OPTIONS

GROUPS: Mapping[str, str] = {
    "collection": "collection: workers that step environments, and the queue to the learner",
    "replay": "replay: shards between collection workers and the learner",
    "gradients": "gradients: gradient workers and their batches",
    "updates": "updates: how gradients become new weights",
    "runtime": "runtime: processes, devices, seeds and records",
    "supervision": "supervision: lost and hanging workers",
}
"""Level of the scheme -> its title in `--help`."""


@dataclass(frozen=True)
class SchemeOption:
    """One setting of the scheme.

    Attributes:
        name: Its name, the same everywhere.
        group: The level that it belongs to, a key of `GROUPS`.
        hint: Its type.
        default: Its default.
        help: One or two sentences.
        choices: The closed set of allowed values; None: there is no such set.
    """

    name: str
    group: str
    hint: object
    default: object
    help: str
    choices: tuple[object, ...] | None = None


# Folder of the class that declares an option -> the level that it is listed with.
_GROUP_OF_FOLDER = {**{group: group for group in GROUPS}, "recording": "runtime", "base": "gradients"}
# The parameters of `Scheme` that are no settings, and those of the storage, which is made from the same options.
_NOT_OPTIONS = {"algo_factory", "actor_factory", "storage_factory", "train_envs_factory", "test_envs_factory",
                "prioritized",
                *STORAGE_OPTIONS}
_UNDECLARED = {
    "col_execution": "collection", "col_communication": "collection", "kind": "replay", "replay_debug": "replay",
    "grad_execution": "gradients", **dict.fromkeys(
        ("runtime", "device", "num_threads", "seed", "schedule_seed", "costs", "faults", "address", "placement"),
        "runtime")}
"""Settings that only `Scheme` declares -> the level that they are listed with; the others belong to the updates."""


_CHOICES = {"runtime": (None, "ray", "threads", "simulated")}


def scheme_options() -> list[SchemeOption]:
    """Return the settings of the scheme; `preset`, the name of an architecture, is the first."""
    found = [SchemeOption(
        "preset", "collection", typing.Optional[str], None,  # noqa: UP045 - unions of strings are not evaluated here
        "An architecture of the literature, such as `impala` for `Scheme.impala`; its settings hold where no others "
        "are given.",
        (None, *PRESETS))]
    declared, hints = _declared(), typing.get_type_hints(Scheme.__init__)
    texts = documented_arguments(Scheme.__doc__ or "")
    for name, parameter in inspect.signature(Scheme).parameters.items():
        if name not in _NOT_OPTIONS:
            own = declared.get(name) or SchemeOption(
                name, _UNDECLARED.get(name, "updates"), hints[name], parameter.default, texts.get(name, ""),
                _CHOICES.get(name))
            # Of a level that a scheme may do without, such as replay, the scheme's default is None.
            found.append(dataclasses.replace(own, hint=hints[name], default=parameter.default))
    return sorted(found, key=lambda option: list(GROUPS).index(option.group))


def _declared() -> dict[str, SchemeOption]:
    """Return the options that parts of the scheme declare, by name."""
    found: dict[str, SchemeOption] = {}
    for owner in _subclasses(Options):
        _, *folders = owner.__module__.split(".")
        group = next((_GROUP_OF_FOLDER[folder] for folder in folders if folder in _GROUP_OF_FOLDER), None)
        if group is None or folders[0] not in ("scheme", "runtime") or not owner.__module__.startswith("pytorchrl."):
            continue
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if field.name in vars(owner).get("__annotations__", {}):
                found[field.name] = SchemeOption(
                    field.name, group, hints[field.name], default_of(field), field.metadata["help"],
                    field.metadata["choices"])
    return found


def _subclasses(cls: type[Options]) -> list[type[Options]]:
    return [found for subclass in cls.__subclasses__() for found in (subclass, *_subclasses(subclass))]


def default_of(field: dataclasses.Field[object]) -> object:
    """Return the default of an option; None if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def documented_arguments(docstring: str) -> dict[str, str]:
    """Return name -> text from the `Args:` section of a Google-style docstring."""
    section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", inspect.cleandoc(docstring), re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}([\w, ]+):(.*?)(?=^ {4}\S|\Z)", section.group(1), re.DOTALL | re.MULTILINE):
        for name in names.split(", "):
            texts[name] = " ".join(text.split())
    return texts
