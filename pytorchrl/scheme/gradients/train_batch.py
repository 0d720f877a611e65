"""Train batches, which are groups of rollouts that a learner uses together, and the base class of their sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pytorchrl.agent.data import Batch
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.timing import Times
from pytorchrl.scheme.transport.messages import Rollout


class QueuedRollout(NamedTuple):
    """A rollout in a train batch."""

    rollout: Rollout
    version_queued: int
    """The learner's version when the rollout arrived."""
    is_old: bool = False
    """Whether the steps of the rollout were counted earlier, because it was used before or comes from replay shards."""


@dataclass(eq=False, slots=True)
class TrainBatch:
    """A group of rollouts that the learner uses together."""

    rollouts: list[QueuedRollout]
    uses: int = 0
    """Number of times that the learner has taken the train batch."""
    version_used: int = 0
    """The learner's version at the first use."""

    @property
    def size(self) -> int:
        """Number of steps, including steps in which an environment is reset; see `RolloutHeader.size`."""
        return sum(queued.rollout.header.size for queued in self.rollouts)

    @property
    def num_steps(self) -> int:
        """Number of env steps in all rollouts, new and old."""
        return sum(queued.rollout.header.num_env_steps for queued in self.rollouts)

    @property
    def num_new_steps(self) -> int:
        """Number of env steps in new rollouts; see `QueuedRollout.is_old`."""
        return sum(queued.rollout.header.num_env_steps for queued in self.rollouts if not queued.is_old)

    def count_new(self, start: int, end: int) -> int:
        """Return how many env steps of a minibatch count as new.

        The minibatch has `end` - `start` env steps, and the minibatches before it have `start` env steps in total.
        Minibatches may mix steps of new and old rollouts. In the first use of the train batch, its new steps are
        therefore divided among the minibatches in proportion to their sizes. In later uses, the result is 0.
        """
        if self.uses > 1 or start == end:
            return 0
        new, total = self.num_new_steps, self.num_steps
        return end * new // total - start * new // total

    @property
    def version(self) -> int:
        """Version of the oldest weights with which a rollout of the train batch was collected."""
        return min(queued.rollout.header.weights_version for queued in self.rollouts)


class TrainBatchSource(ABC):
    """A source of train batches."""

    @abstractmethod
    def take(self) -> TrainBatch:
        """Wait for the next train batch, increase its `uses` by 1 (except with replay shards), and return it."""

    def own_batches(self) -> Iterator[Batch] | None:
        """Return the batches of the train batch in the storage; None: the algorithm decides which batches are due."""
        return None

    def cancel_uses(self, batch: TrainBatch) -> None:
        """Do not return this train batch from `take` again, if the source returns train batches several times."""

    def count(self, counters: WorkerCounters) -> None:
        """Add the source's counts to `counters`; by default, none, because `Destination.count` counts the queue."""

    def take_times(self) -> Times:
        """Return the durations of the source's operations since the last call.

        The wait in `take` is not among them, because the gradient worker measures it.
        """
        return {}

    @abstractmethod
    def take_levels(self) -> tuple[int, ...]:
        """Return how many train batches were waiting at each `take` since the last `take_levels`."""

    def close(self, timeout_s: float) -> None:
        """Stop the workers that belong to the source, if any; wait up to `timeout_s` seconds for their answers."""
