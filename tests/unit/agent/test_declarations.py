"""Test options of every type, and classes that inherit the options of several classes."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytorchrl.agent.options import Factory, Options, option
from pytorchrl.agent.schedules import Schedule, linear, piecewise
from pytorchrl.errors import ConfigError


class Order(enum.Enum):
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Kinds(Options):
    resources: Mapping[str, float] = option(default_factory=dict, help="Amounts.", low=0.0)
    agents: dict[str, tuple[str, ...]] = option(default_factory=dict, help="Agents of each policy.")
    names: Sequence[str] = option((), help="Names.")
    pair: tuple[int, str] = option((1, "a"), help="A number and a name.")
    order: Order = option(Order.FIRST, help="An order.")
    maybe: Order | None = option(None, help="An order or none.")
    text: Order | str = option(Order.FIRST, help="An order, also as a string.")
    amount: Order | int = option(0, help="An order or a number.")
    path: str | os.PathLike[str] | None = option(None, help="A file.")
    hook: Callable[[int], int] | None = option(None, help="A function.")
    lag: int | None = option(None, help="A bound.", low=0)
    rate: float | Schedule = option(1.0, help="A rate.", low=0.0, high=1.0)
    level: int | str | None = option(None, help="A level.", low=1)
    kind: str | None = option(None, help="A kind.", choices=("Copy", "move"))
    sizes: tuple[int, ...] = option((), help="Sizes.", low=1)
    flag: bool = option(False, help="A switch.")
    anything: Any = option(None, help="Anything.")
    kwargs: Mapping[str, Any] = option(default_factory=dict, help="Arguments.")


@pytest.mark.parametrize(
    "given",
    [
        {"resources": {"num_cpus": 1, "num_gpus": 0.5}},
        {"agents": {"red": ("a", "b")}},
        {"names": ["a", "b"]},
        {"pair": (2, "b")},
        {"maybe": None},
        {"amount": 3},
        {"path": Path("a")},
        {"path": "a"},
        {"hook": abs},
        {"lag": 0},
        {"level": "top"},
        {"kind": None},
    ],
)
def test_a_value_of_the_declared_type_is_kept(given):
    ((name, value),) = given.items()
    assert getattr(Kinds(**given), name) == value


NUMPY = {  # value as given -> value as stored, by option
    "lag": [(np.int64(3), 3), (np.array(3), 3), (np.uint8(3), 3)],
    "rate": [(np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.float16(0.5), 0.5), (np.array(0.5), 0.5),
             (np.int32(1), 1),
             (np.array([[0, 1.0], [100, 0.5]]), piecewise((0, 1.0), (100, 0.5))),
             ([(np.int64(0), np.float32(1.0)), (np.int64(100), np.float32(0.5))], piecewise((0, 1.0), (100, 0.5)))],
    "pair": [((np.int64(2), "b"), (2, "b"))],
    "sizes": [(np.array([32, 16]), (32, 16)), ([np.int64(32), 16], (32, 16)), ((np.int8(32),), (32,)),
              (np.array([], dtype=int), ())],
    "flag": [(np.bool_(True), True), (np.array(False), False)],
    "resources": [({"num_cpus": np.float32(0.5)}, {"num_cpus": 0.5})],
    "names": [(np.array(["a", "b"]), ["a", "b"])],
    "level": [(np.str_("top"), "top"), (np.int64(2), 2)],
}


def test_numbers_and_arrays_of_numpy_are_stored_as_numbers_and_tuples_of_python():
    for name, cases in NUMPY.items():
        for given, expected in cases:
            stored = getattr(Kinds(**{name: given}), name)
            assert stored == expected, name
            assert "numpy" not in pickle.dumps(stored).decode("latin-1"), name
            assert repr(Kinds(**{name: given})) == repr(Kinds(**{name: expected})), name


def test_numpy_values_of_another_type_are_refused_as_those_of_python_are():
    for name, given, message in [
            ("lag", np.float64(2.0), "lag must be a whole number >= 0 or None, got 2.0"),
            ("lag", np.bool_(True), "lag must be a whole number >= 0 or None, got True"),
            ("lag", np.array([1, 2]), r"lag must be a whole number >= 0 or None, got \[1, 2\]"),
            ("lag", np.int64(-1), "lag must be a whole number >= 0 or None, got -1"),
            ("rate", np.float32("nan"), "rate must be finite, got nan"),
            ("flag", np.int64(1), "flag must be True or False, got 1"),
            ("sizes", np.array([1.5]), r"sizes must be .*whole numbers >= 1, got \(1.5,\)")]:
        with pytest.raises(ConfigError, match=message):
            Kinds(**{name: given})


def test_an_option_of_any_type_keeps_the_values_of_numpy():
    array = np.array([1, 2])
    kwargs = {"start": array, "size": np.int64(3)}
    kinds = Kinds(anything=array, kwargs=kwargs)
    assert kinds.anything is array
    assert kinds.kwargs is kwargs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"resources": {"num_cpus": "1"}},
            "resources must be a mapping of strings to numbers >= 0.0, got {'num_cpus': '1'}",
        ),
        ({"resources": {1: 1.0}}, "resources must be a mapping of strings to numbers >= 0.0, got {1: 1.0}"),
        (
            {"resources": {"num_cpus": -1.0}},
            "resources must be a mapping of strings to numbers >= 0.0, got {'num_cpus': -1.0}",
        ),
        (
            {"resources": {"num_cpus": True}},
            "resources must be a mapping of strings to numbers >= 0.0, got {'num_cpus': True}",
        ),
        ({"resources": {"num_cpus": float("nan")}}, "resources must be finite, got {'num_cpus': nan}"),
        ({"resources": 1.0}, "resources must be a mapping of strings to numbers >= 0.0, got 1.0"),
        (
            {"agents": {"red": "ab"}},
            "agents must be a dict of strings to tuples or lists of strings, got {'red': 'ab'}",
        ),
        ({"names": "ab"}, "names must be a sequence of strings, got 'ab'"),
        ({"names": ("a", 1)}, "names must be a sequence of strings, got ('a', 1)"),
        ({"pair": (1, 2)}, "pair must be a tuple or list of 2 items: a whole number, a string, got (1, 2)"),
        ({"order": "lasst"}, "order must be one of ['first', 'last'], got 'lasst'; did you mean 'last'?"),
        ({"order": None}, "order must be one of ['first', 'last'], got None"),
        ({"maybe": "none"}, "maybe must be one of ['first', 'last'] or None, got 'none'"),
        ({"text": "lats"}, "text must be one of ['first', 'last'], got 'lats'; did you mean 'last'?"),
        ({"amount": "3"}, "amount must be Order or a whole number, got '3'"),
        ({"path": 3}, "path must be a string, a path or None, got 3"),
        ({"hook": 3}, "hook must be a function or None, got 3"),
        ({"lag": -1}, "lag must be a whole number >= 0 or None, got -1"),
        ({"lag": 0.5}, "lag must be a whole number >= 0 or None, got 0.5"),
        ({"rate": 2}, "rate must be a number >= 0.0 and <= 1.0 or a schedule, got 2"),
        ({"rate": linear(0.5, 2.0)}, "rate must be >= 0.0 and <= 1.0, got linear(0.5, 2.0)"),
        ({"level": 0}, "level must be a whole number >= 1, a string or None, got 0"),
        ({"kind": "copy"}, "kind must be one of ['Copy', 'move'] or None, got 'copy'; did you mean 'Copy'?"),
    ],
)
def test_an_invalid_value_is_refused_with_the_allowed_values(given, message):
    with pytest.raises(ConfigError) as caught:
        Kinds(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["order", "maybe", "text", "amount"])
def test_the_value_of_an_enum_member_is_accepted_for_it(name):
    assert getattr(Kinds(**{name: "last"}), name) is Order.LAST
    assert getattr(Kinds(**{name: Order.LAST}), name) is Order.LAST


# Declarations


@dataclass(frozen=True, kw_only=True)
class Queue(Options):
    size: int = option(help="Maximum number of queued batches.", low=1)
    lag: int | None = option(None, help="A bound.", low=0, exclusive=True, updatable=True)
    order: Order = option(Order.FIRST, help="An order.")
    kind: str = option("a", help="A kind.", choices=("a", "b"))
    names: dict[str, str] = option(default_factory=dict, help="Names.")


def test_declarations_describe_each_option_in_order():
    found = Queue.declarations()
    assert list(found) == ["size", "lag", "order", "kind", "names"]
    assert [(each.name, each.type) for each in found.values()] == [
        ("size", int),
        ("lag", int | None),
        ("order", Order),
        ("kind", str),
        ("names", dict[str, str]),
    ]
    assert [each.is_required for each in found.values()] == [True, False, False, False, False]
    assert [each.default for each in found.values()] == [dataclasses.MISSING, None, Order.FIRST, "a", {}]
    assert [each.choices for each in found.values()] == [None, None, ("first", "last"), ("a", "b"), None]
    assert [each.allowed for each in found.values()] == [
        "a whole number >= 1",
        "a whole number > 0 or None",
        "one of ['first', 'last']",
        "one of ['a', 'b']",
        "a dict of strings to strings",
    ]
    lag, size = found["lag"], found["size"]
    assert (lag.help, lag.low, lag.high, lag.is_exclusive) == ("A bound.", 0, None, True)
    assert (size.low, size.is_exclusive) == (1, False)


def test_a_mutable_default_is_created_anew_for_each_instance():
    declaration = Queue.declarations()["names"]
    declaration.default["a"] = "b"
    assert declaration.default == {}
    assert Queue(size=1).names == {}


def test_changed_lists_options_that_differ_from_the_defaults():
    assert Queue(size=1).changed() == ("size",)
    assert Queue(size=1, kind="b", order="first", names={"a": "b"}).changed() == ("size", "kind", "names")


# Options of several classes


@dataclass(frozen=True, kw_only=True)
class Ahead(Options):
    ahead: int = option(1, help="Batches prepared ahead.", low=0)


@dataclass(frozen=True, kw_only=True)
class Workers(Ahead):
    num: int = option(1, help="Number of workers.", low=1)

    def __post_init__(self):
        super().__post_init__()
        if self.num == 13:
            raise ConfigError("num must not be 13")


@dataclass(frozen=True, kw_only=True)
class Shards(Ahead):
    share: float = option(0.5, help="A share.", low=0.0, high=1.0)

    def __post_init__(self):
        super().__post_init__()
        if self.ahead > 1:
            raise ConfigError("ahead must be 0 or 1")


@dataclass(frozen=True, kw_only=True)
class Both(Workers, Shards):
    own: bool = option(False, help="A switch.")


def test_options_of_several_classes_are_combined_and_all_checked():
    assert list(Both.declarations()) == ["ahead", "share", "num", "own"]
    both = Both(num=2, share=0.25)
    assert isinstance(both, Workers)
    assert isinstance(both, Shards)
    assert both.changed() == ("share", "num")
    for given, message in (
        ({"num": 13}, "num must not be 13"),
        ({"ahead": 2}, "ahead must be 0 or 1"),
        ({"num": 0, "share": 2.0}, "share must be a number .*\n- num must be a whole number >= 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Both(**given)


def test_a_factory_prints_options_of_several_classes():
    class Part:
        pass

    assert repr(Factory(Part, Both(num=2, own=True))) == "Part.create_factory(num=2, own=True)"


@pytest.mark.parametrize(
    "other",
    [
        option(2, help="Batches prepared ahead.", low=0),
        option(1, help="Other help.", low=0),
        option(1, help="Batches prepared ahead.", low=1),
    ],
)
def test_an_option_that_two_bases_declare_differently_is_refused(other):
    @dataclass(frozen=True, kw_only=True)
    class Other(Options):
        ahead: int = other

    with pytest.raises(
        ConfigError,
        match=r"Mixed inherits ahead from Ahead and .*Other, which declare it differently; declare it once, "
        r"in a class that both inherit, or again in .*Mixed",
    ):

        class Mixed(Workers, Other):
            pass


def test_an_option_redeclared_by_one_base_is_also_refused():
    @dataclass(frozen=True, kw_only=True)
    class Narrowed(Ahead):
        ahead: int = option(0, help="Batches prepared ahead.", low=0)

    with pytest.raises(ConfigError, match=r"inherits ahead from Ahead and .*Narrowed"):

        class Mixed(Workers, Narrowed):
            pass


def test_an_equal_declaration_in_two_bases_or_an_override_is_accepted():
    @dataclass(frozen=True, kw_only=True)
    class Same(Options):
        ahead: int = option(1, help="Batches prepared ahead.", low=0)

    @dataclass(frozen=True, kw_only=True)
    class Other(Options):
        ahead: int = option(3, help="Others.", low=0)

    @dataclass(frozen=True, kw_only=True)
    class Mixed(Workers, Same):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Anew(Workers, Other):
        ahead: int = option(5, help="New.", low=0)

    assert (Mixed().ahead, Anew().ahead) == (1, 5)
