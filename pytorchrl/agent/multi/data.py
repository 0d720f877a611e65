"""Data that the parts of an agent with several policies exchange: mappings from each policy to its data.

A policy controls k agents (in the sense of PettingZoo) in each of E environments. The arrays of the policy have one
column for each of these C = E * k agents: agent j of environment e is column e * k + j. If an agent does not act in a
step, because its episode has ended or has not begun, the entry of its column in that step is marked as invalid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import ActingStep, Arrays, Batch, Episode, ReplayBatch, RolloutData, Step
from pytorchrl.support.untyped import Payload

V = TypeVar("V")

SEPARATOR = "/"
"""Separator between a policy and a name (`hunter/lr`), and between a statistic and its policy (`loss/hunter`)."""


def own_names(values: Mapping[str, V], policy: str) -> dict[str, V]:
    """Return the entries of one policy: the key `policy/name` in `values` becomes `name`."""
    start = policy + SEPARATOR
    return {name[len(start):]: value for name, value in values.items() if name.startswith(start)}


def joined(values: Mapping[str, Mapping[str, V]]) -> dict[str, V]:
    """Return one mapping of all policies' values, with keys `policy/name`; see `own_names` for the inverse."""
    return {f"{policy}{SEPARATOR}{name}": value for policy, own in values.items() for name, value in own.items()}


@dataclass(frozen=True, slots=True)
class MultiStep:
    """Result of one step of E environments."""

    parts: dict[str, Step]
    """Policy -> step of the policy's columns; the field `episodes` of each of these steps is empty."""
    episodes: list[Episode]
    """Episodes that ended in this step."""

    @property
    def obs(self) -> dict[str, Arrays]:
        """Observations: policy -> leaf -> (C, ...), with one row for each of the policy's C agents."""
        return {policy: part.obs for policy, part in self.parts.items()}

    @property
    def mask(self) -> dict[str, np.ndarray | None]:
        """Action masks: policy -> (C, n) bool, for the C agents and n actions of the policy; None without masks."""
        return {policy: part.mask for policy, part in self.parts.items()}

    @property
    def first(self) -> dict[str, np.ndarray]:
        """Whether each observation is the first of an episode: policy -> (C,) bool, for the policy's C agents."""
        return {policy: part.first for policy, part in self.parts.items()}


@dataclass(frozen=True, slots=True)
class MultiActingStep:
    """Decisions of all policies for one step."""

    parts: dict[str, ActingStep]

    @property
    def clipped_action(self) -> Arrays:
        """The actions for the environments: policy -> (C, ...), for the C agents of the policy in all environments."""
        return {policy: part.clipped_action for policy, part in self.parts.items()}

    @property
    def rhs(self) -> dict[str, Arrays]:
        """The states of recurrent networks: policy -> network -> (C, H), with H numbers for each of C agents."""
        return {policy: part.rhs for policy, part in self.parts.items()}


@dataclass(frozen=True, slots=True)
class MultiRollout:
    """Rollouts of all policies from the same T steps of E environments; in total, T · E env steps."""

    parts: dict[str, RolloutData]
    num_envs: int
    """E, the number of environments."""
    host: ClassVar[None] = None
    """Always None, because the rollouts are on the CPU; see `RolloutData`."""

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return next(iter(self.parts.values())).num_steps

    @property
    def size(self) -> int:
        """T · E, the number of env steps."""
        return self.num_steps * self.num_envs

    def num_valid(self) -> int:
        """Return T · E, because all env steps are valid.

        The step that ends an episode also resets the environment, so resets need no additional, invalid steps.
        """
        return self.size

    def map(self, function: Callable[[Payload], object]) -> MultiRollout:
        """Return a copy with `function` applied to every tensor, array or compressed array."""
        return dataclasses.replace(self, parts={policy: part.map(function) for policy, part in self.parts.items()})

    def to_numpy(self) -> MultiRollout:
        """Return a copy that contains NumPy arrays, which share memory with the tensors; see `RolloutData`."""
        return self.map(Tensor.numpy)


@dataclass(frozen=True, slots=True)
class MultiBatch:
    """Samples for one update: a batch for each policy that has samples."""

    parts: dict[str, Batch | ReplayBatch]
    """Policy -> batch of the policy; a policy without a batch gets no gradient."""
    policies: tuple[str, ...]
    """All policies; `ids` depend on their order."""
    num_samples: int = 0
    """Number of env steps attributed to the batch. The env steps of the rollouts are divided among the batches of a
    pass in proportion to the agents' steps in each batch. With replay, this is the largest number of transitions of any
    policy."""
    num_new_samples: int = 0
    """Number of env steps that no earlier batch used."""
    last: bool = False
    """Whether this is the last batch from its rollouts."""
    ids: Tensor | None = None
    """With replay, the concatenated ids of all policies' transitions, int64; see `MultiAgentReplay`."""

    @property
    def samples(self) -> dict[str, int]:
        """The number of valid samples of each policy, in the order of `policies`; 0 for a policy without samples."""
        return {policy: self.parts[policy].num_samples if policy in self.parts else 0 for policy in self.policies}
