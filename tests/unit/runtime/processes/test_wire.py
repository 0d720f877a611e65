"""Tests that values are built again as they were, and that similar values have the same structure."""

from __future__ import annotations

import dataclasses
import enum
import marshal
import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from pytorchrl.agent.data import Episode
from pytorchrl.errors import EnvError
from pytorchrl.runtime.processes.wire import builder_of, take_apart
from pytorchrl.scheme.transport.codecs import get_codec
from pytorchrl.scheme.transport.encoder import Sent, Traffic
from pytorchrl.scheme.transport.messages import Gradients, Rollout, RolloutHeader, Weights
from pytorchrl.scheme.options.base import ASYNC
from pytorchrl.scheme.ledger import Ledger


class Point(NamedTuple):
    x: int
    y: object


class Color(str, enum.Enum):
    RED = "red"


class Flavor(str, enum.Enum):
    RED = "red"


@dataclass
class Plain:
    a: object
    b: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    a: object
    b: int = 0


@dataclass
class Reduced:
    a: int

    def __reduce__(self):
        return Reduced, (self.a + 1,)


def sent(value):
    """Return the value as another process would build it, and its structure."""
    structure, parts = take_apart(value)
    memory = np.zeros(parts.size, np.uint8)
    parts.copy_to(memory)
    scalars = marshal.loads(marshal.dumps(parts.scalars, 2))
    build = builder_of(cloudpickle.loads(cloudpickle.dumps(structure)))
    left = iter(scalars)
    built = build(left, memory, iter([]))
    assert list(left) == []
    return built, structure


def check_equal(value, other):
    """Check that two values have the same types and contents, bit for bit."""
    assert type(value) is type(other)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        first, second = (np.ascontiguousarray(array) for array in (value, other))
        assert first.tobytes() == second.tobytes()
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            check_equal(getattr(value, each.name), getattr(other, each.name))
    elif isinstance(value, dict):
        assert list(value) == list(other)
        for key in value:
            check_equal(value[key], other[key])
    elif isinstance(value, (list, tuple)):
        assert len(value) == len(other)
        for pair in zip(value, other, strict=True):
            check_equal(*pair)
    elif isinstance(value, partial):
        check_equal((value.func, value.args, value.keywords), (other.func, other.args, other.keywords))
    else:
        assert value == other or value != value


@pytest.mark.parametrize("value", [
    None, True, -1, 2**80, 1.5, float("inf"), "text", "\ud800", b"bytes", (), [], {}, (1, "a", None), [1.0] * 20,
    [[], [1]], {"a": 1, "b": {"c": [None, 2]}}, {1: "a", (2, 3): "b"}, {"a": 1, 2: "b"}, Point(1, [2]),
    [Point(1, "a"), Point(2, "b")], Plain(1, [2]), Frozen((1, 2)), [Frozen(1), Frozen(2.0)], Color.RED,
    [Color.RED, Flavor.RED], np.float64(2.5), {3, 4}, 1j, range(3), len, random.Random,
    Episode(1.0, 2, 3.0, 0, True), get_codec("fp16"), ASYNC, Ledger().snapshot(),
    defaultdict(int, a=1), defaultdict(None, {1: 2}), partial(int, "11", base=2), torch.float32,
], ids=lambda value: type(value).__name__)
def test_values(value):
    check_equal(sent(value)[0], value)


@pytest.mark.parametrize("array", [
    np.arange(12, dtype=np.float32).reshape(3, 4).T, np.arange(10)[::2], np.zeros((0, 4), np.int8), np.array(3.0),
    np.array([1, 2], ">i4"), np.array([True, False]), np.array(["a", "bcd"]), np.array([None, 1], object),
    np.zeros(2, [("x", "i4"), ("y", "f8")]), np.array([1 + 2j])], ids=lambda array: array.dtype.str)
def test_arrays(array):
    built, _ = sent({"first": np.ones(3, np.uint8), "then": array})
    check_equal(built["then"], array)
    check_equal(built["first"], np.ones(3, np.uint8))


@pytest.mark.parametrize("tensor", [
    torch.arange(6.0).reshape(2, 3).T, torch.zeros(0, 2), torch.tensor([True]), torch.ones(2, dtype=torch.bfloat16),
    torch.nn.Parameter(torch.ones(2))], ids=repr)
def test_tensors_are_writable_copies(tensor):
    built, _ = sent([tensor])
    assert type(built[0]) is type(tensor)
    assert built[0].requires_grad == tensor.requires_grad
    assert torch.equal(built[0], tensor)
    built[0].detach().zero_()


def random_value(rng, depth):
    kind = rng.randrange(4 if depth == 0 else 9)
    if kind < 3:
        return rng.choice([None, True, 3, -2**40, 0.25, "a", "", b"x"])
    if kind == 3:
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        dtype = rng.choice([np.uint8, np.int64, np.float32, np.float64, bool])
        return np.random.default_rng(rng.randrange(1000)).integers(0, 100, shape).astype(dtype)
    parts = [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 4:
        return parts
    if kind == 5:
        return tuple(parts)
    if kind == 6:
        return {rng.choice("abcdefgh") + str(index): part for index, part in enumerate(parts)}
    if kind == 7:
        return dict(enumerate(parts))
    return rng.choice([Plain, Frozen, Point])(rng.randrange(10), rng.randrange(10)) if rng.random() < 0.5 else Plain(
        parts, parts)


@pytest.mark.parametrize("seed", range(8))
def test_random_values(seed):
    rng = random.Random(seed)
    for _ in range(60):
        value = random_value(rng, 4)
        check_equal(sent(value)[0], value)


def rollout(number):
    """Return a rollout whose shapes and numbers of episodes depend on `number`."""
    data = {name: np.full((number + 1, 2), number, np.float32) for name in ("obs", "reward")}
    return Rollout(data, RolloutHeader(
        num_env_steps=number, size=number, collected_steps=2**40, weights_version=number, worker=1,
        sequence=3, episodes=tuple(Episode(float(index), index, 0.5, 0, True) for index in range(number)),
        timings={"inference": 0.25},
        moments={"obs": (1.0, np.zeros(number), 2.0)}, sent=Sent(raw=number), traffic={"weights": Traffic(number)}))


def test_similar_messages_have_one_structure():
    structures = set()
    for number in range(1, 20):
        built, structure = sent(rollout(number))
        check_equal(built, rollout(number))
        structures.add(structure)
    assert len(structures) == 1


def test_messages_are_not_pickled(monkeypatch):
    """Check that no part of the messages of training is pickled, except functions, which belong to the structure."""
    monkeypatch.setattr(
        "pytorchrl.runtime.processes.wire._take_other", lambda value, parts: pytest.fail(f"pickled {value!r}"))
    packed = get_codec("fp16").pack(np.linspace(0, 1, 100, dtype=np.float32))
    for message in (rollout(3), Weights(1, {"all": packed}, {"lr": 0.1}), Gradients(
            [np.ones(3, np.float32)], 4, 4, 1, 1, 1, {"loss": 0.5}, Ledger().snapshot())):
        take_apart(message)


def test_arrays_are_not_copied_by_the_reader():
    built, _ = sent([np.zeros(3)])
    assert not built[0].flags.owndata


def test_objects_of_other_types_are_pickled():
    assert sent([Reduced(1)])[0] == [Reduced(2)]
    error = sent((EnvError("broken"), 3))[0][0]
    assert type(error) is EnvError
    assert str(error) == "broken"
    more = Plain(1)
    more.c = np.arange(3)
    built, _ = sent([more])
    check_equal(built[0].c, more.c)


def test_a_list_that_contains_itself_is_pickled():
    value = [1]
    value.append(value)
    built, _ = sent(value)
    assert built[1] is built
