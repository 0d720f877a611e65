"""What passes between the parts of an agent of several policies: mappings from policy to what a single policy has.

An agent (of PettingZoo) is a column of its policy: of k agents in each of E environments a policy has C = E * k columns,
agent j of environment e in column e * k + j. Whatever an agent does not do, because it is dead or has not come yet, is a row
that is not valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import ActingStep, Arrays, Batch, Episode, ReplayBatch, RolloutData, Step

SEPARATOR = "/"
"""Between the policy and a name of its own, as in `hunter/lr`; and between a statistic and its policy, as in `loss/hunter`."""


def own_names(values: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """What is the policy's of a mapping whose names begin with policies, by its own names."""
    start = policy + SEPARATOR
    return {name[len(start):]: value for name, value in values.items() if name.startswith(start)}


def joined(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Policy -> name -> value as `policy/name` -> value; the inverse of `own_names`."""
    return {f"{policy}{SEPARATOR}{name}": value for policy, own in values.items() for name, value in own.items()}


@dataclass(slots=True)
class MultiStep:
    """What one step of E environments returns."""

    parts: dict[str, Step]
    """Policy -> what its columns see; without episodes."""
    episodes: list[Episode]
    """Episodes of environments that ended in this step."""

    @property
    def obs(self) -> dict[str, Arrays]:
        """Policy -> leaf -> (C, ...)."""
        return {policy: part.obs for policy, part in self.parts.items()}

    @property
    def mask(self) -> dict[str, np.ndarray | None]:
        """Policy -> (C, n), if its agents have masks."""
        return {policy: part.mask for policy, part in self.parts.items()}

    @property
    def first(self) -> dict[str, np.ndarray]:
        """Policy -> (C,) bool."""
        return {policy: part.first for policy, part in self.parts.items()}


@dataclass(slots=True)
class MultiActingStep:
    """What all policies decide at once."""

    parts: dict[str, ActingStep]

    @property
    def clipped_action(self) -> Arrays:
        """Policy -> (C, ...), for the environments."""
        return {policy: part.clipped_action for policy, part in self.parts.items()}

    @property
    def rhs(self) -> dict[str, Arrays]:
        """Policy -> net -> (C, H)."""
        return {policy: part.rhs for policy, part in self.parts.items()}


@dataclass(slots=True)
class MultiRollout:
    """The rollouts of all policies, made in the same T steps of the same E environments, of which each is an env step."""

    parts: dict[str, RolloutData]
    num_envs: int
    """E."""

    @property
    def num_steps(self) -> int:
        """T."""
        return next(iter(self.parts.values())).num_steps

    @property
    def size(self) -> int:
        """T · E."""
        return self.num_steps * self.num_envs

    def num_valid(self) -> int:
        """Number of env steps in it. An environment that ends begins anew at once, so every step is one."""
        return self.size

    def map(self, function: Callable[[Any], Any]) -> MultiRollout:
        """A copy with `function` applied to every tensor (or array)."""
        return dataclasses.replace(self, parts={policy: part.map(function) for policy, part in self.parts.items()})

    def to_numpy(self) -> MultiRollout:
        """See `RolloutData`."""
        return self.map(Tensor.numpy)


@dataclass(slots=True)
class MultiBatch:
    """Samples for one update: of every policy that has any."""

    parts: dict[str, Any]
    """Policy -> `Batch` or `ReplayBatch`; who is not in it gets no gradient."""
    policies: tuple[str, ...]
    """All policies, in their order."""
    num_samples: int = 0
    """Env steps: the batch's share of those behind the rollouts, which is its share of their agents' steps. Of replay, the
    transitions of one policy."""
    num_new_samples: int = 0
    """Those that no earlier batch used."""
    last: bool = False
    """Whether the rollouts behind it are used up after this batch."""
    ids: Tensor | None = None
    """Of replay: (sum of B,) int64, of all policies one after the other; see `MultiAgentReplay`."""

    @property
    def samples(self) -> dict[str, int]:
        """Policy -> number of valid samples, in the order of the policies; 0 for a policy without data in this batch."""
        return {policy: self.parts[policy].num_samples if policy in self.parts else 0 for policy in self.policies}


def samples_by_policy(batch: Batch | ReplayBatch | MultiBatch) -> dict[str, int]:
    """Policy -> valid samples of a batch, in the order of the policies; empty where there is one, whose are all."""
    if not isinstance(batch, MultiBatch):
        return {}
    return {policy: batch.parts[policy].num_samples if policy in batch.parts else 0 for policy in batch.policies}
