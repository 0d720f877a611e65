"""Names for values whose types are only known at run time.

Each name is an alias of `Any` that states why the type is unknown. No other module of the package uses `Any`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

# Options and parts of an agent

OptionValue: TypeAlias = Any
"""The value of an option, before it is checked against the type that its declaration states."""

OptionsOfSubclass: TypeAlias = Any
"""An instance of the class `Options` of a part of the agent; each class of parts declares its own."""

UserPart: TypeAlias = Any
"""A part of an agent; its class need not derive from a class of the library. `agent.contracts` checks its members."""

TypeHint: TypeAlias = Any
"""A type or a special form of `typing`; the two have no common static type."""

ANY: Final[object] = Any
"""The special form `Any` as a value, for code that reads annotations."""

# Data

DataOfAgent: TypeAlias = Any
"""Data of one policy, or a collection of the data of all policies or agents, if there are several."""

BatchOfKind: TypeAlias = Any
"""A batch of the class that belongs to the `DataKind` of an algorithm and its storage."""

FieldValue: TypeAlias = Any
"""The value of a field of a data class; the type depends on the field, which is chosen at run time."""

EnvValue: TypeAlias = Any
"""An observation, an action or an entry of `info` of an environment, which determines the type at run time."""

Numeric: TypeAlias = Any
"""A number or a tensor, in formulas that are correct for both."""

# Files and messages

SavedValue: TypeAlias = Any
"""A part of a saved state: a tensor, an array, a plain value, or a container of them."""

StateDict: TypeAlias = dict[str, SavedValue]
"""Saved state, in the layout of the class that saved it."""

Json: TypeAlias = Any
"""A value that is read from a JSON file or written to one; the reader checks its type."""

MetricsDict: TypeAlias = dict[str, Any]
"""Statistics by name: numbers, or dictionaries and lists of numbers, as the files of a run contain them."""

Payload: TypeAlias = Any
"""Data of a message: tensors, arrays, their encoded form, or a reference to data in the runtime's object store."""

Answer: TypeAlias = Any
"""The result of a call to a worker; the type depends on the called method, which is chosen at run time."""

NativeHandle: TypeAlias = Any
"""The object by which a runtime identifies a worker or a call; each runtime has its own type of objects."""

# Python and libraries

Forwarded: TypeAlias = Any
"""A keyword argument that is passed on to a function, which declares its type."""

Untyped: TypeAlias = Any
"""An object of a library that states no type for it, or only a base class that lacks the members in use."""
