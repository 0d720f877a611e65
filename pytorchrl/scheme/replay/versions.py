"""What versions of the weights the contents of a shard belong to."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FEWEST = 16


class Versions:
    """Versions of the rollouts in replay, by the rows that these fill; three numbers a rollout.

    Rows are numbered from 0 as they come, and those of a rollout follow each other.
    """

    def __init__(self) -> None:
        # Of each rollout: its first row, the version of the weights that made it, that of the learner when it was sent.
        self._blocks = np.zeros((3, _FEWEST), np.int64)
        self._begin = self._end = 0

    def add(self, first_row: int, collected: int, sent: int) -> None:
        """A rollout fills the rows from `first_row` on.

        Args:
            first_row: Above that of all others.
            collected: Version of the weights that made it.
            sent: The learner's version when it was sent here.
        """
        if self._end == self._blocks.shape[1]:
            kept = self._blocks[:, self._begin:self._end]
            self._blocks = np.concatenate([kept, np.zeros((3, max(_FEWEST, kept.shape[1])), np.int64)], axis=1)
            self._begin, self._end = 0, kept.shape[1]
        self._blocks[:, self._end] = first_row, collected, sent
        self._end += 1

    def forget(self, first_row: int) -> None:
        """No row before this one is asked for any more."""
        firsts = self._blocks[0, self._begin:self._end]
        self._begin += max(0, int(np.searchsorted(firsts, first_row, "right")) - 1)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """(N, 2) int64, `collected` and `sent` of the rollouts that fill these rows, (N,); there are such rollouts."""
        blocks = self._blocks[:, self._begin:self._end]
        places = np.searchsorted(blocks[0], rows, "right") - 1
        assert places.min(initial=0) >= 0, "rows of a rollout that was never added, or has been forgotten"
        found: np.ndarray = blocks[1:, places].T
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as a copy."""
        return {"blocks": torch.from_numpy(self._blocks[:, self._begin:self._end].copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`."""
        self._blocks = state["blocks"].numpy().copy()
        self._begin, self._end = 0, self._blocks.shape[1]
