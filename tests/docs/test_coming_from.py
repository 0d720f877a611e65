"""Tests of the pages on other libraries: every name and every default of this library in their tables is true."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache

import pytest

import pytorchrl
from pytorchrl import linear, train
from pytorchrl.training import presets
from pytorchrl.training.composition import known_names
from pytorchrl.errors import ConfigError
from tests.conftest import ROOT

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "coming_from").glob("*.md"))
         if path.stem != "index"}
# Algorithms that together have all options -> an environment that the algorithm accepts.
ALGORITHMS = {"ppo": "CartPole-v1", "appo": "CartPole-v1", "dqn": "CartPole-v1", "r2d2": "CartPole-v1",
              "sac": "Pendulum-v1", "td3": "Pendulum-v1"}
# Parts whose options a table of defaults may name: in this order, after the algorithm of the table.
PARTS = {"PPO": ("OnPolicyActor", "GAEBuffer"), "APPO": ("OnPolicyActor", "VTraceBuffer"), "DQN": ("QActor",),
         "SAC": ("OffPolicyActor",)}
# The kinds of environments whose defaults the tables list; for all other algorithms, this is "vectors".
KINDS = {"SAC": "continuous"}
SAME = re.compile("the same names?")
pytestmark = pytest.mark.xdist_group("coming_from")  # the tests share the errors that `errors_of` has kept


def tables_of(text):
    """Return the tables of a page, as pairs (cells of the head, cells of the rows)."""
    found = re.findall(r"^\|(.+)\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return [([cell.strip() for cell in head.split("|")],
             [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()])
            for head, rows in found]


def names_in(cell):
    return re.findall(r"`(\w+)`", cell)


def translations():
    """Yield (page, names elsewhere, names here) for each row of each table that translates names."""
    for page, text in PAGES.items():
        for head, rows in tables_of(text):
            if head[1:] == ["pytorchrl", "remark"]:
                for theirs, ours, _ in rows:
                    names = names_in(theirs.split(" of ")[0])
                    yield page, names, names if SAME.fullmatch(ours) else names_in(ours)


def names_without_counterpart():
    for page, text in PAGES.items():
        for head, rows in tables_of(text):
            if head[1:] == ["remark"]:
                for theirs, _ in rows:
                    yield from ((page, name) for name in names_in(theirs))


def defaults():
    """Yield (page, class name of the algorithm, option, default) for each row of each table of defaults."""
    for page, text in PAGES.items():
        for head, rows in tables_of(text):
            if head[0] == "option":
                for option, _, ours in rows:
                    yield page, head[2], *names_in(option), ours


def error_of(algorithm, name):
    """Return the error of `train` for `name`; an algorithm with an option of this name trains for one step instead."""
    try:
        train(algorithm, ALGORITHMS[algorithm], **{"target_steps": 1, "progress": False, name: 1})
    except ConfigError as error:
        return str(error)
    return None


@cache
def all_errors(algorithm):
    """Return name -> the line on it in the error of `train` for all names on the pages that no algorithm has."""
    names = {name for _, theirs, _ in translations() for name in theirs}
    names |= {name for _, name in names_without_counterpart()}
    options = {"target_steps": 1, "progress": False, **dict.fromkeys(names - all_options(), 1)}
    with pytest.raises(ConfigError) as caught:
        train(algorithm, ALGORITHMS[algorithm], **options)
    lines = [line.removeprefix("- ") for line in str(caught.value).splitlines()[1:]]
    return {re.match("there is no option '(.*?)'; ", line)[1]: line for line in lines}


@cache
def errors_of(name):
    """Return the errors for `name`; those for a name that some algorithms have come from a call with only this name."""
    if name in all_options():
        return [error for algorithm in ALGORITHMS if (error := error_of(algorithm, name))]
    return [all_errors(algorithm)[name] for algorithm in ALGORITHMS]


@cache
def all_options():
    return {name for algorithm in ALGORITHMS for name in known_names(algorithm)}


def suggested(name):
    """Return the options that some error for `name` suggests."""
    hints = [hint for error in errors_of(name) for hint in re.findall(r"did you mean (.*)|; give (\w+) of ", error)]
    return {option for quoted, plain in hints for option in [*re.findall(r"'(\w+)'", quoted), plain]}


def test_there_is_a_page_for_each_library():
    assert set(PAGES) == {"stable_baselines3", "rllib", "cleanrl", "sample_factory", "rsl_rl", "skrl", "predecessor"}
    counted = {page: sum(len(theirs) for found, theirs, _ in translations() if found == page) for page in PAGES}
    assert min(counted.values()) >= 35, counted
    assert {page for page, *_ in defaults()} == set(PAGES)
    assert {page for page, _ in names_without_counterpart()} == set(PAGES)


def test_a_translated_name_is_an_option_that_the_error_suggests():
    for row in translations():
        page, theirs, ours = row
        assert ours, row
        assert set(ours) <= all_options(), row
        for name in set(theirs) - set(ours):
            assert suggested(name), (page, name)
            assert suggested(name) & set(ours), (page, name, suggested(name))
        # Each option of the row is suggested for one of the names, unless it has this name elsewhere, too.
        assert set(ours) - set(theirs) <= set().union(*map(suggested, set(theirs) - set(ours))), row


def test_the_error_for_a_name_without_counterpart_gives_a_remedy():
    for page, name in names_without_counterpart():
        for error in errors_of(name):
            assert re.match(rf"there is no option '{name}'; \w", error), (page, error)
            assert "did you mean" not in error, page
        assert errors_of(name), (page, name)


def test_a_default_on_the_pages_is_the_default():
    for row in defaults():
        _, algorithm, option, shown = row
        classes = [getattr(pytorchrl, name) for name in (algorithm, *PARTS[algorithm])]
        preset = presets.preset(algorithm.lower(), KINDS.get(algorithm, "vectors"))
        found = [preset[option]] if option in preset else [
            field.default for cls in classes for field in dataclasses.fields(cls.Options) if field.name == option]
        value, falls, _ = shown.partition(", decreasing to 0")
        value = ast.literal_eval(value)
        assert (linear(value, 0.0) if falls else value) == found[0], row


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_other_libraries_have_valid_syntax(page):
    for body in re.findall(r"^```\{code-block\} python\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        ast.parse(body)
