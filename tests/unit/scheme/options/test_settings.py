"""Tests of flat keywords for several option classes: one error lists all wrong keywords."""

from __future__ import annotations

from pytorchrl.support.problems import raise_all
from dataclasses import dataclass

import pytest

from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.options.base import Kind, as_keywords, build, from_keywords, own_names
from pytorchrl.scheme.options.settings import KeywordReader, misplaced
from pytorchrl.scheme.options.base import CENTRAL, PARALLEL


@dataclass(frozen=True, kw_only=True)
class Workers(Options):
    num_workers: int = option(1, low=1, help="Workers.")
    col_execution: str | None = option(None, help="Where.")


@dataclass(frozen=True, kw_only=True)
class Queue(Options):
    queue_size: int = option(16, low=1, help="Size.")


@dataclass(frozen=True, kw_only=True)
class InStep(Kind, Workers):
    chosen = ("with mode='sync'", "without shards")
    fraction: float = option(1.0, low=0.0, high=1.0, help="Share.")


@dataclass(frozen=True, kw_only=True)
class Free(Kind, Workers, Queue):
    chosen = ("with mode='async'", "without shards")


@dataclass(frozen=True, kw_only=True)
class Shared(Kind, Workers, Queue):
    chosen = ("with mode='async'", "with shards")
    ratio: float | None = option(None, low=0.0, help="Ratio.")


KINDS = (InStep, Free, Shared)


def test_own_names_excludes_inherited_options():
    assert [own_names(kind) for kind in KINDS] == [["fraction"], [], ["ratio"]]
    assert own_names(Workers) == ["num_workers", "col_execution"]


@pytest.mark.parametrize("kind", KINDS)
def test_options_can_be_rebuilt_from_their_keywords(kind):
    options = build(kind, {"num_workers": 3, "queue_size": 5, "fraction": 0.5, "other": 1})
    assert build(kind, as_keywords(options)) == options
    assert set(as_keywords(options)) == set(kind.declarations())
    assert options.num_workers == 3


def test_unknown_keywords_are_refused_with_a_suggestion():
    assert from_keywords("Owner", Free, {"queue_size": 4}) == Free(queue_size=4)
    with pytest.raises(ConfigError, match="Owner has no option 'queue_sice'; did you mean 'queue_size'"):
        from_keywords("Owner", Free, {"queue_sice": 4})


@pytest.mark.parametrize("chosen", KINDS)
@pytest.mark.parametrize(("name", "value"), [
    ("num_workers", 2), ("queue_size", 5), ("fraction", 0.5), ("ratio", 2.0), ("unknown", 1)])
def test_a_changed_option_is_misplaced_if_only_other_kinds_have_it(chosen, name, value):
    homes = [kind for kind in KINDS if name in {field for base in kind.__mro__ for field in vars(base).get(
        "__annotations__", {})}]
    problems = misplaced({name: value}, chosen, KINDS, ["mode"])
    assert bool(problems) == (bool(homes) and chosen not in homes)
    for problem in problems:
        assert problem.options == (name, "mode")
        needs = problem.text.removeprefix(f"{name}={value}: only ").split(" and ")
        assert all(need in home.chosen for home in homes for need in needs)
        assert not set(needs) & set(chosen.chosen)
        assert problem.remedy.startswith(f"change that, or leave {name} out")


@pytest.mark.parametrize(("name", "chosen", "needs"), [
    ("queue_size", InStep, "with mode='async'"), ("fraction", Free, "with mode='sync'"),
    ("fraction", Shared, "with mode='sync' and without shards"), ("ratio", Free, "with shards"),
    ("ratio", InStep, "with mode='async' and with shards")])
def test_a_misplaced_option_names_only_the_conditions_that_the_chosen_kind_lacks(name, chosen, needs):
    (problem,) = misplaced({name: 0.5 if name == "fraction" else 5}, chosen, KINDS, [])
    assert problem.text == f"{name}={0.5 if name == 'fraction' else 5}: only {needs}"


def test_defaults_are_never_misplaced_and_wrong_values_always_are():
    assert misplaced({"queue_size": 16}, InStep, KINDS, []) == []
    (problem,) = misplaced({"queue_size": 0}, InStep, KINDS, [])
    assert problem.text.startswith("queue_size must be")


def test_a_reader_collects_all_problems():
    reader = KeywordReader({"num_workers": 0, "queue_size": 3, "fraction": 0.5})
    assert reader.choose(InStep, KINDS) == InStep(fraction=0.5)  # the default takes the place of a wrong value
    reader.refuse("collection", ["fraction", "missing"])
    found = reader.problems.found
    assert len(found) == 3
    with pytest.raises(ConfigError) as caught:
        raise_all([*found, *found])
    assert str(caught.value).splitlines() == ["3 problems:", *(f"- {problem}" for problem in found)]
    raise_all([])


@pytest.mark.parametrize(("num_workers", "given", "expected"), [
    (1, None, CENTRAL), (2, None, PARALLEL), (1, PARALLEL, PARALLEL), (2, PARALLEL, PARALLEL), (1, CENTRAL, CENTRAL)])
def test_the_execution_follows_from_the_number_of_workers(num_workers, given, expected):
    reader = KeywordReader({})
    options = reader.with_execution(InStep(num_workers=num_workers, col_execution=given), "col")
    assert (options.col_execution, options.num_workers, reader.problems.found) == (expected, num_workers, [])


def test_several_workers_are_not_central():
    reader = KeywordReader({})
    reader.with_execution(InStep(num_workers=2, col_execution=CENTRAL), "col")
    (problem,) = reader.problems.found
    assert "col_execution='Central'" in problem.text
    assert problem.options == ("col_execution", "num_col_workers")
