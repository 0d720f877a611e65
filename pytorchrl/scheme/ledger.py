"""The account of every environment step.

    collected = in flight + queued + consumed (unique) + resident + evicted + sum of dropped[reason]

A worker that moves steps between places books the move in its own `Ledger` and sends a snapshot with its next message.
Snapshots are totals, not changes, so a repeated or late one does no harm.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum

from pytorchrl.errors import PyTorchRLError


class LedgerError(PyTorchRLError):
    """The account does not balance: environment steps were lost or counted twice."""


class DropReason(str, Enum):
    """Why steps were given up before use."""

    POLICY_LAG = "policy_lag"
    QUEUE_FULL = "queue_full"
    PREEMPTED = "preempted"
    WORKER_LOST = "worker_lost"
    GRADIENT_LAG = "gradient_lag"
    NAN = "nan"
    """The first gradient that used them, or the mean it went into, was not finite, so that no update was made of it.
    They are booked at once and stay here, also if a later pass over their rollout uses them."""
    SHUTDOWN = "shutdown"
    EARLY_STOP = "early_stop"
    """`target_kl` ended the passes over a rollout before its first pass was complete."""


@dataclass(frozen=True)
class LedgerSnapshot:
    """Env steps by place, at a moment when no message is being handled."""

    collected: int = 0
    in_flight: int = 0
    queued: int = 0
    consumed_unique: int = 0
    consumed: int = 0
    """Every pass counts."""
    resident: int = 0
    evicted: int = 0
    sent: int = 0
    """Handed on inside gradients; a total of one worker that the receiver books as in flight, then consumed."""
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def imbalance(self) -> int:
        """Collected steps that are in no place; 0 if the account is exact."""
        places = self.in_flight + self.queued + self.consumed_unique + self.resident + self.evicted + self.sent
        return self.collected - places - sum(self.dropped.values())

    def check(self) -> LedgerSnapshot:
        """Return self if the equation holds and no place is negative, else raise `LedgerError`."""
        places = (self.in_flight, self.queued, self.consumed_unique, self.resident, self.evicted,
                  *self.dropped.values())
        if self.imbalance or min(places) < 0:
            raise LedgerError(f"{self.imbalance} of {self.collected} env steps are in no place: {self}")
        return self

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """The public form, all reasons included."""
        dropped = {reason.value: self.dropped.get(reason.value, 0) for reason in DropReason}
        return {"collected": self.collected, "in_flight": self.in_flight, "queued": self.queued,
                "consumed_unique": self.consumed_unique, "consumed": self.consumed, "resident": self.resident,
                "evicted": self.evicted, "dropped": dropped}


class Ledger:
    """The counters of one worker. Thread-safe: each move is atomic, so every snapshot balances."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def collect(self, num_steps: int) -> None:
        """Steps were made; they are in flight."""
        with self._lock:
            self._places["collected"] += num_steps
            self._places["in_flight"] += num_steps

    def move(self, num_steps: int, source: str, target: str) -> None:
        """Move steps between two of in_flight, queued, sent, consumed_unique, resident, evicted."""
        with self._lock:
            self._places[source] -= num_steps
            self._places[target] += num_steps

    def drop(self, num_steps: int, source: str, reason: DropReason) -> None:
        """Give up steps that are in `source`."""
        if num_steps:
            with self._lock:
                self._places[source] -= num_steps
                self._dropped[reason.value] += num_steps

    def drop_all(self, reason: DropReason) -> None:
        """Give up everything that is queued or in flight here."""
        for place in ("in_flight", "queued"):
            self.drop(self._places[place], place, reason)

    def consume(self, num_steps: int) -> None:
        """Count steps of one pass (not a place: it takes part in no equation)."""
        with self._lock:
            self._places["consumed"] += num_steps

    def restore(self, snapshot: LedgerSnapshot) -> None:
        """Go on from what another ledger came to."""
        places = {field.name: getattr(snapshot, field.name) for field in fields(snapshot)}
        with self._lock:
            self._dropped = Counter(places.pop("dropped"))
            self._places = Counter(places)

    def snapshot(self, collected: int | None = None) -> LedgerSnapshot:
        """The counters now; `collected` replaces the own count by that of the collectors themselves."""
        with self._lock:
            places = dict(self._places)
            if collected is not None:
                places["collected"] = collected
            return LedgerSnapshot(dropped=dict(self._dropped), **places)


def merge(snapshots: Iterable[LedgerSnapshot], own: LedgerSnapshot) -> LedgerSnapshot:
    """The account of the whole tree: the gradient workers' snapshots and that of the update worker.

    What gradient workers sent is, on this side, in flight (received, not applied), consumed or dropped. The update
    worker takes what it receives out of `sent`, so the sum of `sent` is what is still on its way between them.
    """
    parts = [own, *snapshots]
    places = {name: sum(getattr(part, name) for part in parts)
              for name in ("collected", "in_flight", "queued", "resident", "evicted", "sent")}
    places["in_flight"] += places.pop("sent")
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    return LedgerSnapshot(
        consumed_unique=own.consumed_unique, consumed=own.consumed, dropped=dict(dropped), **places)
