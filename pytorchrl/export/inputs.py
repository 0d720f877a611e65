"""The inputs of an exported policy and their names, and the description that is stored in the exported file.

B = number of observations in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor

from pytorchrl import __version__
from pytorchrl.agent.data import OBS_LEAF, Arrays
from pytorchrl.agent.env.aliases import AnySpace, Observation
from pytorchrl.agent.policy import Policy, RawObs

_EXAMPLES = 3
"""Batch size with which policies are traced; a graph that is traced with 1 or 2 may work only for this batch size."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a policy for B observations.

    Attributes:
        obs: An array (B, ...), or nested dictionaries and tuples of arrays, as the observation space prescribes.
        memory: Arrays (B, H) by name, where H is the size of the memory; empty for a policy without memory.
        mask: Action masks (B, n) bool, if the environment returns masks in `info`; otherwise None.
    """

    obs: Observation
    memory: Arrays
    mask: np.ndarray | None

    def named(self) -> Arrays:
        """Return the arrays by name, in the order in which exported graphs take them."""
        mask = {} if self.mask is None else {"mask": self.mask}
        return {**dict(_leaves(self.obs, ())), **{f"memory/{name}": state for name, state in self.memory.items()},
                **mask}

    def arguments(self) -> tuple[tuple[RawObs, ...], dict[str, Tensor]]:
        """Return the positional and the keyword arguments of `Policy.forward`; a missing memory or mask is left out."""
        memory = ({name: torch.as_tensor(state) for name, state in self.memory.items()},) if self.memory else ()
        mask = {} if self.mask is None else {"mask": torch.as_tensor(self.mask)}
        return (_map_leaves(torch.as_tensor, self.obs), *memory), mask

    def dynamic_shapes(self) -> dict[str, object]:
        """Return the argument `dynamic_shapes` of `torch.export.export` that allows batches of any size."""
        batch = {0: torch.export.Dim("batch", min=1)}
        memory = {"memory": dict.fromkeys(self.memory, batch)} if self.memory else {}
        mask = {} if self.mask is None else {"mask": batch}
        return {"obs": _map_leaves(lambda _: batch, self.obs), **memory, **mask}


def example_inputs(policy: Policy) -> Inputs:
    """Return the inputs with which a policy is traced."""
    obs = sample(policy.spaces.observation, _EXAMPLES, 0)
    size = mask_size(policy.spaces.action) if policy.spaces.has_mask_in_info else 0
    return Inputs(obs, {name: state.numpy() for name, state in policy.initial_memory(_EXAMPLES).items()},
                  np.ones((_EXAMPLES, size), np.bool_) if size else None)


def sample(space: AnySpace, count: int, seed: int) -> Observation:
    """Return `count` random observations of a space, as one batch."""
    batch = batch_space(space, count)
    batch.seed(seed)
    return _map_leaves(np.asarray, batch.sample())


def mask_size(space: AnySpace) -> int:
    """Return n, the number of entries of an action mask for a Discrete or MultiDiscrete space; 0 for other spaces."""
    return int(np.sum(getattr(space, "nvec", getattr(space, "n", 0))))


def output_names(policy: Policy) -> list[str]:
    """Return the names of the outputs of an exported policy, in the order of its outputs."""
    return ["action", *(f"next_memory/{name}" for name in policy.initial_memory(1))]


def describe(name: str, policy: Policy, inputs: Inputs) -> dict[str, object]:
    """Describe a policy, for the file to which it is exported. The description can be written as JSON."""
    args, mask = inputs.arguments()
    returned = policy(*args, **mask)
    action, memory = returned if policy.has_memory else (returned, {})
    outputs = dict(zip(output_names(policy), [action, *memory.values()], strict=True))
    return {
        "format": 1, "made_by": f"pytorchrl {__version__}", "policy": name,
        "observation_space": str(policy.spaces.observation), "action_space": str(policy.spaces.action),
        "inputs": [_described(key, array) for key, array in inputs.named().items()],
        "outputs": [_described(key, tensor.numpy()) for key, tensor in outputs.items()],
    }


def _described(name: str, array: np.ndarray) -> dict[str, object]:
    return {"name": name, "dtype": str(array.dtype), "shape": ["batch", *array.shape[1:]]}


def _leaves(obs: Observation, path: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(obs, (Mapping, tuple)):
        items = obs.items() if isinstance(obs, Mapping) else enumerate(obs)
        for key, value in items:
            yield from _leaves(value, (*path, str(key)))
    else:
        yield "/".join(path) or OBS_LEAF, obs


def _map_leaves(function: Callable[[np.ndarray], object], obs: Observation) -> Observation:
    if isinstance(obs, Mapping):
        return {key: _map_leaves(function, value) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_map_leaves(function, value) for value in obs)
    return function(obs)
