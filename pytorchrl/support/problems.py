"""Collect the problems of settings, so that one error reports all of them, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

from pytorchrl.errors import ConfigError, Problem, PyTorchRLError

T = TypeVar("T")


def problems_of(error: ConfigError) -> Sequence[Problem]:
    """Return the problems that an error reports."""
    return error.problems or (Problem(str(error), error=type(error)),)


def problems_in(check: Callable[..., object], *args: object) -> Sequence[Problem]:
    """Return the problems for which `check(*args)` raises `ConfigError`; empty if it raises nothing."""
    try:
        check(*args)
    except ConfigError as error:
        return problems_of(error)
    return ()


def error_of(problems: Iterable[Problem]) -> ConfigError:
    """Return the error that reports `problems`, each once; there must be at least one.

    Several problems stand on a line each. The class of the error is the common class of the problems.
    """
    found = list({problem.text: problem for problem in reversed(list(problems))}.values())[::-1]
    classes = {problem.error for problem in found}
    text = str(found[0])
    if len(found) > 1:
        text = "\n- ".join([f"{len(found)} problems:", *map(str, found)])
    error = (classes.pop() if len(classes) == 1 else ConfigError)(text)
    error.problems = tuple(found)
    return error


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise one error that reports all problems; do nothing if there are none; see `error_of`."""
    if found := list(problems):
        raise error_of(found)


class Problems:
    """The problems found so far, while the parts of a setup are built one after the other.

    Attributes:
        found: The problems, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self._wrong: set[str] = set()  # options that were left out, because their values are wrong
        self._cause: ConfigError | None = None  # the first error, whose traceback shows where a value is refused

    def wrong(self, problem: Problem) -> None:
        """Add the problem of an option that is left out; `add` then ignores problems that depend on the option."""
        self.found.append(problem)
        self._wrong |= set(problem.options)

    def ignore(self, others: Problems) -> None:
        """Also ignore problems that depend on an option that `others` ignores."""
        self._wrong |= others._wrong
        self._cause = self._cause or others._cause

    def catch(self, error: ConfigError) -> None:
        """Add the problems of an error; see `add`."""
        self._cause = self._cause or error
        self.add(problems_of(error))

    def add(self, problems: Iterable[Problem]) -> None:
        """Add problems, except those that depend on an option whose wrong value has been left out."""
        self.found += [problem for problem in problems if self._wrong.isdisjoint(problem.options)]

    def build(self, make: Callable[..., T], given: Mapping[str, object]) -> T | None:
        """Return `make(**given)`. If options are wrong, add the problems, and build without these options.

        If `make` is a class of options, and the options only contradict each other, return an object that contains
        them; its `contradictions` are not added. The result is None if nothing can be built.
        """
        try:
            return make(**given)
        except ConfigError as error:
            if isinstance(make, type) and isinstance(error.contradictory, make):
                return cast("T", error.contradictory)
            found, self._cause = problems_of(error), self._cause or error
            wrong = {name for problem in found for name in problem.options} & given.keys()
        self.found += found
        if not wrong:
            return None
        self._wrong |= wrong
        others = Problems()  # those of the other options; a required option that was left out is not missing
        try:
            built = others.build(make, {name: value for name, value in given.items() if name not in wrong})
        except PyTorchRLError:  # the user's code fails without the wrong option
            return None
        self.add(others.found)
        self.ignore(others)
        return built

    def raise_all(self) -> None:
        """Raise one error that reports all problems; do nothing if there are none."""
        if self.found:
            raise error_of(self.found) from self._cause
