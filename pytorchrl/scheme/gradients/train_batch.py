"""Train batches: the rollouts that a learner uses together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pytorchrl.scheme.transport.messages import Rollout


class QueuedRollout(NamedTuple):
    """One rollout of a train batch."""

    rollout: Rollout
    version_queued: int
    """The learner's version when the rollout arrived."""
    is_old: bool = False
    """Whether the rollout was in an earlier train batch, with which its steps were counted."""


@dataclass(eq=False, slots=True)
class TrainBatch:
    """Rollouts that the learner uses together."""

    rollouts: list[QueuedRollout]
    uses: int = 0
    """Number of times that the learner has taken it."""

    @property
    def size(self) -> int:
        """Number of steps by which it fills a batch; see `Rollout.size`."""
        return sum(queued.rollout.size for queued in self.rollouts)

    @property
    def num_steps(self) -> int:
        """Number of env steps, those of old rollouts included."""
        return sum(queued.rollout.num_env_steps for queued in self.rollouts)

    @property
    def num_new_steps(self) -> int:
        """Number of env steps in rollouts that were in no earlier train batch."""
        return sum(queued.rollout.num_env_steps for queued in self.rollouts if not queued.is_old)

    def count_new(self, start: int, end: int) -> int:
        """Return how many env steps a pass uses for the first time when it draws its steps `start` to `end`.

        Batches mix steps of old and new rollouts, so each batch counts its share of the new ones. Steps of old rollouts
        were counted with an earlier train batch.
        """
        if self.uses > 1 or start == end:
            return 0
        new, total = self.num_new_steps, self.num_steps
        return end * new // total - start * new // total

    @property
    def version(self) -> int:
        """Version of the oldest weights that collected it."""
        return min(queued.rollout.weights_version for queued in self.rollouts)


class TrainBatchBuilder:
    """Makes train batches of whole rollouts, in the order of their arrival.

    Old rollouts are drawn uniformly from the last `replay_slots` rollouts and mixed in (Espeholt et al. 2018, "IMPALA",
    section 4: replay). Mixing begins once the slots hold a train batch; after k further new rollouts, floor(f k) old
        ones have
    been added.

    Args:
        size: Least number of steps of a train batch, see `Rollout.size`; None: the rollouts that arrive together.
        replay_proportion: f, old rollouts per new one.
        replay_slots: Number of newest rollouts that old ones are drawn from.
        seed: Seed of the draws.
    """

    def __init__(self, size: int | None = None, replay_proportion: float = 0.0, replay_slots: int = 0,
                 seed: int = 0) -> None:
        self._size, self._proportion, self._num_slots = size, replay_proportion, replay_slots
        self._rng = random.Random(f"old rollouts {seed}")
        self._slots: list[Rollout] = []
        # rollouts: stored in slots, new and old ones since mixing began
        self._num_stored = self._num_new = self._num_old = 0
        self._pending: list[QueuedRollout] = []
        self._pending_steps = 0

    @property
    def pending_share(self) -> float:
        """Share of a train batch that the pending rollouts fill, below 1."""
        return self._pending_steps / (self._size or 1)

    def clear(self) -> None:
        """Discard the rollouts of the incomplete train batch; the slots keep theirs."""
        self._pending, self._pending_steps = [], 0

    def add(self, rollouts: list[Rollout], version: int) -> Iterator[TrainBatch]:
        """Add rollouts that arrived together, and yield the train batches that they complete.

        Args:
            rollouts: The rollouts, in order of arrival.
            version: The learner's version at their arrival.
        """
        if self._size is None and not self._num_slots:
            yield TrainBatch([QueuedRollout(rollout, version) for rollout in rollouts])
            return
        for rollout in rollouts:
            for queued in (QueuedRollout(rollout, version), *self._draw_old(rollout, version)):
                self._pending.append(queued)
                self._pending_steps += queued.rollout.size
                if self._pending_steps >= (self._size or 1):
                    complete, self._pending, self._pending_steps = TrainBatch(self._pending), [], 0
                    yield complete

    def _draw_old(self, rollout: Rollout, version: int) -> list[QueuedRollout]:
        """Draw the old rollouts that follow a new one, then store the new one in a slot."""
        if not self._num_slots:
            return []
        drawn: list[QueuedRollout] = []
        if sum(stored.size for stored in self._slots) >= (self._size or 1):
            self._num_new += 1
            while self._num_old < int(self._proportion * self._num_new + 1e-9):
                self._num_old += 1
                drawn.append(QueuedRollout(self._rng.choice(self._slots), version, is_old=True))
        self._slots[self._num_stored % self._num_slots:self._num_stored % self._num_slots + 1] = [rollout]
        self._num_stored += 1
        return drawn
