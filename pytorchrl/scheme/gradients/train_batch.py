"""Train batches: the rollouts that a learner uses together."""

from __future__ import annotations

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
