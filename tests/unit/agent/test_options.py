"""Test the checks of option names, types, ranges and choices, and the printing and pickling of factories."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

import pytorchrl
from pytorchrl import PPO
from pytorchrl.agent.names_elsewhere import HOMES
from pytorchrl.agent.options import Factory, Options, build_options, option
from pytorchrl.agent.schedules import Schedule, linear
from pytorchrl.errors import ConfigError, FactoryError


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
    ({"size": 0}, "size must be a whole number >= 1, got 0"),
    ({"size": True}, "size must be a whole number >= 1, got True"),
    ({"size": 2.0}, "size must be a whole number >= 1, got 2.0"),
    ({"size": "2"}, "size must be a whole number"),
    ({"size": 1, "rate": 0.0}, "rate must be a number > 0.0 and <= 1.0"),
    ({"size": 1, "rate": math.nan}, "rate must be finite"),
    ({"size": 1, "rate": linear(0.0, 1.0)}, "rate must be > 0.0"),
    ({"size": 1, "rate": linear(1.0, 2.0)}, "<= 1.0"),
    ({"size": 1, "kind": "be"}, "did you mean 'bee'?"),
    ({"size": 1, "kind": type("Bee", (), {})}, "kind must be one of .*'bee'.*; did you mean 'bee'?"),
    ({"size": 1, "kind": True}, r"kind must be one of \['a', 'bee'\], got True"),
    ({"size": 1, "kind": ["a"]}, r"kind must be one of \['a', 'bee'\], got \['a'\]"),
    ({"size": 1, "sizes": (64, 0)}, "sizes must be a tuple or list of whole numbers >= 1"),
    ({"size": 1, "sizes": [64, 0.5]}, r"sizes must be a tuple or list of whole numbers >= 1, got \(64, 0.5\)"),
    ({"size": 1, "sizes": 64}, "sizes must be a tuple or list of whole numbers >= 1, got 64"),
    ({"size": 1, "sizes": "64"}, "sizes must be a tuple or list"),
    ({"size": 1, "flag": 1}, "flag must be True or False"),
    ({"size": 1, "limit": "x"}, "limit must be a number or None"),
    ({"size": 1, "sise": 2}, "did you mean 'size'?"),  # codespell:ignore sise
])
def test_bad_option_raises_with_name_and_limit(given, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        build_options(Part, given)


@pytest.mark.parametrize("sizes", [[], [64], [32, 16], (8,)])
def test_lists_are_accepted_for_tuples(sizes):
    options = build_options(Part, {"size": 1, "sizes": sizes})
    assert options.sizes == tuple(sizes)
    assert options == build_options(Part, {"size": 1, "sizes": tuple(sizes)})
    assert hash(Factory(Part, options)) == hash(Factory(Part, build_options(Part, {"size": 1, "sizes": tuple(sizes)})))


def test_a_list_is_accepted_for_an_optional_tuple_and_stays_one_elsewhere():
    class Lists:
        @dataclass(frozen=True, kw_only=True)
        class Options(Options):
            some: tuple[int, ...] | None = option(None, help="some numbers, or none")
            anything: Any = option(None, help="anything")

    options = build_options(Lists, {"some": [1, 2], "anything": [1, 2]})
    assert (options.some, options.anything) == ((1, 2), [1, 2])


# Declarations


class Bare:
    class Options(PPO.Options):
        my_coef: float = option(0.1, help="a weight")


class Deeper:
    @dataclass(frozen=True, kw_only=True)
    class Options(Bare.Options):
        own: float = option(0.1, help="a weight")


class Unannotated:
    class Options(PPO.Options):
        lr = 2.0


class UnannotatedInside:
    @dataclass(frozen=True, kw_only=True)
    class Options(PPO.Options):
        gamma = 0.5
        own: float = option(0.1, help="a weight")


class NewUnannotated:
    class Options(PPO.Options):
        my_coef = option(0.1, help="a weight")


class Unrelated:
    class Options:
        my_coef = 0.1


@pytest.mark.parametrize(("owner", "options", "message"), [
    (Bare, {"my_coef": 0.2}, r"Bare.Options declares my_coef but is not a dataclass; write @dataclass\(frozen=True, "
                             r"kw_only=True\) above it"),
    (Bare, {}, "Bare.Options declares my_coef but is not a dataclass"),
    (Deeper, {}, "Bare.Options declares my_coef but is not a dataclass"),
    (Unannotated, {}, "Unannotated.Options sets lr without an annotation"),
    (UnannotatedInside, {}, "UnannotatedInside.Options sets gamma without an annotation"),
    (NewUnannotated, {"my_coef": 0.2}, "NewUnannotated.Options sets my_coef without an annotation"),
    (Unrelated, {}, "Unrelated.Options must be a class that inherits from the Options of the part it extends"),
])
def test_an_options_class_with_ignored_fields_is_refused(owner, options, message):
    with pytest.raises(ConfigError, match=message):
        build_options(owner, options)


def test_a_part_with_ignored_option_fields_is_refused_by_its_factory():
    class Mine(PPO):
        class Options(PPO.Options):
            my_coef: float = option(0.1, help="a weight")

    with pytest.raises(ConfigError, match=r"Mine.Options declares my_coef but is not a dataclass"):
        Mine.create_factory(my_coef=0.2)


@pytest.mark.parametrize("part", [
    pytorchrl.PPO, pytorchrl.A2C, pytorchrl.IMPALA, pytorchrl.APPO, pytorchrl.DQN, pytorchrl.R2D2, pytorchrl.DDPG,
    pytorchrl.TD3, pytorchrl.SAC,
    pytorchrl.OnPolicyActor, pytorchrl.QActor, pytorchrl.OffPolicyActor, pytorchrl.VanillaOnPolicyBuffer,
    pytorchrl.GAEBuffer,
    pytorchrl.VTraceBuffer, pytorchrl.ReplayBuffer, pytorchrl.PERBuffer, pytorchrl.SequenceBuffer, pytorchrl.VecEnv,
    pytorchrl.MultiAgentVecEnv])
def test_an_error_for_a_part_without_options_names_its_factory(part):
    name = part.__name__
    assert part.home in HOMES
    for arguments, options, shown in (((), {}, ""), (("CartPole-v1",), {}, "'CartPole-v1'"), ((), {"lr": 1}, "lr=1")):
        with pytest.raises(FactoryError) as caught:
            part(*arguments, **options)
        assert str(caught.value).startswith(f"{name}({shown}) needs checked options")
        assert str(caught.value).endswith(f"{name}.create_factory(...)")


def test_user_defined_constructors_are_called_as_declared():
    class Own(pytorchrl.GAEBuffer):
        def __init__(self, number):
            self.number = number

    assert Own(3).number == 3
    assert next(iter(inspect.signature(pytorchrl.GAEBuffer).parameters)) == "options"


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"size must be .*\n- kind must be"):
        build_options(Part, {"size": 0, "kind": "c"})


def test_schedule_may_end_on_an_exclusive_bound():
    assert build_options(Part, {"size": 1, "rate": linear(0.5, 0.0)}).rate.end == 0.0


def test_whole_numbers_are_accepted_as_numbers():
    assert build_options(Part, {"size": 1, "rate": 1}).rate == 1


@pytest.mark.parametrize(("steps", "at", "value"), [(None, 0, 1.0), (None, 500, 0.5), (None, 1000, 0.0),
                                                    (None, 5000, 0.0), (100, 50, 0.5), (100, 1000, 0.0)])
def test_schedule_reaches_its_end_at_its_length_or_the_target(steps, at, value):
    assert linear(1.0, 0.0, steps).value(at, target_steps=1000) == pytest.approx(value)


@pytest.mark.parametrize("arguments", [(math.inf, 0.0), (0.0, math.nan), (1.0, 0.0, 0)])
def test_schedule_refuses_ends_that_are_not_finite_and_no_length(arguments):
    with pytest.raises(ConfigError):
        linear(*arguments)


def test_factory_prints_its_call_and_can_be_pickled():
    factory = Factory(Part, build_options(Part, {"size": 3, "flag": True}))
    assert repr(factory) == "Part.create_factory(size=3, flag=True)"
    again = pickle.loads(pickle.dumps(factory))
    assert again == factory
    part = again(device="cpu")
    assert (part.options.size, part.context) == (3, {"device": "cpu"})


def test_factory_prints_schedules_as_calls():
    assert "rate=linear(0.5, 0.0)" in repr(Factory(Part, build_options(Part, {"size": 1, "rate": linear(0.5, 0.0)})))
    assert repr(linear(1.0, 0.0, 10)) == "linear(1.0, 0.0, 10)"
