"""Build batches of sequences from the rows of a ring buffer.

B = number of sequences, W = number of burn-in steps, L = number of trained steps (steps that the loss covers),
n = number of rewards in an n-step return, H = size of a memory state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import PREVIOUS, SequenceBatch
from pytorchrl.agent.storages.ring import Ring


class Walk(NamedTuple):
    """The rows of B sequences; the rows of each sequence are in order of time."""

    places: np.ndarray
    """(W+L+n, B) int64, where the ring stores each observation; padding repeats a sequence's first or last place."""
    is_step: np.ndarray
    """(W+L+n, B) bool, whether a transition begins at each row."""
    burn_in: int
    """W, steps of burn-in."""
    n_step: int
    """n, steps of an n-step return."""

    @property
    def trained(self) -> slice:
        """Slice of the first axis of `places` that selects the trained steps (the steps that the loss covers)."""
        return slice(self.burn_in, len(self.places) - self.n_step)


def take_sequences(ring: Ring, walk: Walk, states: dict[str, np.ndarray], weight: np.ndarray, ids: np.ndarray,
                   gamma: float, as_tensor: Callable[[np.ndarray], Tensor]) -> SequenceBatch:
    """Return a batch of the sequences in `walk`, and mark their trained steps as used.

    Args:
        ring: The ring that contains the rows.
        walk: The rows of each sequence.
        states: The memory state of each network before row 0 of each sequence, (B, H) float32. If previous actions and
            rewards are also inputs of the networks, the key `PREVIOUS` contains these inputs for row 0.
        weight: (B,) importance weights.
        ids: (B,) int64 ids of the sequences.
        gamma: Discount of one step.
        as_tensor: Function that converts an array to a tensor on the device of the batch.
    """
    rows, trained = np.maximum(walk.places, 0), walk.trained
    ret, discount, num_steps = _targets(ring, walk, rows, gamma)
    valid = walk.is_step[trained]
    ring.columns["used"][rows[trained][valid]] = True
    places, shape = walk.places.reshape(-1), walk.places.shape
    mask = ring.take_mask(places)
    nets = {name: state for name, state in states.items() if name != PREVIOUS}
    previous = None if PREVIOUS not in states else _previous(ring, walk, rows, states[PREVIOUS])

    def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: as_tensor(array) for name, array in arrays.items()}

    return SequenceBatch(
        obs=tensors({name: leaf.reshape(*shape, *leaf.shape[1:]) for name, leaf in ring.take(places).items()}),
        done=as_tensor(ring.columns["done"][rows] & walk.is_step),
        rhs=tensors(nets),
        action=as_tensor(ring.columns["action"][rows[trained]]),
        ret=as_tensor(ret.astype(np.float32)),
        discount=as_tensor(discount.astype(np.float32)),
        next_row=as_tensor(np.arange(trained.start, trained.stop)[:, None] + np.maximum(num_steps, 1)),
        valid=as_tensor(valid),
        weight=as_tensor(weight.astype(np.float32)),
        ids=torch.from_numpy(ids),
        burn_in=walk.burn_in,
        mask=None if mask is None else as_tensor(mask.reshape(*shape, -1)),
        previous=None if previous is None else as_tensor(previous),
        num_samples=int(np.count_nonzero(valid)),
    )


def _targets(ring: Ring, walk: Walk, rows: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the n-step return, the discount and the number of rewards of each step that the loss covers.

    `rows` equals `walk.places`, except that each negative place is replaced by 0. An observation at which no
    transition begins, such as the last observation of an episode, has a negative place.

    Returns:
        Three arrays (L, B), for L steps of B sequences; see `Ring.window` for the formulas.
    """
    rows, is_step, length = rows[walk.burn_in:], walk.is_step[walk.burn_in:], len(rows) - walk.burn_in - walk.n_step
    column = ring.columns
    reward = np.where(is_step, column["reward"][rows].astype(np.float64), 0.0)
    is_last = column["terminated"][rows] | column["truncated"][rows]
    ret, running = reward[:length].copy(), is_step[:length].copy()
    num_steps = running.astype(np.int64)
    for k in range(1, walk.n_step):
        running &= ~is_last[k - 1:k - 1 + length] & is_step[k:k + length]
        ret += np.where(running, gamma**k * reward[k:k + length], 0.0)
        num_steps += running
    last = np.arange(length)[:, None] + np.maximum(num_steps, 1) - 1
    ends = np.take_along_axis(column["terminated"][rows], last, 0)
    return ret, np.where(ends, 0.0, gamma**num_steps), num_steps


def _previous(ring: Ring, walk: Walk, rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return the previous action (one-hot) and reward of each row of `walk`, with the shape (rows, B, actions + 1).

    `stored` contains the previous action and reward of the first row of each of the B sequences.
    """
    column, there = ring.columns, walk.is_step[:-1]
    found = np.zeros((*rows.shape, stored.shape[-1]), np.float32)
    found[0] = stored
    np.put_along_axis(found[1:], column["action"][rows[:-1]][..., None], there[..., None].astype(np.float32), -1)
    found[1:, :, -1] = np.where(there, column["reward"][rows[:-1]], 0.0)
    return found
