"""Options of a replay storage that a scheme may be given too, and which then win."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pytorchrl.agent.options import Factory
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.errors import ConfigError

STORAGE_OPTIONS = ("size", "alpha", "beta", "epsilon", "stratified")
"""Those of the storage's own that are taken over as they are."""


def has_priorities(factory: Any, given: Mapping[str, Any]) -> bool:
    """Whether a storage with these options among `given` draws by priority."""
    prioritized = given.get("prioritized")
    return bool(getattr(getattr(factory, "cls", None), "has_priorities", False) if prioritized is None else prioritized)


def with_options(factory: Factory[Any], given: Mapping[str, Any]) -> Factory[Any]:
    """The storage's factory with the options among `given` in place of its own.

    Args:
        factory: Of a replay storage.
        given: Name -> value; None leaves the storage's. `prioritized` makes a `ReplayBuffer` a `PERBuffer`, or the other
            way round; others are ignored.

    Raises:
        ConfigError: The storage has no such option, or its value is not allowed.
    """
    prioritized = given.get("prioritized")
    if has_priorities(factory, given) != has_priorities(factory, {}):
        kinds = {ReplayBuffer: PERBuffer, PERBuffer: ReplayBuffer}
        if factory.cls not in kinds:
            raise ConfigError(f"prioritized={prioritized} is for ReplayBuffer and PERBuffer; {factory.cls.__name__} cannot be "
                              "made the other, so leave it out")
        kind = kinds[factory.cls]
        names = {field.name for field in dataclasses.fields(kind.Options)}
        factory = kind.create_factory(**{
            field.name: getattr(factory.options, field.name) for field in dataclasses.fields(factory.options)
            if field.name in names})
    values = {name: given[name] for name in STORAGE_OPTIONS if given.get(name) is not None}
    names = {field.name for field in dataclasses.fields(factory.options)}
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{', '.join(unknown)} would be ignored: {factory.cls.__name__} has no such option; give a storage "
                          "with priorities, such as PERBuffer")
    return dataclasses.replace(factory, options=dataclasses.replace(factory.options, **values)) if values else factory
