"""Versions of the rows in a replay shard, from which the policy lag of sampled data is computed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FEWEST = 16


class Versions:
    """The versions of the rows in a shard.

    Each row has two versions: the version of the weights with which it was collected, and the learner's version when
    it was sent to the shard. A row is one stored step of one environment. Rows are numbered from 0 in the order in
    which they are added, and the rows of a rollout are consecutive.
    """

    def __init__(self) -> None:
        # For each rollout: the index of its first row, the version of the weights with which it was collected, and the
        # learner's version when it was sent to the shard.
        self._blocks = np.zeros((3, _FEWEST), np.int64)
        self._begin = self._end = 0

    def add(self, first_row: int, collected: int, sent: int) -> None:
        """Add a rollout whose rows start at `first_row`.

        Args:
            first_row: Index of the rollout's first row, which must be greater than that of every earlier rollout.
            collected: Version of the weights with which the rollout was collected.
            sent: The learner's version when the rollout was sent to the shard.
        """
        if self._end == self._blocks.shape[1]:
            kept = self._blocks[:, self._begin:self._end]
            self._blocks = np.concatenate([kept, np.zeros((3, max(_FEWEST, kept.shape[1])), np.int64)], axis=1)
            self._begin, self._end = 0, kept.shape[1]
        self._blocks[:, self._end] = first_row, collected, sent
        self._end += 1

    def forget(self, first_row: int) -> None:
        """Discard the versions of rollouts whose last row precedes the row `first_row`."""
        firsts = self._blocks[0, self._begin:self._end]
        self._begin += max(0, int(np.searchsorted(firsts, first_row, "right")) - 1)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the versions `collected` and `sent` (see `add`) of each row in `rows` (N,), as (N, 2) int64."""
        blocks = self._blocks[:, self._begin:self._end]
        places = np.searchsorted(blocks[0], rows, "right") - 1
        assert places.min(initial=0) >= 0, "the rollout of a row was never added, or its versions were discarded"
        found: np.ndarray = blocks[1:, places].T
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of all stored versions."""
        return {"blocks": torch.from_numpy(self._blocks[:, self._begin:self._end].copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state that `state_dict()` returned."""
        self._blocks = state["blocks"].numpy().copy()
        self._begin, self._end = 0, self._blocks.shape[1]
