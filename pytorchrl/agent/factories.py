"""The five factories of an agent, and the interfaces through which workers call them.

`Factory` satisfies each interface for the parts of its class, and so does any object with the same members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.option_values.text import items_of_call
from pytorchrl.agent.options import PartFactory
from pytorchrl.agent.storages.base import Storage
from pytorchrl.support.display import Displayed, Row


class AlgorithmFactory(PartFactory[Algorithm], Protocol):
    """A factory of algorithms."""

    def __call__(self, *, device: str, actor: Actor, seed: int) -> Algorithm:
        """Build the algorithm that acts with an actor and trains it; see `Algorithm` for the arguments."""


class ActorFactory(PartFactory[Actor], Protocol):
    """A factory of actors."""

    def __call__(self, *, device: str, seed: int) -> Actor:
        """Build an actor on a device; the seed determines its initial weights."""


class StorageFactory(PartFactory[Storage], Protocol):
    """A factory of storages."""

    def __call__(self, *, device: str, actor: Actor, algorithm: Algorithm, num_envs: int, seed: int) -> Storage:
        """Build the storage of one worker; see `Storage` for the arguments."""


# Options that are not chosen by the user but read from the environments.
_READ = ("observation_space", "action_space", "agents")


def _items_of_part(factory: PartFactory[object]) -> list[str]:
    """Return the class of a part with its options that differ from their defaults; with several policies, of each."""
    policies: Mapping[str, PartFactory[object]] = getattr(factory.options, "policies", {})
    if not policies:
        changed = {name: getattr(factory.options, name) for name in factory.options.changed() if name not in _READ}
        return items_of_call(factory.cls.__name__, changed)
    users: dict[tuple[str, ...], list[str]] = {}
    for policy, own in policies.items():
        users.setdefault(tuple(_items_of_part(own)), []).append(policy)
    return [item for items, names in users.items() for item in (*items[:-1], f"{items[-1]} for {' and '.join(names)}")]


@dataclass(frozen=True, repr=False)
class Agent(Displayed):
    """The factories of an agent's algorithm, actor and storage, and of its training and test environments."""

    algo_factory: AlgorithmFactory
    actor_factory: ActorFactory
    storage_factory: StorageFactory
    train_envs_factory: EnvFactory
    test_envs_factory: EnvFactory | None = None

    def as_dict(self) -> dict[str, PartFactory[object] | None]:
        """Return the factories by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _rows(self) -> list[Row]:
        """Return a row for each part, with its class and the options that differ from their defaults."""
        parts = {"algorithm": self.algo_factory, "actor": self.actor_factory, "storage": self.storage_factory,
                 "envs": self.train_envs_factory, "test envs": self.test_envs_factory}
        return [(name, [] if factory is None else _items_of_part(factory)) for name, factory in parts.items()]

    @property
    def play_envs(self) -> EnvFactory:
        """The factory of the environments in which the trained agent plays: the test environments, if there are any."""
        return self.train_envs_factory if self.test_envs_factory is None else self.test_envs_factory


if TYPE_CHECKING:
    def _type_checkers_refuse_wrong_arguments(
        algorithm: AlgorithmFactory, actor: ActorFactory, storage: StorageFactory,
    ) -> None:
        """Make wrong calls. If a type checker accepted one of them, it would report a comment below as unused."""
        built = actor(device="cpu", sead=0)  # type: ignore[call-arg]
        algorithm(device="cpu", actor=algorithm, seed=0)  # type: ignore[arg-type]
        storage(device="cpu", actor=built, seed=0)  # type: ignore[call-arg]
