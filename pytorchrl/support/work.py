"""Declare which kind of work the functions of a module do, so that `pytorchrl profile` can sum up times by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

WorkKind = Literal["environment", "network", "optimizer", "storage", "ours"]
KINDS: tuple[WorkKind, ...] = get_args(WorkKind)
"""The kinds of work; see `pytorchrl.profile.work_shares.kind_of`."""


@dataclass(frozen=True)
class Work:
    """The work of the functions in a module, or in all modules of a package.

    A module or package declares it as its constant `WORK`. For a function, the constant of its module counts or, if the
    module has none, the constant of the nearest package that contains the module.

    Attributes:
        kind: Kind of work that the functions do; None: the kind of work of their callers.
        calls: Kind of work that functions of other libraries do when a function with work of kind "ours" calls them;
            None: the kind of work of their caller.
        methods: Kinds of work of single functions, by name; other functions do work of kind `kind`.
    """

    kind: WorkKind | None = None
    calls: WorkKind | None = None
    methods: Mapping[str, WorkKind] = field(default_factory=dict)
