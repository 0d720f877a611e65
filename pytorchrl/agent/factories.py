"""The five factories of an agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pytorchrl.agent.algorithms.precision import precisions_of, with_precisions
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.options import Factory
from pytorchrl.support.untyped import UserPart


@dataclass(frozen=True)
class Agent:
    """The factories of an agent's algorithm, actor and storage, and of its training and test environments."""

    algo_factory: Factory[UserPart]
    actor_factory: Factory[UserPart]
    storage_factory: Factory[UserPart]
    train_envs_factory: EnvFactory
    test_envs_factory: EnvFactory | None = None

    def as_dict(self) -> dict[str, Factory[object] | None]:
        """Return the factories by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def play_envs(self) -> EnvFactory:
        """The factory of the environments in which the trained agent plays: the test environments, if there are any."""
        return self.train_envs_factory if self.test_envs_factory is None else self.test_envs_factory

    @property
    def precisions(self) -> dict[str, bool]:
        """Map the name of each policy to whether the networks of that policy compute in bfloat16.

        A policy is left out if its algorithm has no option `mixed_precision`, or if the option is "auto".
        """
        return precisions_of(self.algo_factory)

    def with_precisions(self, precisions: Mapping[str, bool]) -> Agent:
        """Return a copy in which each policy with `mixed_precision="auto"` gets its value from `precisions`."""
        return dataclasses.replace(self, algo_factory=with_precisions(self.algo_factory, precisions))
