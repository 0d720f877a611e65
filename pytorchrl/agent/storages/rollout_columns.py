"""Views of rollouts as NumPy columns, for `Ring`. T = steps, E = environments."""

from __future__ import annotations

import operator
import weakref
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import RolloutData

MASK = "mask"
"""Name of the column of action masks; columns of observations are called `obs/<leaf>`."""


class RolloutColumns(NamedTuple):
    """Views of the tensors of one rollout, as NumPy arrays."""

    leaves: dict[str, np.ndarray]
    """Observations and action masks by column, (T+1, E, ...)."""
    columns: dict[str, np.ndarray]
    """The other columns, (E, T, ...)."""
    done: np.ndarray
    """(T+1, E) bool; whether an observation is the first of its episode."""


class RolloutReader:
    """Reads rollouts as NumPy columns.

    A collector in the same process passes the same tensors, with new contents, for each full rollout. If tensors are
    read for the second time in a row, their views are kept, because creating them takes longer than copying a short
    rollout. Views of other tensors are not kept, because these would keep the memory of received rollouts allocated.
    """

    def __init__(self, in_sequences: bool) -> None:
        """Prepare for rollouts; with `in_sequences`, `done` is also one of the columns, without its last row."""
        self._in_sequences = in_sequences
        self._previous: weakref.ref[Tensor] | None = None  # the rewards of the previous rollout
        self._kept: tuple[list[object], RolloutColumns] | None = None  # names and tensors of a rollout, and its views

    def read(self, rollout: RolloutData) -> tuple[RolloutColumns, bool]:
        """Return views of a rollout, and whether these are the views of an earlier rollout, with new contents."""
        sources: list[object] = [
            *rollout.obs, *rollout.obs.values(), rollout.action, rollout.reward, rollout.terminated, rollout.truncated,
            rollout.valid, rollout.done, rollout.mask]
        if self._kept is not None:
            kept, views = self._kept
            if len(sources) == len(kept) and all(map(operator.is_, sources, kept)):
                return views, True
        leaves = {f"obs/{name}": leaf.numpy() for name, leaf in rollout.obs.items()}
        if rollout.mask is not None:
            leaves[MASK] = rollout.mask.numpy()
        columns = {name: getattr(rollout, name).numpy().swapaxes(0, 1) for name in (
            "action", "reward", "terminated", "truncated", "valid")}
        done = rollout.done.numpy()
        if self._in_sequences:
            columns["done"] = done[:-1].T
        views = RolloutColumns(leaves, columns, done)
        is_repeated = self._previous is not None and self._previous() is rollout.reward
        self._kept = (sources, views) if is_repeated else None
        self._previous = weakref.ref(rollout.reward)
        return views, False
