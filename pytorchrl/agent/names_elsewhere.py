"""Read which options of this package correspond to an option of another library, from `names_elsewhere.json`.

The file contains a section for each library, and a section `pytorchrl` for names of this package that a user may give
to a component without such an option, and for common words such as "backbone". Each name stands in one section, with
its meanings, the preferred one first; see `Here`. The file is JSON because Python 3.10 cannot read TOML.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

HOMES = MappingProxyType({
    "algorithm": "algorithm", "actor": "actor", "rollouts": "storage of rollouts", "replay": "replay storage",
    "environments": "vector of environments", "scheme": "scheme", "learner": "learner",
})
"""The name of each kind of part in messages; `rollouts` and `replay` are the two kinds of storages."""


@dataclass(frozen=True)
class Here:
    """The option or options of this package that a name from another library may mean.

    Attributes:
        at: The option as `home.name`, where `home` is a key of `HOMES`, such as "algorithm.lr". `a + b` names two
            options that are needed together, and `a | b` two options of which one is enough. `at` is empty if
            this package has no option for the name.
        note: Differences in unit or meaning. If there is no option, the note says what to do instead. Names of options
            are in backticks.
    """

    at: str = ""
    note: str = ""

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """The options in `at`, each as (key of `HOMES`, name of the option), such as ("algorithm", "lr")."""
        return tuple((home, name) for home, _, name in (
            option.strip().partition(".") for option in self.at.replace("+", "|").split("|") if option.strip()))

    @property
    def needs_all(self) -> bool:
        """Whether all options in `at` are needed together, as in "a + b"; in "a | b", one of the options is enough."""
        return "+" in self.at


@functools.cache
def libraries() -> Mapping[str, Mapping[str, tuple[Here, ...]]]:
    """Return for each section of the file the meanings of its names; the file is read on the first call."""
    sections = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return MappingProxyType({library: MappingProxyType({
        name: tuple(Here(**here) for here in meanings) for name, meanings in names.items()})
        for library, names in sections.items()})


@functools.cache
def elsewhere() -> Mapping[str, tuple[Here, ...]]:
    """Return the meanings of each name in the file."""
    return MappingProxyType({name: meanings for names in libraries().values() for name, meanings in names.items()})


def of_other_libraries() -> list[str]:
    """Return all names from other libraries, in alphabetical order."""
    return sorted(name for library, names in libraries().items() if library != "pytorchrl" for name in names)
