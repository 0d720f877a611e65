"""The storage of replay shards, and the keywords of `Scheme` that set options of the storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.fit import StorageDeclarations, given_kind, known_storages, names
from pytorchrl.agent.options import Factory
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, Storage
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.replay.rollouts import RolloutReplay

_DRAWN = {DataKind.TRANSITIONS: "transition", DataKind.SEQUENCES: "sequence", DataKind.OLDER_ROLLOUTS: "batch"}
KINDS = tuple(_DRAWN.values())
"""Kinds of data that shards draw: single transitions, sequences of steps, or whole rollouts."""
STORAGE_OPTIONS = ("size", "alpha", "beta", "epsilon", "stratified")
"""Options of a replay storage that keep their names as keywords of `Scheme`."""


def kind_of(factory: Factory[Storage]) -> str | None:
    """Return the kind of data that shards draw for this storage: one of `KINDS`, or None if its data must be fresh."""
    return _drawn(given_kind(factory), factory.cls)


def _drawn(given: DataKind, storage: type[StorageDeclarations]) -> str | None:
    return "batch" if storage.draws_rollouts else _DRAWN.get(given)


def check_replay(storage: Factory[Storage], size: int | None) -> None:
    """Refuse replay shards for a storage whose data must be fresh, and replay of whole rollouts without a size.

    Args:
        storage: Factory of the agent's storage.
        size: Env steps that all shards keep together, for a storage without such an option of its own.

    Raises:
        ConfigError: The storage does not fit, or the size is missing.
    """
    if kind_of(storage) is None:
        fitting = [cls for cls in known_storages() if cls.gives in _DRAWN]
        raise ConfigError(
            f"replay cannot use the {given_kind(storage).value} that {storage.cls.__name__} gives: they must come from "
            f"the current policy; storages whose data may be older: {names(fitting)}")
    if not given_kind(storage).is_kept:
        if size is None:
            raise ConfigError("replay of whole rollouts needs size, the env steps that all shards keep together; the "
                              f"size of {storage.cls.__name__} is that of a rollout")
        RolloutReplay.create_factory(size)


def kept_by_shards(factory: Factory[Any], size: int | None) -> Factory[Any]:
    """Return the factory of a shard's storage: the agent's own, or replay of whole rollouts if that keeps no data."""
    return factory if given_kind(factory).is_kept or size is None else RolloutReplay.create_factory(size)


def rollout_steps(factory: Factory[Storage], num_envs: int) -> int:
    """Return the env steps of a full rollout of `num_envs` environments."""
    return int(getattr(factory.options, "rollout_size", factory.options.size) * num_envs)


def has_priorities(factory: object, given: Mapping[str, object]) -> bool:
    """Return whether the storage draws by priority if `given` replaces its options."""
    prioritized = given.get("prioritized")
    return bool(getattr(getattr(factory, "cls", None), "has_priorities", False) if prioritized is None else prioritized)


def with_options(factory: Factory[Any], given: Mapping[str, object]) -> Factory[Any]:
    """Return the storage's factory with its options replaced by those in `given`.

    Args:
        factory: Factory of a replay storage.
        given: Option -> value; None keeps the storage's value, and options of no storage are ignored. `prioritized`
            turns a `ReplayBuffer` into a `PERBuffer` or back. A storage of rollouts keeps its own `size`, which is
            the size of a rollout and not of the replay.

    Raises:
        ConfigError: The storage has no such option, or its value is not allowed.
    """
    prioritized = given.get("prioritized")
    if has_priorities(factory, given) != has_priorities(factory, {}):
        kinds: dict[type[Any], type[Any]] = {ReplayBuffer: PERBuffer, PERBuffer: ReplayBuffer}
        if factory.cls not in kinds:
            raise ConfigError(f"prioritized={prioritized} is for ReplayBuffer and PERBuffer; {factory.cls.__name__} "
                              "cannot be made the other, so leave it out")
        kind = kinds[factory.cls]
        names = {field.name for field in dataclasses.fields(kind.Options)}
        factory = kind.create_factory(**{
            field.name: getattr(factory.options, field.name) for field in dataclasses.fields(factory.options)
            if field.name in names})
    own = [name for name in STORAGE_OPTIONS if name != "size" or given_kind(factory).is_kept]
    values = {name: given[name] for name in own if given.get(name) is not None}
    names = {field.name for field in dataclasses.fields(factory.options)}
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{', '.join(unknown)} would be ignored: {factory.cls.__name__} has no such option; give a "
                          "storage with priorities, such as PERBuffer")
    return dataclasses.replace(factory, options=dataclasses.replace(factory.options, **values)) if values else factory


def options_in_settings(given: Mapping[str, object], factory: Factory[Storage]) -> dict[str, object]:
    """Return the options of a storage that were given to a scheme, as its settings name them; None: not given."""
    options = {name: given.get(name) for name in ("prioritized", *STORAGE_OPTIONS) if name != "size"}
    if options["beta"] is not None:  # the storage has a schedule in place of a function or a list of points
        options["beta"] = getattr(factory.options, "beta", None)
    return {name: str(value) if isinstance(value, Schedule) else value for name, value in options.items()}
