"""Versions of the weights that collected the contents of a shard."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FEWEST = 16


class Versions:
    """Versions of the rollouts in replay, by row; three numbers per rollout.

    Rows are numbered from 0 in the order in which they are added; the rows of a rollout are consecutive.
    """

    def __init__(self) -> None:
        # For each rollout: first row, version of the weights that collected it, the learner's version when it was sent.
        self._blocks = np.zeros((3, _FEWEST), np.int64)
        self._begin = self._end = 0

    def add(self, first_row: int, collected: int, sent: int) -> None:
        """Add a rollout whose rows begin at `first_row`.

        Args:
            first_row: Its first row, above that of all rollouts before.
            collected: Version of the weights that collected it.
            sent: The learner's version when it was sent.
        """
        if self._end == self._blocks.shape[1]:
            kept = self._blocks[:, self._begin:self._end]
            self._blocks = np.concatenate([kept, np.zeros((3, max(_FEWEST, kept.shape[1])), np.int64)], axis=1)
            self._begin, self._end = 0, kept.shape[1]
        self._blocks[:, self._end] = first_row, collected, sent
        self._end += 1

    def forget(self, first_row: int) -> None:
        """Forget rollouts that end before a row."""
        firsts = self._blocks[0, self._begin:self._end]
        self._begin += max(0, int(np.searchsorted(firsts, first_row, "right")) - 1)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return `collected` and `sent`, (N, 2) int64, of the rollouts at rows (N,), which must be known."""
        blocks = self._blocks[:, self._begin:self._end]
        places = np.searchsorted(blocks[0], rows, "right") - 1
        assert places.min(initial=0) >= 0, "rows of a rollout that was never added, or has been forgotten"
        found: np.ndarray = blocks[1:, places].T
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state."""
        return {"blocks": torch.from_numpy(self._blocks[:, self._begin:self._end].copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`."""
        self._blocks = state["blocks"].numpy().copy()
        self._begin, self._end = 0, self._blocks.shape[1]
