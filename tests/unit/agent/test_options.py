"""Declared options: names, types, ranges and choices are checked at once; schedules move; factories print and pickle."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass

import pytest

from pytorchrl.agent.options import Factory, Options, build_options, option
from pytorchrl.agent.schedules import Schedule, linear
from pytorchrl.errors import ConfigError


class Part:
    @dataclass(frozen=True, kw_only=True)
    class Options(Options):
        size: int = option(help="a required count", low=1)
        rate: float | Schedule = option(0.5, help="a rate", low=0.0, high=1.0, exclusive=True)
        kind: str = option("a", help="a choice", choices=("a", "bee"))
        sizes: tuple[int, ...] = option((64, 64), help="some sizes", low=1)
        flag: bool = option(False, help="a switch")
        limit: float | None = option(None, help="an optional limit")

    def __init__(self, options, **context):
        self.options, self.context = options, context


@pytest.mark.parametrize(("given", "message"), [
    ({}, "Part needs size"),
    ({"size": 0}, "size must be >= 1, got 0"),
    ({"size": True}, "size must be a whole number, got True"),
    ({"size": 2.0}, "size must be a whole number, got 2.0"),
    ({"size": "2"}, "size must be a whole number"),
    ({"size": 1, "rate": 0.0}, "rate must be > 0.0 and <= 1.0"),
    ({"size": 1, "rate": math.nan}, "rate must be finite"),
    ({"size": 1, "rate": linear(0.0, 1.0)}, "rate must be > 0.0"),
    ({"size": 1, "rate": linear(1.0, 2.0)}, "<= 1.0"),
    ({"size": 1, "kind": "be"}, "did you mean 'bee'?"),
    ({"size": 1, "sizes": (64, 0)}, "sizes must be >= 1"),
    ({"size": 1, "sizes": [64]}, "sizes must be"),
    ({"size": 1, "flag": 1}, "flag must be True or False"),
    ({"size": 1, "limit": "x"}, "limit must be a number or None"),
    ({"size": 1, "sise": 2}, "did you mean 'size'?"),
])
def test_bad_option_raises_with_name_and_limit(given, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        build_options(Part, given)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"size must be .*kind must be"):
        build_options(Part, {"size": 0, "kind": "c"})


def test_schedule_may_end_on_an_exclusive_bound():
    assert build_options(Part, {"size": 1, "rate": linear(0.5, 0.0)}).rate.end == 0.0


def test_whole_number_is_fine_where_a_number_is_due():
    assert build_options(Part, {"size": 1, "rate": 1}).rate == 1


@pytest.mark.parametrize(("steps", "at", "value"), [(None, 0, 1.0), (None, 500, 0.5), (None, 1000, 0.0),
                                                    (None, 5000, 0.0), (100, 50, 0.5), (100, 1000, 0.0)])
def test_schedule_reaches_its_end_at_its_length_or_the_target(steps, at, value):
    assert linear(1.0, 0.0, steps).value(at, target_steps=1000) == pytest.approx(value)


@pytest.mark.parametrize("arguments", [(math.inf, 0.0), (0.0, math.nan), (1.0, 0.0, 0)])
def test_schedule_refuses_ends_that_are_not_finite_and_no_length(arguments):
    with pytest.raises(ConfigError):
        linear(*arguments)


def test_factory_prints_the_call_that_makes_it_and_pickles():
    factory = Factory(Part, build_options(Part, {"size": 3, "flag": True}))
    assert repr(factory) == "Part.create_factory(size=3, flag=True)"
    again = pickle.loads(pickle.dumps(factory))
    assert again == factory
    part = again(device="cpu")
    assert (part.options.size, part.context) == (3, {"device": "cpu"})


def test_factory_prints_schedules_as_the_call_that_makes_them():
    assert "rate=linear(0.5, 0.0)" in repr(Factory(Part, build_options(Part, {"size": 1, "rate": linear(0.5, 0.0)})))
    assert repr(linear(1.0, 0.0, 10)) == "linear(1.0, 0.0, 10)"
