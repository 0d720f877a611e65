"""Share the last known states of replay shards between the collector thread and the learner thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pytorchrl.errors import WorkerLostError
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import RolloutHeader
from pytorchrl.support.untyped import Json

_NO_CONTENTS: Mapping[str, Json] = MappingProxyType({
    "added": 0, "sampled": 0, "items": 0, "bytes": 0, "mass": 0.0, "min_priority": None, "stale_priorities": 0,
    "evicted_unused": 0})


class ShardState(NamedTuple):
    """The state that a shard reports with its responses."""

    answers: int = 0
    """Number of calls that the shard has answered; of two states, the newer one has the larger number."""
    resident: int = 0
    """Number of env steps in the shard."""
    evicted: int = 0
    """Number of env steps evicted since the shard started."""
    mass: float = 0.0
    """Sum of the sampling weights of the shard's items."""
    smallest: float = float("inf")
    """The smallest sampling weight of the shard's items; infinity without items."""
    contents: Mapping[str, Json] = _NO_CONTENTS
    """Statistics of the shard's storage; see `r_worker.describe`."""
    times_ms: Mapping[str, float] = MappingProxyType({})
    """Mean duration of the last 100 calls of each kind, in milliseconds."""
    traffic: Traffic = Traffic()
    """Traffic measured when the most recently added rollout was decoded."""

    def statistics(self) -> dict[str, object]:
        """Return the storage's statistics, and the mean time in ms of each kind of call (None without such calls)."""
        times = {f"{name}_time_ms": self.times_ms.get(name) for name in ("add", "sample", "priority")}
        return {**self.contents, **times}


class ShardStates:
    """A thread-safe record of each shard's last known state, and of counts that `Inserter` and `Sampler` share.

    The `Inserter` sends rollouts to the shards, and the `Sampler` receives batches from the shards.

    Args:
        num_replay_workers: Number of shards.
        changed: Event that the inserter sets whenever a shard confirms a rollout or is reset.
        learned: Event that is set whenever `trained` changes.

    Attributes:
        changed: The argument `changed`. The sampler waits for this event, and then clears it.
        learned: The argument `learned`. The inserting thread waits for this event, and then clears it.
        added: Number of env steps in rollouts that shards have added and confirmed; the inserter updates this count.
        trained: Number of env steps in sampled batches, where each step counts once per pass over its batch; the
            sampler updates this count.
        peak: Largest number of rollouts whose headers have waited for the learner at the same time.
    """

    def __init__(self, num_replay_workers: int, changed: threading.Event, learned: threading.Event) -> None:
        self.changed, self.learned = changed, learned
        self._lock = threading.Lock()  # guards the following attributes: `invariant()`
        self._states = [ShardState() for _ in range(num_replay_workers)]
        self._incarnations = [0] * num_replay_workers
        self._headers: deque[RolloutHeader] = deque()
        self.added = self.trained = self.peak = 0
        # Shard that the sampler found to be lost -> the first error, until the inserter handles the loss.
        self._lost: dict[int, WorkerLostError] = {}

    def invariant(self) -> bool:
        """Return whether no batch is requested from lost shards, because they have no mass, after every event."""
        with self._lock:
            return all(self._states[index].mass == 0.0 for index in self._lost)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def current(self) -> list[ShardState]:
        """The last known state of each shard."""
        with self._lock:
            return list(self._states)

    def incarnation(self, index: int) -> int:
        """Return the incarnation of a shard, which is the number of times that the shard has been lost."""
        return self._incarnations[index]

    def snapshot(self) -> tuple[list[ShardState], list[int], int]:
        """Return a consistent snapshot: the shards' states, their incarnations, and the number of env steps added."""
        with self._lock:
            return list(self._states), list(self._incarnations), self.added

    def update(self, index: int, incarnation: int, state: ShardState) -> None:
        """Store a shard's state, unless it is from an earlier incarnation or older than the stored state."""
        with self._lock:
            if incarnation == self._incarnations[index] and state.answers > self._states[index].answers:
                self._states[index] = state

    def confirm(self, header: RolloutHeader) -> None:
        """Count a rollout that a shard has added; store its header for the learner's statistics."""
        with self._lock:
            self.added += header.num_env_steps
            self._headers.append(header)
            self.peak = max(self.peak, len(self._headers))

    def train(self, num_steps: int) -> None:
        """Add env steps to `trained`; a negative number subtracts env steps that the learner did not use."""
        with self._lock:
            self.trained += num_steps
        self.learned.set()

    def take_headers(self) -> list[RolloutHeader]:
        """Return the headers of the rollouts added since the last call."""
        with self._lock:
            headers, self._headers = list(self._headers), deque()
            return headers

    def suspend(self, index: int, incarnation: int, error: WorkerLostError) -> None:
        """Stop sampling from a lost shard, and report the loss to the inserter, which calls `take_lost`."""
        with self._lock:
            if incarnation == self._incarnations[index]:
                # Late responses of the lost shard contain a smaller value of `answers`, so `update` ignores them.
                self._states[index] = ShardState(self._states[index].answers + 2**32)
                self._lost.setdefault(index, error)

    def take_lost(self) -> tuple[int, WorkerLostError] | None:
        """Return the index and error of a shard that the sampler found to be lost, and forget the loss; else None."""
        with self._lock:
            index = next(iter(self._lost), None)
            return None if index is None else (index, self._lost.pop(index))

    def reset(self, index: int) -> None:
        """Record that a new, empty incarnation of a shard starts."""
        with self._lock:
            self._incarnations[index] += 1
            self._states[index] = ShardState()
            self._lost.pop(index, None)
