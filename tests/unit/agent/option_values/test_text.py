"""Tests of the values of options as text: parsing what `to_text` writes, and Python's notation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from pytorchrl.agent.schedules import Schedule, cosine, exponential, linear, piecewise
from pytorchrl.agent.option_values.text import form_of, parse, to_python, to_text
from pytorchrl.errors import ConfigError
from pytorchrl.support.code import Code
from pytorchrl.scheme import Communication


@pytest.mark.parametrize(("hint", "text", "value"), [
    (int, "08", 8), (int, "1e6", 1_000_000), (int, "-3", -3), (float, "1e-3", 1e-3), (float, "2", 2.0),
    (bool, "no", False), (bool, "Yes", True), (bool, "0", False), (str, "no", "no"), (int | None, "none", None),
    (int | None, "5", 5), (float | Schedule, "0.1", 0.1), (float | Schedule, "linear:2.5e-4:0", linear(2.5e-4, 0)),
    (float | Schedule, "linear:1:0:1e6", linear(1, 0, 10**6)), (float | Schedule, "linear(1e-3, 0)", linear(1e-3, 0)),
    (float | Schedule, "cosine:1:0", cosine(1, 0)), (float | Schedule, "exponential(1,0.1,50)",
                                                     exponential(1, 0.1, 50)),
    (float | Schedule, "piecewise:0:1e-3:1e6:1e-4", piecewise((0, 1e-3), (10**6, 1e-4))),
    (float | Schedule, "piecewise((0, 1e-3), (1e6, 1e-4))", piecewise((0, 1e-3), (10**6, 1e-4))),
    (float | Schedule, "[(0, 1e-3), (1e6, 1e-4)]", piecewise((0, 1e-3), (10**6, 1e-4))),
    (float | Schedule, "[[0, 1], [5, 2]]", piecewise((0, 1), (5, 2))), (tuple[int, ...], "64,64", (64, 64)),
    (tuple[int, ...], "(32, 16)", (32, 16)), (tuple[int, ...], "", ()), (tuple[str, ...], "a,b", ("a", "b")),
    (str | float | None, "0.1", 0.1), (str | float | None, "sign", "sign"), (str | float | None, "none", None),
    (str | Callable[..., Any], "cnn", "cnn"), (dict[str, Any], '{"a": [1]}', {"a": [1]}),
    (Mapping[str, float], '{"num_cpus": 1}', {"num_cpus": 1}), (Communication, "asynchronous", "asynchronous"),
])
def test_texts_are_converted_to_the_type(hint, text, value):
    parsed = parse(text, hint)
    assert parsed == value
    assert type(parsed) is type(value) or isinstance(value, str)


@pytest.mark.parametrize(("hint", "text"), [
    (int, "1.5"), (int, ""), (int, "inf"), (int, "9" * 5000), (float, "fast"), (bool, "2"), (bool, ""),
    (int | None, "nil"), (float | Schedule, "linear:1"), (float | Schedule, "square:1:0"),
    (float | Schedule, "linear:nan:0"), (float | Schedule, "linear"), (float | Schedule, "exponential:1:0"),
    (float | Schedule, ""),
    (float | Schedule, "piecewise:0:1:5"), (float | Schedule, "[(0, 1)]"), (float | Schedule, "[0.1"),
    (float | Schedule, "f(0, 1)"),
    (float | Schedule, "[" * 100_000), (float | Schedule, "linear:" + "9" * 5000), (tuple[int, ...], "1,two"),
    (dict[str, Any], "[1]"),
    (dict[str, Any], "[" * 100_000), (Communication, "asink"),
])
def test_invalid_texts_are_refused_with_a_short_message(hint, text):
    with pytest.raises(ConfigError) as caught:
        parse(text, hint)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("hint", "text", "message"), [
    (float | Schedule, "fast", r"^expected NUMBER or a schedule \(linear:START:END.*\), got 'fast'$"),
    (float | Schedule, "linear:1", "^a schedule must have the form linear:START:END.*, got linear:1$"),
    (Communication, "asink", "^communication must be one of .*, got 'asink'; did you mean 'asynchronous'"),
])
def test_the_message_states_what_is_wrong_with_a_text(hint, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, hint)


@pytest.mark.parametrize("hint", [Any, Callable[..., Any], tuple[Any, ...], type])
def test_values_of_types_without_another_form_are_code_that_is_named(hint):
    is_tuple = hint == tuple[Any, ...]
    assert form_of(hint) == ("MODULE:NAME,..." if is_tuple else "MODULE:NAME")
    for text, code in (("a.b:C", Code("a.b:C")), ('{"call": "a:b", "x": [1, 2]}', Code("a:b", {"x": [1, 2]}))):
        assert parse(text, hint) == ((code,) if is_tuple else code)
    for text in ("x", "a:b:c", '{"x": 1}', "a:b-v0"):
        with pytest.raises(ConfigError, match=r"expected (MODULE|code such as my_project:name).*, got"):
            parse(text, hint)


def test_form_shows_every_format_of_a_value():
    assert form_of(float | Schedule) == "NUMBER|SCHEDULE"
    assert form_of(Communication | str | None) == "none|synchronous|asynchronous"


@pytest.mark.parametrize(("hint", "value", "text"), [
    (int | None, None, "none"), (bool, True, "yes"), (bool, False, "no"), (int, 10**6, "1000000"),
    (float, 0.1 + 0.2, "0.30000000000000004"), (float, 1e-5, "1e-05"), (tuple[int, ...], (64, 32), "64,32"),
    (float | Schedule, linear(1 / 3, 0, 1000), "linear:0.3333333333333333:0:1000"),
    (float | Schedule, piecewise((0, 1.0), (50, 2.5e-4)), "piecewise:0:1:50:0.00025"),
    (Mapping[str, Any], {"num_cpus": [1, "a"]}, '{"num_cpus": [1, "a"]}'), (Communication, Communication.SYNC,
                                                                           "synchronous"),
])
def test_text_is_what_a_user_types(hint, value, text):
    assert to_text(value) == text
    assert parse(text, hint) == value


@pytest.mark.parametrize(("value", "text"), [
    (Communication.SYNC, "'synchronous'"), ("synchronous", "'synchronous'"), (linear(1e-3, 0), "linear(0.001, 0.0)"),
    (MappingProxyType({"a": (1,)}), "{'a': (1,)}"), (frozenset({"b", "a"}), "['a', 'b']"),
    ({"a": {Communication.ASYNC: {"d", "c"}}}, "{'a': {'asynchronous': ['c', 'd']}}"),
    (print, "<built-in function print>"), (argparse.Namespace, "<class 'argparse.Namespace'>"),
    (object(), "<object object>"),
])
def test_python_notation_is_the_same_in_every_process(value, text):
    assert to_python(value) == text
