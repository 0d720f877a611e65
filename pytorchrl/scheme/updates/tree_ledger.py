"""Count the env steps of the whole worker tree: sum the ledgers of the update worker and its gradient workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TypedDict

from pytorchrl.errors import CheckpointError, LedgerError
from pytorchrl.scheme.ledger import DropReason, Ledger, LedgerSnapshot, merge

_BEFORE = (-1, -1)
"""Key of the ledgers of gradient workers that were lost before a checkpoint. No live worker has this key, so the next
checkpoint counts these ledgers as lost, too."""


class SavedLedger(TypedDict):
    """Saved state of a `TreeLedger`. Ledgers of live gradient workers are excluded: each worker saves its own."""

    own: dict[str, object]
    lost: dict[str, object]


class TreeLedger:
    """Ledger of all env steps of the tree. This class is thread-safe.

    Steps that arrive with a gradient are in flight until the gradient is applied or dropped. A gradient worker sends a
    snapshot of its own ledger with each gradient. This ledger adds up the latest snapshots of all gradient
    workers, including lost workers that were replaced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the snapshots and incarnations: total().imbalance == 0
        self._own = Ledger()
        self._snapshots: dict[tuple[int, int], LedgerSnapshot] = {}  # key: worker, number of lost predecessors
        self._incarnations: Counter[int] = Counter()
        self._consumed_before = 0

    def report(self, worker: int, incarnation: int, snapshot: LedgerSnapshot) -> None:
        """Record the newest snapshot of a gradient worker's ledger.

        Args:
            worker: Index of the gradient worker.
            incarnation: Number of earlier gradient workers with this index, all of them lost.
            snapshot: The snapshot, which replaces the previous one of the same worker.
        """
        with self._lock:
            self._snapshots[worker, incarnation] = snapshot

    def receive(self, num_new_steps: int) -> None:
        """Record that a gradient arrived, and count its new steps as in flight.

        Args:
            num_new_steps: Number of the gradient's steps that were used by no earlier gradient.
        """
        self._own.move(num_new_steps, "sent", "in_flight")

    def consume(self, num_new_steps: int, num_samples: int) -> None:
        """Record the steps of a gradient as consumed.

        Args:
            num_new_steps: Number of the gradient's steps that were used by no earlier gradient.
            num_samples: Number of all the gradient's steps.
        """
        self._own.move(num_new_steps, "in_flight", "consumed_unique")
        self._own.consume(num_samples)

    def drop(self, num_new_steps: int, reason: DropReason) -> None:
        """Record that a gradient is dropped, and count its new steps as dropped.

        Args:
            num_new_steps: Number of the gradient's steps that were used by no earlier gradient.
            reason: Reason for the drop.
        """
        self._own.drop(num_new_steps, "in_flight", reason)

    def close(self, worker: int, snapshot: LedgerSnapshot | None) -> None:
        """Record the final ledger of a gradient worker.

        If the snapshot is None, the worker is lost, and its unused steps are dropped.
        """
        with self._lock:
            key = (worker, self._incarnations[worker])
            if snapshot is not None:
                self._snapshots[key] = snapshot
                return
            last = self._snapshots.get(key, LedgerSnapshot())
            lost = Counter(last.dropped)
            lost[DropReason.WORKER_LOST.value] += last.in_flight + last.queued + last.resident
            self._snapshots[key] = LedgerSnapshot(
                collected=last.collected, sent=last.sent, evicted=last.evicted, dropped=dict(lost))

    def lose(self, worker: int) -> None:
        """Record that a gradient worker is lost, and begin a separate ledger for the worker's replacement."""
        self.close(worker, None)
        with self._lock:
            self._incarnations[worker] += 1

    def total(self) -> LedgerSnapshot:
        """Return the ledger of the whole tree, which includes the latest snapshot from each gradient worker."""
        with self._lock:
            return merge(self._snapshots.values(), self._own.snapshot())

    def settle(self) -> LedgerSnapshot:
        """Return the final ledger. No further gradient will be applied, so steps in flight are dropped."""
        self._own.drop(max(0, self.total().in_flight), "in_flight", DropReason.SHUTDOWN)
        return self.total()

    def collected_and_consumed(self) -> tuple[int, int, int]:
        """Return `collected`, `consumed` and `consumed_unique`, in env steps; cheaper than `total`."""
        return self.collected, self._own["consumed"], self._own["consumed_unique"]

    @property
    def env_steps(self) -> int:
        """Number of env steps that have reached the learner: updates have used them, or they were added to replay."""
        own = self._own.total("consumed_unique", "resident", "evicted")
        with self._lock:  # this property is read at every update, so it adds up only the required counts
            return own + sum([part.resident + part.evicted for part in self._snapshots.values()])

    @property
    def collected(self) -> int:
        """Number of env steps that were collected."""
        with self._lock:
            return sum(snapshot.collected for snapshot in self._snapshots.values())

    @property
    def consumed_since_start(self) -> int:
        """Number of env steps that updates of this process have used; a step counts once for each use."""
        return self._own.snapshot().consumed - self._consumed_before

    def state(self) -> SavedLedger:
        """Return the state to save. Ledgers of live gradient workers are excluded: each worker saves its own."""
        with self._lock:
            lost = [snapshot for (worker, incarnation), snapshot in self._snapshots.items()
                    if incarnation != self._incarnations[worker]]
            return {"own": self._own.snapshot().saved(), "lost": merge(lost, LedgerSnapshot()).saved()}

    def restore(self, own: LedgerSnapshot, lost: LedgerSnapshot, live: Mapping[int, LedgerSnapshot]) -> None:
        """Restore a saved state.

        Args:
            own: The update worker's ledger.
            lost: The sum of the ledgers of lost gradient workers.
            live: The ledgers of the other gradient workers, by index.

        Raises:
            CheckpointError: The counts do not add up to the number of collected env steps, or a count is negative.
        """
        self._own.restore(own)
        with self._lock:
            self._snapshots = {_BEFORE: lost, **{(worker, 0): ledger for worker, ledger in live.items()}}
        self._consumed_before = own.consumed
        try:
            self.total().check()
        except LedgerError as error:
            raise CheckpointError(f"the saved ledger does not balance: {error}") from error
