"""Unroll the memories of a policy and of critics over sequences of replay.

The method is that of Ni et al. 2022 ("Recurrent model-free RL can be a strong baseline for many POMDPs"), section 4:
the policy and each critic have a memory of their own. Memories see only observations, so each is unrolled once for a
batch. Everything after the memory is computed for each step by itself, as for transitions.

B = sequences, W = steps of the burn-in, L = steps after it, n = option `n_step` of the storage, H = size of a memory,
F = features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.trunk import Trunk, remembered
from pytorchrl.agent.data import Obs, SequenceBatch, UnrolledBatch


def unrolled(
    batch: SequenceBatch, obs: Obs, networks: Mapping[str, nn.Module], targets: Mapping[str, nn.Module],
) -> UnrolledBatch:
    """Return the L trained steps of sequences as transitions, whose observations are the outputs of memories.

    Each memory processes the burn-in without gradient, and then the other L + n observations. The memory of the policy
    begins with the state that was stored during acting. Critics do not act, so their memories begin with zeros, which
    the burn-in replaces. The networks and their targets begin alike.

    Args:
        batch: The sequences.
        obs: Their normalized observations, leaf -> (W + L + n, B, ...).
        networks: The networks by parameter group; the stored memory of a group has the group's name.
        targets: The target networks by parameter group.
    """
    length, row = len(batch.action), (batch.next_row - batch.burn_in).unsqueeze(-1)
    rest = slice(batch.burn_in, None)
    now, following = dict[Trunk, Tensor](), dict[Trunk, Tensor]()
    for group, trunk in (*_trunks(networks), *_trunks(targets)):
        features = _features(trunk, batch, obs, batch.rhs.get(group))
        now[trunk] = features[:length]
        following[trunk] = features.gather(0, row.expand(-1, -1, features.shape[-1]))
    mask = None if batch.mask is None else batch.mask[rest]
    return UnrolledBatch(
        obs=remembered(now), action=batch.action, ret=batch.ret, discount=batch.discount,
        next_obs=remembered(following), weight=batch.weight, ids=batch.ids, valid=batch.valid,
        mask=None if mask is None else mask[:length],
        next_mask=None if mask is None else mask.gather(0, row.expand(-1, -1, mask.shape[-1])),
        num_samples=batch.num_samples)


def _trunks(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Trunk]]:
    """Yield the parameter group of each trunk with memory, and the trunk."""
    for group, network in networks.items():
        for module in network.modules():
            if isinstance(module, Trunk) and module.memory is not None:
                yield group, module


def _features(trunk: Trunk, batch: SequenceBatch, obs: Obs, state: Tensor | None) -> Tensor:
    """Return the outputs (L + n, B, F) of a memory; `state` is its state (B, H) before row 0, or None for zeros."""
    assert trunk.memory is not None
    if state is None:
        state = batch.ret.new_zeros(batch.ret.shape[1], trunk.memory.state_size)
    burn_in, rest = slice(0, batch.burn_in), slice(batch.burn_in, None)
    if batch.burn_in:
        with torch.no_grad():
            _, state = trunk.forward({leaf: rows[burn_in] for leaf, rows in obs.items()}, state, batch.done[burn_in])
    features, _ = trunk.forward({leaf: rows[rest] for leaf, rows in obs.items()}, state, batch.done[rest])
    return features
