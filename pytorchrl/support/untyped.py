"""Names for values whose types are only known at run time.

Each name is an alias of `Any` that states why the type is unknown. An annotation uses one of these names instead of
`Any`, or explains `Any` in a comment on the same line.
"""

from __future__ import annotations

from typing import Any, TypeAlias

OptionValue: TypeAlias = Any
"""The value of an option, before it is checked against the type that its declaration states."""

UserPart: TypeAlias = Any
"""A part of an agent; its class need not derive from a class of the library. `agent.contracts` checks its members."""

StateDict: TypeAlias = dict[str, Any]
"""Saved state: tensors, arrays, plain values and containers of them, in the layout of the class that saved it."""

Json: TypeAlias = Any
"""A value that is read from a JSON file or written to one; the reader checks its type."""

MetricsDict: TypeAlias = dict[str, Any]
"""Statistics by name: numbers, or dictionaries and lists of numbers, as the files of a run contain them."""

TypeHint: TypeAlias = Any
"""A type or a special form of `typing`; the two have no common static type."""

BatchOfKind: TypeAlias = Any
"""A batch of the class that belongs to the `DataKind` of an algorithm and its storage."""

Payload: TypeAlias = Any
"""Data of a message: arrays, their encoded form, or a reference to data in the object store of the runtime."""

Untyped: TypeAlias = Any
"""An object of a library that ships no types."""
