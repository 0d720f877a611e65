"""Provide an agent's policy as a torch module, for use outside of training. B = number of observations in a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.data import Obs
from pytorchrl.agent.env.spaces import LeafReading, ObservationReader, RawSpaces, action_start, part_at
from pytorchrl.errors import ConfigError
from pytorchrl.support.untyped import EnvValue

RawObs = EnvValue
"""Observations of an environment: a tensor (B, ...), or nested dictionaries and tuples of tensors."""


class Policy(nn.Module):
    """A trained policy as a module that returns the best actions; its normalizers are frozen.

    The module takes observations as the environment returns them (after the wrappers of the run), in batches, and
    returns actions as the environment accepts them. It draws no random numbers.

    Args:
        actor: The actor; the policy takes ownership of it and removes the networks that only learning needs.
        spaces: Spaces of the environment.

    Attributes:
        actor: The actor.
        spaces: Spaces of the environment.
        has_memory: Whether the policy has memory; if so, `forward` takes the memory and returns the new memory.
    """

    start: Tensor | None
    """Offset of discrete actions, int64; None if actions count from 0."""

    def __init__(self, actor: Actor, spaces: RawSpaces) -> None:
        super().__init__()
        actor.keep_policy()
        for parameter in actor.parameters():  # own copies, not views of the algorithm's vectors (`FlatParameters`)
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.actor, self.spaces = actor.eval().requires_grad_(False), spaces
        reader = ObservationReader(spaces.observation, spaces.keep_float64)
        self._readings, self._mask_path = reader.readings, reader.mask_path
        start = action_start(spaces.action)
        self.register_buffer("start", None if start is None else torch.as_tensor(start), persistent=False)
        self._memory_names = tuple(actor.policy_states(1))
        self.has_memory = bool(self._memory_names)

    def initial_memory(self, batch: int = 1) -> Obs:
        """Return the memory at the start of an episode: name -> zeros (batch, size), or {} without memory."""
        return self.actor.policy_states(batch)

    def forward(
        self, obs: RawObs, memory: Mapping[str, Tensor] | None = None, mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Obs]:
        """Choose the best actions.

        Args:
            obs: A tensor (B, ...), or, for Dict and Tuple spaces, nested dictionaries and tuples of tensors.
            memory: The memory before these observations; None means `initial_memory()`. To start a new episode in one
                row, set this row of the memory to zero.
            mask: (B, n) bool, true where an action is allowed. It is necessary if the environment returns masks in
                `info`, and not needed if the observations contain the mask as the leaf `action_mask`.

        Returns:
            Actions (B, ...), float32 for a Box, otherwise int64. A policy with memory returns a pair of these actions
            and the memory after these observations.

        Raises:
            ConfigError: `memory` lacks an entry of `initial_memory()`, or the mask is missing.
        """
        if mask is None and self.spaces.has_mask_in_info:
            raise ConfigError("the policy needs the masks that belong to the observations, because the environment "
                              "returns masks in info, and a forbidden action could be chosen without them; pass mask=, "
                              "(B, n) bool")
        leaves = {leaf.name: _read(leaf, part_at(obs, leaf.path)) for leaf in self._readings}
        if mask is None and self._mask_path is not None:
            mask = part_at(obs, self._mask_path).bool()
        if memory is None:
            memory = self.initial_memory(next(iter(leaves.values())).shape[0])
        elif missing := sorted(set(self._memory_names) - set(memory)):
            raise ConfigError(f"memory must have the entries of initial_memory(), {list(self._memory_names)}; "
                              f"{', '.join(missing)} is missing")
        action, states = self.actor.best_actions(leaves, dict(memory), mask)
        if self.start is not None:
            action = action + self.start
        return (action, {name: states[name] for name in self._memory_names}) if self.has_memory else action


def _read(leaf: LeafReading, values: Tensor) -> Tensor:
    """Convert an observation leaf (B, ...) to the form that actors receive, as `ObservationReader` does for arrays."""
    if leaf.start is not None:
        values = values - torch.as_tensor(leaf.start, device=values.device)
    if leaf.is_narrowed:
        values = values.float()
    return values.movedim(-1, 1) if leaf.has_channels_last else values
