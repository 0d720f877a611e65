"""The storage of replay shards, and the keywords of `Scheme` that set options of the storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.factories import StorageFactory
from pytorchrl.agent.fit import StorageDeclarations, known_storages, names, provided_kind
from pytorchrl.agent.options import Factory
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, SequenceBuffer, UniformSequenceBuffer
from pytorchrl.agent.storages.goals import relabels
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.scheme.options.collection import Collection, ReplayCollection
from pytorchrl.scheme.replay.rollouts import RolloutReplay
from pytorchrl.support.problems import Problems, error_of

ShardStorageFactory: TypeAlias = StorageFactory | Factory[RolloutReplay]
"""A factory of the storage of a shard."""
_DRAWN = {DataKind.TRANSITIONS: "transition", DataKind.SEQUENCES: "sequence", DataKind.OLDER_ROLLOUTS: "batch"}
KINDS = tuple(_DRAWN.values())
"""Kinds of data that shards sample: single transitions, sequences of steps, or whole rollouts."""
STORAGE_OPTIONS = ("size", "alpha", "beta", "epsilon", "stratified")
"""Options of a replay storage that are also keywords of `Scheme`, under the same names."""


def kind_of(factory: StorageFactory) -> str | None:
    """Return the kind of data (one of `KINDS`) that replay shards sample; None if replay cannot use the storage."""
    return _drawn(provided_kind(factory), factory.cls)


def _drawn(given: DataKind, storage: type[StorageDeclarations]) -> str | None:
    return "batch" if storage.draws_rollouts else _DRAWN.get(given)


def needs_order(factory: StorageFactory) -> bool:
    """Return whether all rollouts of a collection worker must be in the same shard: for sequences and new goals."""
    return kind_of(factory) == "sequence" or relabels(factory)


def check_replay(storage: StorageFactory, size: int | None) -> None:
    """Check that replay shards can use a storage, and that `size` is given if whole rollouts are replayed.

    Args:
        storage: Factory of the agent's storage.
        size: Total capacity of all shards in env steps; required if the storage is not a replay buffer.

    Raises:
        ConfigError: Shards cannot use the storage, because its data must come from the current policy; or `size` is
            missing.
    """
    if kind_of(storage) is None:
        fitting = [cls for cls in known_storages() if cls.provides in _DRAWN]
        raise ConfigError(
            f"replay cannot use the {provided_kind(storage).value} of {storage.cls.__name__}, which must come from the "
            f"current policy; choose a storage whose data may be older: {names(fitting)}")
    if not provided_kind(storage).is_kept:
        if size is None:
            raise ConfigError("replay of whole rollouts needs size, the total number of env steps that the shards "
                              f"keep; the size of {storage.cls.__name__} is the length of one rollout")
        RolloutReplay.create_factory(size)


def kept_by_shards(factory: StorageFactory, size: int | None) -> ShardStorageFactory:
    """Return the factory that shards use: `factory` if it builds a replay buffer, else a factory of `RolloutReplay`."""
    return factory if provided_kind(factory).is_kept or size is None else RolloutReplay.create_factory(size)


def rollout_steps(factory: StorageFactory, num_envs: int) -> int:
    """Return the number of env steps in a full rollout of `num_envs` environments."""
    return int(getattr(factory.options, "rollout_size", factory.options.size) * num_envs)


def has_priorities(factory: object, given: Mapping[str, object]) -> bool:
    """Return `given["prioritized"]`; if it is missing or None, return whether the storage's class has priorities."""
    prioritized = given.get("prioritized")
    return bool(getattr(getattr(factory, "cls", None), "has_priorities", False) if prioritized is None else prioritized)


def with_options(factory: StorageFactory, given: Mapping[str, object]) -> StorageFactory:
    """Return a copy of a storage's factory in which the options in `given` have the given values.

    Args:
        factory: Factory of the agent's storage.
        given: Mapping from option names to values. Values of None, and names that are not storage options, have no
            effect. `prioritized` replaces a `ReplayBuffer` with a `PERBuffer`, a `UniformSequenceBuffer` with a
            `SequenceBuffer`, or vice versa. `size`, the capacity of the shards, has an effect only on replay buffers:
            in other storages, `size` is the length of a rollout.

    Raises:
        ConfigError: The storage lacks one of the options, or a value is not allowed.
    """
    prioritized = given.get("prioritized")
    if has_priorities(factory, given) != has_priorities(factory, {}):
        kinds: dict[type[ReplayBuffer], type[ReplayBuffer]] = {
            ReplayBuffer: PERBuffer, PERBuffer: ReplayBuffer, UniformSequenceBuffer: SequenceBuffer,
            SequenceBuffer: UniformSequenceBuffer}
        if factory.cls not in kinds:
            raise error_of([Problem(
                f"prioritized={prioritized} is for ReplayBuffer, PERBuffer and their counterparts of sequences, but "
                f"the storage is a {factory.cls.__name__}", "leave prioritized out", ("prioritized",))])
        kind = kinds[factory.cls]
        names = {field.name for field in dataclasses.fields(kind.Options)}
        factory = kind.create_factory(**{
            field.name: getattr(factory.options, field.name) for field in dataclasses.fields(factory.options)
            if field.name in names})
    own = [name for name in STORAGE_OPTIONS if name != "size" or provided_kind(factory).is_kept]
    values = {name: given[name] for name in own if given.get(name) is not None}
    names = {field.name for field in dataclasses.fields(factory.options)}
    if unknown := [name for name in values if name not in names]:
        raise error_of([Problem(
            f"{', '.join(unknown)} would be ignored: {factory.cls.__name__} has no such option",
            "give a storage with priorities, such as PERBuffer", tuple(unknown))])
    return factory.with_options(**values) if values else factory


def with_settings(factory: StorageFactory, given: Mapping[str, object], collection: Collection,
                  problems: Problems) -> StorageFactory:
    """Return a storage's factory with the options that were given to the scheme.

    Args:
        factory: Factory of the agent's storage, or another object, which is returned unchanged.
        given: Storage options that were given to the scheme, by name.
        collection: Options of collection; without replay shards, options of the storage are problems.
        problems: Problems, to which those of the storage options are added.
    """
    problems.add(Problem(f"{name} must be True, False or None, got {given[name]!r}", options=(name,))
                 for name in ("prioritized", "stratified") if not isinstance(given.get(name), bool | None))
    if not isinstance(collection, ReplayCollection):
        problems.add(Problem(f"{name}={value}: only with num_replay_workers", f"change that, or leave {name} out",
                             (name, "num_replay_workers")) for name, value in given.items() if value is not None)
        return factory
    if not hasattr(factory, "options"):  # not a factory, which `check` reports
        return factory
    values = {**given, "size": collection.size}
    return problems.build(lambda **values: with_options(factory, values), values) or factory


def options_in_settings(given: Mapping[str, object], factory: StorageFactory) -> dict[str, object]:
    """Return the storage options of a scheme by name; the value of an option that was not given is None."""
    options = {name: given.get(name) for name in ("prioritized", *STORAGE_OPTIONS) if name != "size"}
    if options["beta"] is not None:  # `beta` may describe a schedule; the factory contains it as a `Schedule`
        options["beta"] = getattr(factory.options, "beta", None)
    return {name: str(value) if isinstance(value, Schedule) else value for name, value in options.items()}
