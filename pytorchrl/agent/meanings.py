"""Describe which options of this package correspond to an option of another library; see `names_elsewhere`."""

from __future__ import annotations

from dataclasses import dataclass
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


def at(*places: str, note: str = "") -> tuple[Here, ...]:
    """Return the possible meanings of an option name from another library, the preferred meaning first.

    Args:
        places: For each meaning, the option or options of this package, in the format of `Here.at`.
        note: The note that each meaning gets.
    """
    return tuple(Here(place, note) for place in places)


def no_option(note: str) -> tuple[Here, ...]:
    """Return the meaning of a name for which this package has no option; `note` says what to do instead."""
    return (Here(note=note),)
