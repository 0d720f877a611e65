"""Test schedules: values, rejected arguments, use as options, printing, saved states, and changes during training."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass

import cloudpickle
import numpy as np
import pytest
import torch

import pytorchrl as prl
from pytorchrl.agent.options import Options, build_options, option
from pytorchrl.agent.schedules import Schedule, cosine, exponential, linear, piecewise, schedule_of
from pytorchrl.agent.updatable import Updatable
from pytorchrl.errors import ConfigError, WeightsError


class Part(Updatable):
    @dataclass(frozen=True, kw_only=True)
    class Options(Options):
        rate: float | Schedule = option(0.5, help="a rate", low=0.0, high=1.0, exclusive=True, updatable=True)
        share: float | Schedule | None = option(None, help="a share", updatable=True)
        plain: float = option(0.5, help="a number that no schedule moves", updatable=True)

    def __init__(self, **options):
        self.options = build_options(type(self), options)
        self._start_parameters()

    def rate_at(self, env_steps, target_steps=1000):
        self.follow_schedules(env_steps, target_steps)
        return self.parameters["rate"]


def falling(progress_remaining):
    return 0.5 * progress_remaining


class Callable:
    def __call__(self, progress_remaining):
        return falling(progress_remaining)


@pytest.mark.parametrize(("schedule", "at", "value"), [
    (linear(1.0, 0.0), 500, 0.5), (linear(1.0, 0.0, 100), 50, 0.5), (linear(1.0, 0.0, 1e2), 2000, 0.0),
    (cosine(1.0, 0.5), 0, 1.0), (cosine(1.0, 0.5), 250, 0.75 + math.cos(math.pi / 4) / 4),
    (cosine(1.0, 0.5), 500, 0.75),
    (cosine(1.0, 0.5), 1000, 0.5), (cosine(1.0, 0.0, 100), 100, 0.0), (exponential(1.0, 0.01), 0, 1.0),
    (exponential(1.0, 0.01), 500, 0.1), (exponential(1.0, 0.01), 3000, 0.01), (exponential(1.0, 0.01, 200), 100, 0.1),
    (piecewise((0, 1.0), (100, 0.5), (300, 0.7)), 0, 1.0), (piecewise((0, 1.0), (100, 0.5), (300, 0.7)), 50, 0.75),
    (piecewise((0, 1.0), (100, 0.5), (300, 0.7)), 100, 0.5), (piecewise((0, 1.0), (100, 0.5), (300, 0.7)), 200, 0.6),
    (piecewise((0, 1.0), (100, 0.5), (300, 0.7)), 300, 0.7), (piecewise((0, 1.0), (100, 0.5), (300, 0.7)), 9999, 0.7),
])
def test_values_after_a_number_of_env_steps(schedule, at, value):
    assert schedule.value(at, target_steps=1000) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: linear(math.inf, 0.0), "must be finite numbers, got inf"), (lambda: linear(0.0, math.nan), "finite"),
    (lambda: linear("1e-3", 0.0), "got '1e-3'"), (lambda: linear(True, 0.0), "got True"),
    (lambda: linear(1.0, 0.0, 0), "whole numbers >= 1, got 0"),
    (lambda: cosine(1.0, 0.0, 2.5), "whole numbers >= 1, got 2.5"),
    (lambda: exponential(1.0, 0.0), "must be > 0, got 1.0 to 0.0; use linear"),
    (lambda: piecewise((0, 1.0)), "two or more points"), (lambda: piecewise(0.1, 0.2), "two or more points"),
    (lambda: piecewise((0, 1.0), (5,)), "two or more points"),
    (lambda: piecewise((1, 1.0), (2, 1.0)), "must start at 0 and increase"),
    (lambda: piecewise((0, 1.0), (5, 1.0), (5, 2.0)), r"must start at 0 and increase, got \[0, 5, 5\]"),
    (lambda: piecewise((0, 1.0), (0.5, 0.1)), "whole numbers >= 0, got 0.5"),
    (lambda: piecewise((0, 1.0), (1, None)), "got None"),
    (lambda: schedule_of(["linear", 1.0]), "a schedule must have the form linear:START:END"),
    (lambda: schedule_of(["square", 1.0, 2.0]), "got square:1.0:2.0"),
    (lambda: schedule_of([]), "a schedule must have the form"),
    (lambda: schedule_of(["piecewise", 0, 1.0, 5]), "a schedule must have the form"),
    (lambda: schedule_of(["linear", "fast", "0"]), "made of numbers"),
])
def test_invalid_schedules_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("schedule", [
    linear(1e-3, 0), linear(0.1, 0.2, 10), cosine(1.0, 0.5), exponential(1.0, 1e-3, 10**6),
    piecewise((0, 0.1), (1e6, 1 / 3)),
    linear(np.float32(0.1), np.float64(0.3), np.int64(7))], ids=repr)
def test_a_schedule_prints_as_its_call_and_is_stored_as_plain_values(schedule):
    names = {name: getattr(prl, name) for name in ("linear", "cosine", "exponential", "piecewise")}
    assert eval(repr(schedule), {"__builtins__": {}}, names) == schedule
    assert schedule_of(json.loads(json.dumps(schedule.parts()))) == schedule
    assert schedule_of([str(part) for part in schedule.parts()]) == schedule


# As options


@pytest.mark.parametrize("points", [[(0, 0.5), (100, 0.25)], ((0, 0.5), (100, 0.25)), [[0, 0.5], [100, 0.25]]])
def test_a_list_of_points_is_a_piecewise_schedule(points):
    part = Part(rate=points)
    assert part.options.rate == piecewise((0, 0.5), (100, 0.25))
    assert [part.rate_at(steps) for steps in (0, 50, 1000)] == [0.5, 0.375, 0.25]


@pytest.mark.parametrize("function", [falling, Callable(), lambda progress: np.float32(falling(progress)),
                                      lambda progress: torch.tensor(falling(progress))])
def test_a_function_is_called_with_the_remaining_fraction_of_the_run(function):
    part = Part(rate=function)
    assert part.parameters["rate"] == 0.5
    assert [part.rate_at(steps) for steps in (0, 250, 1000, 2000)] == [0.5, 0.375, 0.0, 0.0]
    again = cloudpickle.loads(cloudpickle.dumps(part.options))
    assert again.rate.value(250, 1000) == 0.375


@pytest.mark.parametrize(("given", "message"), [
    ({"rate": [(0, 0.5), (10, 0.0), (20, 0.1)]}, r"^rate must be > 0.0 and <= 1.0, got piecewise\(\(0, 0.5\)"),
    ({"rate": [(0, 0.5), (10, 2.0)]}, "rate must be >= 0.0 and <= 1.0"),
    ({"rate": (0.1, 0.2)}, "^rate: a piecewise schedule needs two or more points"),
    ({"rate": lambda progress: 1.0 - progress}, r"^rate: .*<lambda> at progress_remaining=1 must be > 0.0 and <= 1.0, "
                                                r"got 0.0"),
    ({"rate": lambda progress: 0.5 - (progress == 0)}, "progress_remaining=0 must be >= 0.0"),
    ({"rate": lambda progress: 1 + progress / 2}, "must be > 0.0 and <= 1.0, got 1.5"),
    ({"rate": lambda progress: math.nan}, "must be finite, got nan"),
    ({"rate": lambda progress: None}, "must return a number, got None"),
    ({"rate": lambda: 0.1}, "raised TypeError"), ({"rate": float},
                                                  "rate must be a number > 0.0 and <= 1.0 or a schedule"),
    ({"plain": falling}, "plain must be a number"), ({"plain": [(0, 1.0), (1, 0.5)]}, "plain must be a number"),
    ({"rate": [(0, 2.0), (1, 0.5)], "share": "much"}, "rate must be .*\n- share must be"),
])
def test_schedules_outside_of_an_options_range_are_refused_immediately(given, message):
    with pytest.raises(ConfigError, match=message):
        Part(**given)


def test_a_function_may_end_on_an_exclusive_bound():
    assert Part(rate=falling).rate_at(1000) == 0.0


@pytest.mark.parametrize(("value", "message"), [
    (-0.5, "must be > 0.0 and <= 1.0, got -0.5"), (math.inf, "must be finite, got inf"),
    (None, "must return a number")])
def test_a_later_error_in_a_function_names_its_option(value, message):
    part = Part(rate=lambda progress: value if 0.5 < progress < 0.501 else 0.25)
    assert part.rate_at(500) == 0.25
    with pytest.raises(ConfigError, match=rf"^rate: .*<lambda> at progress_remaining=0.5004 {message}"):
        part.rate_at(4996, 10_000)


def test_functions_print_as_their_names():
    assert repr(Part(rate=falling).options.rate) == f"{__name__}.falling"
    assert repr(Part(rate=Callable()).options.rate) == f"{__name__}.Callable"
    assert repr(Part(rate=functools.partial(falling)).options.rate) == "functools.partial"
    assert repr(Part(share=float.__abs__).options.share) == "builtins.wrapper_descriptor"


# While training


def test_points_given_while_training_start_a_schedule_and_functions_are_refused():
    part = Part(rate=falling)
    with pytest.raises(ConfigError, match=r"rate cannot become a function while training.*linear"):
        part._update_option("rate", lambda progress: 0.1)
    assert part.rate_at(500) == 0.25
    part._update_option("rate", [(0, 0.5), (100, 0.25)])
    assert (part.parameters["rate"], part.rate_at(100)) == (0.5, 0.25)
    part._update_option("rate", 0.125)
    assert part.rate_at(500) == 0.125


@pytest.mark.parametrize("schedule", [linear(0.5, 0.1), cosine(0.5, 0.1, 700), piecewise((0, 0.5), (600, 0.1)),
                                      falling], ids=["linear", "cosine", "piecewise", "function"])
def test_a_state_restores_the_active_schedules(schedule):
    part = Part(rate=schedule, share=linear(1.0, 0.0))
    state = json.loads(json.dumps(part.schedules_state()))
    other = Part(rate=schedule if callable(schedule) else 0.9, share=0.5)
    other.load_schedules(state)
    assert dict(other.schedules) == dict(part.schedules)
    assert other.rate_at(300) == part.rate_at(300)


def test_a_state_with_a_function_that_the_options_lack_is_refused():
    state = Part(rate=falling).schedules_state()
    for rate in (0.5, lambda progress: 0.5):
        with pytest.raises(WeightsError, match=r"function .*\.falling as schedule of rate, the options have"):
            Part(rate=rate).load_schedules(state)
    Part(rate=falling).load_schedules(state)
