"""The storage of replay shards, and the options of a storage that `Scheme` passes on to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.fit import StorageDeclarations, given_kind, known_storages, names
from pytorchrl.agent.options import Factory
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, Storage
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.replay.rollouts import RolloutReplay

_DRAWN = {DataKind.TRANSITIONS: "transition", DataKind.SEQUENCES: "sequence", DataKind.OLDER_ROLLOUTS: "batch"}
KINDS = tuple(_DRAWN.values())
"""What is drawn from shards: single transitions, sequences of steps, or whole rollouts."""
STORAGE_OPTIONS = ("size", "alpha", "beta", "epsilon", "stratified")
"""Those of the storage's own that are taken over as they are."""


def kind_of(factory: Factory[Storage]) -> str | None:
    """Return what shards draw for an agent with this storage: one of `KINDS`, or None if its data must be fresh."""
    return _drawn(given_kind(factory), factory.cls)


def _drawn(given: DataKind, storage: type[StorageDeclarations]) -> str | None:
    return "batch" if storage.draws_rollouts else _DRAWN.get(given)


def check_replay(storage: Factory[Storage], size: int | None) -> None:
    """Refuse replay shards for a storage whose data must be fresh, and replay of whole rollouts without a size.

    Args:
        storage: Factory of the agent's storage.
        size: Env steps that all shards keep together, where the storage has no such option itself.

    Raises:
        ConfigError: The storage does not fit, or there is no size.
    """
    if kind_of(storage) is None:
        fitting = [cls for cls in known_storages() if cls.gives in _DRAWN]
        raise ConfigError(f"replay cannot use the {given_kind(storage).value} that {storage.cls.__name__} gives: they "
                          f"must come from "
                          f"the current policy; storages whose data may be older: {names(fitting)}")
    if not given_kind(storage).is_kept:
        if size is None:
            raise ConfigError("replay of whole rollouts needs size, the env steps that all shards keep together; the "
                              "size of "
                              f"{storage.cls.__name__} is that of a rollout")
        RolloutReplay.create_factory(size)


def kept_by_shards(factory: Factory[Any], size: int | None) -> Factory[Any]:
    """What shards are made of: the agent's own storage, or, where that keeps nothing, replay of whole rollouts."""
    return factory if given_kind(factory).is_kept or size is None else RolloutReplay.create_factory(size)


def batch_steps(factory: Factory[Storage], train_envs: EnvFactory, size: int) -> int:
    """Env steps of a batch, at most.

    Args:
        factory: The agent's storage.
        train_envs: Factory of a collector's environments.
        size: Transitions, sequences, or of rollouts that the learner makes its batches of the least size, see
            `RolloutData.size`.
    """
    kind, options, num_envs = kind_of(factory), factory.options, train_envs.num_envs
    if not given_kind(factory).is_kept:  # the last rollout may be in it for one step of its
        return int(size + rollout_steps(factory, num_envs) - 1)
    if kind == "batch":  # or for one sequence of its
        return int((size + num_envs - 1) * options.rollout_size)
    return int(size * options.length) if kind == "sequence" else size  # sequences are padded


def rollout_steps(factory: Factory[Storage], num_envs: int) -> int:
    """Env steps of a full rollout of so many environments."""
    return int(getattr(factory.options, "rollout_size", factory.options.size) * num_envs)


def has_priorities(factory: object, given: Mapping[str, object]) -> bool:
    """Whether a storage with these options among `given` draws by priority."""
    prioritized = given.get("prioritized")
    return bool(getattr(getattr(factory, "cls", None), "has_priorities", False) if prioritized is None else prioritized)


def with_options(factory: Factory[Any], given: Mapping[str, object]) -> Factory[Any]:
    """The storage's factory with the options among `given` in place of its own.

    Args:
        factory: Of a replay storage.
        given: Name -> value; None leaves the storage's. `prioritized` makes a `ReplayBuffer` a `PERBuffer`, or the
            other way round; others are ignored. The storage of rollouts keeps its own `size`, which is not that of the
            replay.

    Raises:
        ConfigError: The storage has no such option, or its value is not allowed.
    """
    prioritized = given.get("prioritized")
    if has_priorities(factory, given) != has_priorities(factory, {}):
        kinds: dict[type[Any], type[Any]] = {ReplayBuffer: PERBuffer, PERBuffer: ReplayBuffer}
        if factory.cls not in kinds:
            raise ConfigError(f"prioritized={prioritized} is for ReplayBuffer and PERBuffer; {factory.cls.__name__} "
                              f"cannot be "
                              "made the other, so leave it out")
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
                          f"storage "
                          "with priorities, such as PERBuffer")
    return dataclasses.replace(factory, options=dataclasses.replace(factory.options, **values)) if values else factory
