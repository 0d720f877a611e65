"""The samples of an on-policy storage, arranged so that a batch is selected by a single operation on each tensor.

T = steps, E = environments, N = samples, L = steps of a sequence, C = number of sequences, H = size of a memory state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import Batch, Obs, RolloutData, map_tensors
from pytorchrl.agent.transfers import on_device

ArrayOrTensor = np.ndarray | Tensor

_SMALL_BYTES = 2**20
"""Largest size in bytes at which all samples of an epoch are reordered in one operation, and batches are views.

For larger sizes, selecting the samples of each batch is as fast, and needs memory for only one batch.
"""


@dataclass(slots=True)
class Samples:
    """All samples of a storage: N steps (N, ...), or C sequences of L steps (L, C, ...) with initial memory (C, H)."""

    obs: Obs
    done: Tensor
    rhs: Obs
    mask: Tensor | None
    action: Tensor
    valid: Tensor
    logp: Tensor
    value: Tensor
    ret: Tensor
    advantage: Tensor
    other: Obs
    index: Tensor
    """(M,) int64, indices of the rows or sequences that can be drawn."""
    num_valid: int
    """Number of valid samples."""
    sequences: bool
    """Whether the layout is (L, C, ...)."""

    def to(self, device: torch.device) -> Samples:
        """Return the samples on a GPU, to which they are copied while the program goes on."""
        def moved(tensor: Tensor) -> Tensor:
            # torch keeps the page-locked memory until it has been copied. A loader may have copied some tensors before.
            return on_device(tensor.pin_memory(), device) if tensor.is_cpu else tensor
        return map_tensors(self, moved)

    def batches(self, order: Tensor, num_parts: int, *, is_first: bool, is_last: bool) -> Iterator[Batch]:
        """Divide the rows or sequences with the indices `order` into `num_parts` batches, and yield the batches.

        The sizes of the batches differ by at most one.

        Args:
            order: Indices of the rows or sequences.
            num_parts: Number of batches.
            is_first: Whether no earlier batch contained these samples, so that all of them count as new.
            is_last: Whether no later batch will contain these samples, so that the last batch is marked as last.
        """
        if self.sequences or self._num_bytes() > _SMALL_BYTES:
            for left, index in zip(reversed(range(num_parts)), torch.tensor_split(order, num_parts), strict=True):
                yield self._select(index, is_first, is_last and not left)
        else:
            yield from self._select(order, is_first, is_last).split(num_parts)

    def _num_bytes(self) -> int:
        tensors = (*self.obs.values(), *self.other.values(), *([] if self.mask is None else [self.mask]), self.action)
        return sum(tensor.nbytes for tensor in tensors)

    def _select(self, index: Tensor, is_first: bool, is_last: bool) -> Batch:
        """Return a batch of the rows or sequences at `index`; see `batches`."""
        axis = 1 if self.sequences else 0
        valid = self.valid.index_select(1, index) if self.sequences else None
        num_samples = len(index) if valid is None else int(valid.sum())

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(axis, index)

        return Batch(
            obs={name: pick(leaf) for name, leaf in self.obs.items()},
            done=pick(self.done),
            rhs={name: state.index_select(0, index) for name, state in self.rhs.items()},
            mask=None if self.mask is None else pick(self.mask),
            action=pick(self.action),
            valid=valid,
            logp=pick(self.logp),
            value=pick(self.value),
            ret=pick(self.ret),
            advantage=pick(self.advantage),
            other={name: pick(leaf) for name, leaf in self.other.items()},
            num_samples=num_samples,
            num_new_samples=num_samples if is_first else 0,
            last=is_last,
        )


def single_steps(
    rollouts: list[RolloutData], advantages: list[ArrayOrTensor], returns: list[ArrayOrTensor],
    others: Sequence[str] = (),
) -> Samples:
    """Return samples that are single steps, for actors without memory; invalid rows are never drawn.

    `others` has the names of the entries of `RolloutData.other` that become `Batch.other`.
    """
    def rows(parts: list[Tensor]) -> Tensor:
        """Concatenate the first `num_steps` steps of each rollout's tensor (steps, E, ...) into one tensor (N, ...)."""
        cut = [part[:rollout.num_steps].flatten(0, 1) for part, rollout in zip(parts, rollouts, strict=True)]
        return cut[0] if len(cut) == 1 else torch.cat(cut)

    valid = rows([rollout.valid for rollout in rollouts])
    on_host = [rollout.valid.numpy() if rollout.host is None else rollout.host.valid for rollout in rollouts]
    index = torch.from_numpy(np.concatenate([part.reshape(-1) for part in on_host]).nonzero()[0]).to(valid.device)
    return Samples(
        rhs={}, valid=valid, index=index, num_valid=len(index), sequences=False,
        **_leaves(rows, rollouts, advantages, returns, others))


def sequences(
    rollouts: list[RolloutData], advantages: list[ArrayOrTensor], returns: list[ArrayOrTensor], length: int | None,
    others: Sequence[str] = (),
) -> Samples:
    """Return samples that are sequences of `length` steps (None: whole rollouts), for actors with memory.

    Shorter sequences are padded with invalid rows. These rows are marked as starts of episodes, so that the memory is
    reset there, unless the rollouts have no memory because they consist of whole episodes. In invalid rows, action
    masks allow all actions, so that log-probabilities are finite. Sequences without a valid row are never drawn.
    `others` is explained in `single_steps`.
    """
    longest = max(rollout.num_steps for rollout in rollouts)
    length = min(length or longest, longest)

    def columns(parts: list[Tensor], fill: float | bool = 0) -> Tensor:
        """Cut the rollouts' tensors (steps, E, ...) into C sequences, and return these as one tensor (length, C, ...).

        Steps after a rollout's `num_steps` are left out. The last sequence of each environment is padded with `fill`.
        """
        cut = [
            _chunks(part[:rollout.num_steps], length, fill) for part, rollout in zip(parts, rollouts, strict=True)]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)

    valid = columns([rollout.valid for rollout in rollouts])
    leaves = _leaves(columns, rollouts, advantages, returns, others)
    leaves["done"] = columns([rollout.done for rollout in rollouts], fill=bool(rollouts[0].rhs))
    leaves["logp"] = torch.where(valid, leaves["logp"], 0.0)
    if leaves["mask"] is not None:
        leaves["mask"] = leaves["mask"] | ~valid.unsqueeze(-1)
    states = {
        name: torch.cat([rollout.rhs[name][:rollout.num_steps:length].flatten(0, 1) for rollout in rollouts])
        for name in rollouts[0].rhs
    }
    return Samples(
        rhs=states, valid=valid, index=valid.any(0).nonzero().flatten(), num_valid=int(valid.sum()), sequences=True,
        **leaves)


class _Leaves(TypedDict):
    """The fields of `Samples` that contain one row for each step."""

    obs: Obs
    done: Tensor
    mask: Tensor | None
    action: Tensor
    logp: Tensor
    value: Tensor
    ret: Tensor
    advantage: Tensor
    other: Obs


def _leaves(
    join: Callable[[list[Tensor]], Tensor], rollouts: list[RolloutData], advantages: list[ArrayOrTensor],
    returns: list[ArrayOrTensor], others: Sequence[str],
) -> _Leaves:
    return {
        "obs": {name: join([rollout.obs[name] for rollout in rollouts]) for name in rollouts[0].obs},
        "done": join([rollout.done for rollout in rollouts]),
        "mask": join(masks) if (masks := [part.mask for part in rollouts if part.mask is not None]) else None,
        "action": join([rollout.action for rollout in rollouts]),
        "logp": join([rollout.other["logp"] for rollout in rollouts]),
        "value": join([rollout.other["value"] for rollout in rollouts]),
        "ret": join([torch.as_tensor(part) for part in returns]),
        "advantage": join([torch.as_tensor(part) for part in advantages]),
        "other": {name: join([rollout.other[name] for rollout in rollouts]) for name in others},
    }


def _chunks(part: Tensor, length: int, fill: float | bool) -> Tensor:
    """Cut a tensor (T, E, ...) into chunks, and return them as a tensor (length, ceil(T / length) * E, ...).

    The last chunk is padded with `fill`.
    """
    num_steps = part.shape[0]
    missing = -num_steps % length
    if missing:
        part = torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)])
    if part.shape[0] == length:
        return part
    return part.view(-1, length, *part.shape[1:]).transpose(0, 1).flatten(1, 2)
