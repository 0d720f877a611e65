"""Take a value apart into its structure, its scalars and its arrays, and build an equal value from these.

Messages of the same kind differ in their scalars and arrays, but usually have the same structure: the same types,
field names, keys and dtypes. A channel therefore sends each structure once, as a pickle. The scalars of a message are
encoded by `marshal`, which is fast but supports only plain values, and the arrays are copied into shared memory. Only
objects of other types, such as exceptions, are pickled in each message.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeAlias

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from pytorchrl.support.untyped import Payload

Structure: TypeAlias = tuple[object, ...]
"""Description of all that the values of one structure share. The first entry is the kind of the value. Depending on it,
the other entries are a type, names, a dtype, or the structures of the value's parts."""
Value: TypeAlias = Payload
"""A value whose type depends on its structure."""
ScalarList: TypeAlias = list[Payload]
"""Plain values, which `marshal` can read."""
Scalars: TypeAlias = Iterator[Payload]
"""Plain values, in the order in which a builder needs them."""
Build: TypeAlias = Callable[[Scalars, np.ndarray, Iterator["Stored"]], Value]
"""Function that builds a value from the message's scalars, the bytes of its arrays, and its stored values."""
Stored: TypeAlias = tuple[Scalars, np.ndarray]
"""Scalars, and bytes of the arrays, of a value that was stored once for many readers."""

Take: TypeAlias = Callable[[Value, "MessageParts"], Structure]
"""Function that adds the scalars and arrays of a value to the parts of a message, and returns the value's structure."""

ALIGNMENT = 64
"""Offsets of arrays are multiples of this number of bytes."""

SCALAR: Structure = ("scalar",)
_PICKLED: Structure = ("pickled",)
_PLAIN = {type(None), bool, int, float, str, bytes}
_CONSTANT = (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum, torch.dtype)
_TENSORS = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
            torch.bool}


@dataclass(slots=True)
class MessageParts:
    """The scalars and arrays of a value.

    Attributes:
        scalars: Plain values in the order in which the builder needs them.
        arrays: (offset in bytes, array) for each array.
        size: Bytes of all arrays, including the gaps between them.
        stored: The `StoredValue` objects that the value contains, in the order in which the builder needs them.
    """

    scalars: ScalarList = field(default_factory=list)
    arrays: list[tuple[int, np.ndarray]] = field(default_factory=list)
    size: int = 0
    stored: list[StoredValue] = field(default_factory=list)

    def add(self, array: np.ndarray) -> int:
        """Add an array; return its offset."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.arrays.append((offset, array))
        self.size = offset + array.nbytes
        return offset

    def copy_to(self, memory: np.ndarray) -> None:
        """Copy the arrays to their offsets in `memory`, a uint8 array of shape (size,)."""
        for offset, array in self.arrays:
            if array.nbytes:
                np.copyto(np.ndarray(array.shape, array.dtype, memory, offset), array)


class StoredValue:
    """Base class of objects that stand for a value in messages. The value itself is stored once, for many readers.

    Attributes:
        structure: Structure of the stored value, as returned by `take_apart`.
    """

    structure: Structure


def take_apart(value: object) -> tuple[Structure, MessageParts]:
    """Divide a value into its structure and its parts (scalars and arrays), from which an equal value can be built.

    Within the value, an object that cannot be divided in this way, such as an exception, is pickled. In the rebuilt
    value, arrays are read-only, and tensors are writable. If an object occurs twice in the value, the rebuilt value
    contains two equal objects, unless both occurrences are within one pickled object.
    """
    parts = MessageParts()
    try:
        return _take(value, parts), parts
    except RecursionError:  # the value contains itself
        parts = MessageParts()
        return _take_other(value, parts), parts


def _take(value: object, parts: MessageParts) -> Structure:
    kind = type(value)
    if kind in _PLAIN:
        parts.scalars.append(value)
        return SCALAR
    take = _TAKERS.get(kind)
    if take is None:
        take = _TAKERS[kind] = _taker_of(kind)
    return take(value, parts)


def _taker_of(kind: type) -> Take:
    """Return the function with which `_take` divides values of type `kind` into structure and parts."""
    if issubclass(kind, _CONSTANT):
        return _take_constant
    if issubclass(kind, StoredValue):
        return _take_stored
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__:
        return _take_sequence
    if dataclasses.is_dataclass(kind) and _is_plain(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))

        def take(value: object, parts: MessageParts) -> Structure:
            if len(getattr(value, "__dict__", names)) != len(names):  # it has attributes that are not fields
                return _take_other(value, parts)
            return ("object", kind, names, tuple([_take(getattr(value, name), parts) for name in names]))
        return take
    return _take_other


def _is_plain(kind: type) -> bool:
    """Return whether the fields of a dataclass suffice to rebuild its objects; False if it customizes pickling."""
    if getattr(kind, "__new__", None) is not object.__new__:  # exceptions have their own `__new__`
        return False
    own = [vars(base) for base in kind.__mro__[:-1]]
    names = {name for names in own for name in names} & {"__reduce__", "__reduce_ex__", "__getnewargs__",
                                                           "__getnewargs_ex__", "__getstate__", "__setstate__"}
    is_slotted = all("__slots__" in names for names in own)
    # A frozen dataclass with slots has its own `__getstate__` and `__setstate__`, which only handle the fields.
    return not names or (is_slotted and names == {"__getstate__", "__setstate__"} and all(
        getattr(kind, name).__module__ == "dataclasses" for name in names))


def _take_sequence(value: Sequence[object], parts: MessageParts) -> Structure:
    parts.scalars.append(len(value))
    children = [_take(item, parts) for item in value]
    if children and children.count(children[0]) == len(children):
        return ("repeat", type(value), children[0])
    return ("sequence", type(value), tuple(children))


def _take_dict(value: Mapping[object, object] | Mapping[str, object], parts: MessageParts) -> Structure:
    if all(type(key) is str for key in value):
        return ("dict", tuple(value), tuple([_take(item, parts) for item in value.values()]))
    return ("mapping", _take_sequence(list(value), parts), _take_sequence(list(value.values()), parts))


def _take_default_dict(value: defaultdict[object, object], parts: MessageParts) -> Structure:
    return ("default_dict", _take(value.default_factory, parts), _take_dict(value, parts))


def _take_partial(value: partial[object], parts: MessageParts) -> Structure:
    if value.__dict__:
        return _take_other(value, parts)
    return ("partial", _take_sequence((value.func, *value.args), parts), _take_dict(value.keywords, parts))


def _take_array(value: np.ndarray, parts: MessageParts) -> Structure:
    if value.dtype.kind not in "biufc":
        return _take_other(value, parts)
    parts.scalars.append((parts.add(value), value.shape))
    return ("array", value.dtype.str)


def _take_tensor(value: Tensor, parts: MessageParts) -> Structure:
    if (value.dtype not in _TENSORS or value.requires_grad or value.device.type != "cpu"
            or value.layout is not torch.strided or value.is_neg() or vars(value)):
        return _take_other(value, parts)
    return ("tensor", _take_array(value.numpy(), parts))


def _take_constant(value: object, parts: MessageParts) -> Structure:
    return ("constant", type(value), value)  # with the type, because members of different enums can be equal


def _take_stored(value: StoredValue, parts: MessageParts) -> Structure:
    parts.stored.append(value)
    return ("stored", value.structure)


def _take_other(value: object, parts: MessageParts) -> Structure:
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    places = []
    for buffer in buffers:
        array: np.ndarray = np.frombuffer(buffer.raw(), np.uint8)
        places.append((parts.add(array), array.nbytes))
    parts.scalars.append((pickled, tuple(places)))
    return _PICKLED


_TAKERS: dict[type, Take] = {
    list: _take_sequence, tuple: _take_sequence, dict: _take_dict,
    defaultdict: _take_default_dict, partial: _take_partial, np.ndarray: _take_array, Tensor: _take_tensor}


def builder_of(structure: Structure) -> Build:
    """Return the function that rebuilds values with the given structure from their scalars and arrays."""
    build: Build = _BUILDERS[str(structure[0])](*structure[1:])
    return build


def _scalar() -> Build:
    return lambda scalars, data, stored: next(scalars)


def _object(kind: type, names: tuple[str, ...], structures: tuple[Structure, ...]) -> Build:
    # Most fields are scalars; calling a function for each of them would take twice as long.
    builders = tuple((name, None if structure == SCALAR else builder_of(structure))
                     for name, structure in zip(names, structures, strict=True))
    create, set_field = object.__new__, object.__setattr__

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        made: object = create(kind)
        for name, part in builders:  # `set_field` sets fields of frozen dataclasses, too
            set_field(made, name, next(scalars) if part is None else part(scalars, data, stored))
        return made
    return build


def _repeat(kind: type[list[object]] | type[tuple[object, ...]], structure: Structure) -> Build:
    if structure == SCALAR:
        return lambda scalars, data, stored: _as_sequence(kind, list(islice(scalars, next(scalars))))
    part = builder_of(structure)

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        return _as_sequence(kind, [part(scalars, data, stored) for _ in range(next(scalars))])
    return build


def _sequence(kind: type[list[object]] | type[tuple[object, ...]], structures: tuple[Structure, ...]) -> Build:
    builders = tuple(map(builder_of, structures))

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        next(scalars)
        return _as_sequence(kind, [part(scalars, data, stored) for part in builders])
    return build


def _as_sequence(kind: type[list[object]] | type[tuple[object, ...]], items: list[object]) -> object:
    if kind is list:
        return items
    return tuple(items) if kind is tuple else tuple.__new__(kind, items)  # type: ignore[type-var]


def _dict(names: tuple[str, ...], structures: tuple[Structure, ...]) -> Build:
    if structures.count(SCALAR) == len(structures):
        return lambda scalars, data, stored: dict(zip(names, scalars, strict=False))
    builders = tuple(zip(names, map(builder_of, structures), strict=True))
    return lambda scalars, data, stored: {name: part(scalars, data, stored) for name, part in builders}


def _mapping(keys: Structure, values: Structure) -> Build:
    build_keys, build_values = builder_of(keys), builder_of(values)

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        found = build_keys(scalars, data, stored)
        return dict(zip(found, build_values(scalars, data, stored), strict=True))
    return build


def _default_dict(factory: Structure, structure: Structure) -> Build:
    build_factory, build_dict = builder_of(factory), builder_of(structure)

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        made = build_factory(scalars, data, stored)
        return defaultdict(made, build_dict(scalars, data, stored))
    return build


def _partial(positional: Structure, keywords: Structure) -> Build:
    build_positional, build_keywords = builder_of(positional), builder_of(keywords)

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        arguments = build_positional(scalars, data, stored)
        return partial(*arguments, **build_keywords(scalars, data, stored))
    return build


def _array(dtype: str) -> Build:
    kind, create = np.dtype(dtype), np.ndarray

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        offset, shape = next(scalars)
        return create(shape, kind, data, offset) if 0 not in shape else np.empty(shape, kind)
    return build


def _tensor(structure: Structure) -> Build:
    part = builder_of(structure)
    return lambda scalars, data, stored: torch.from_numpy(np.array(part(scalars, data, stored)))


def _constant(kind: type, value: object) -> Build:
    return lambda scalars, data, stored: value


def _stored(structure: Structure) -> Build:
    part = builder_of(structure)

    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        own_scalars, own_data = next(stored)
        return part(own_scalars, own_data, stored)
    return build


def _pickled() -> Build:
    def build(scalars: Scalars, data: np.ndarray, stored: Iterator[Stored]) -> object:
        pickled, places = next(scalars)
        return pickle.loads(pickled, buffers=[data[start:start + size] for start, size in places])
    return build


_BUILDERS: dict[str, Callable[..., Build]] = {
    "scalar": _scalar, "object": _object, "repeat": _repeat, "sequence": _sequence, "dict": _dict, "mapping": _mapping,
    "default_dict": _default_dict, "partial": _partial, "array": _array, "tensor": _tensor, "constant": _constant,
    "stored": _stored, "pickled": _pickled}
