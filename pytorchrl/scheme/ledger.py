"""Count the env steps in each place; every collected step is in exactly one place.

    collected = in flight + queued + consumed (unique) + resident + evicted + sum of dropped[reason]

The page docs/ledger.md defines these places. A worker that moves steps between places records the move in its own
`Ledger`, which has the additional place `sent` (see `merge`), and sends a snapshot with its next message. A snapshot
contains totals, not changes, so it does no harm if a message is late or arrives twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from operator import itemgetter
from typing import NamedTuple, SupportsIndex

from pytorchrl.errors import LedgerError
from pytorchrl.files.atomic import saved_int


class DropReason(str, Enum):
    """The reason why steps were dropped."""

    POLICY_LAG = "policy_lag"
    QUEUE_FULL = "queue_full"
    WORKER_LOST = "worker_lost"
    GRADIENT_LAG = "gradient_lag"
    NAN = "nan"
    """The first gradient computed from the steps, or the mean gradient, was not finite, so no update was made. The
    steps remain dropped for this reason even if a later pass over their rollout uses them."""
    SHUTDOWN = "shutdown"
    EARLY_STOP = "early_stop"
    """`target_kl` ended the passes over a rollout before the first pass was complete."""
    CANCELLED = "cancelled"
    """Episodes were ended because a rollout was full; see `GroupBuffer`."""


class LedgerSnapshot(NamedTuple):
    """Numbers of env steps in flight, queued, consumed and so on, at one point in time."""

    collected: int = 0
    in_flight: int = 0
    queued: int = 0
    consumed_unique: int = 0
    consumed: int = 0
    """Steps used, counted once for each pass; this count is not a term of the ledger's equation."""
    resident: int = 0
    evicted: int = 0
    sent: int = 0
    """Steps whose gradients were sent. The receiver counts these steps as in flight, and later as consumed or
    dropped."""
    dropped: Mapping[str, int] = {}

    @classmethod
    def from_saved(cls, *, dropped: Mapping[str, SupportsIndex], **places: SupportsIndex) -> LedgerSnapshot:
        """Return the snapshot that a checkpoint contains; raise an error if its counts are not integers."""
        return cls(**{place: saved_int(count) for place, count in places.items()},
                   dropped={DropReason(reason).value: saved_int(count) for reason, count in dropped.items()})

    @property
    def imbalance(self) -> int:
        """Collected steps minus the steps in all places (in flight, queued and so on); 0 if the ledger is exact."""
        places = self.in_flight + self.queued + self.consumed_unique + self.resident + self.evicted + self.sent
        return self.collected - places - sum(self.dropped.values())

    def check(self) -> LedgerSnapshot:
        """Return this snapshot; raise `LedgerError` if it has an `imbalance`, or a negative count other than `sent`."""
        places = (self.in_flight, self.queued, self.consumed_unique, self.resident, self.evicted,
                  *self.dropped.values())
        if self.imbalance or min(places) < 0:
            raise LedgerError(f"{self.imbalance} of {self.collected} env steps are in no place: {self}")
        return self

    def saved(self) -> dict[str, object]:
        """Return all counts as a checkpoint stores them; see `from_saved`."""
        return {**self._asdict(), "dropped": dict(self.dropped)}

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """Return the counts by place, with an entry in `dropped` for every reason."""
        dropped = {reason.value: self.dropped.get(reason.value, 0) for reason in DropReason}
        return {"collected": self.collected, "in_flight": self.in_flight, "queued": self.queued,
                "consumed_unique": self.consumed_unique, "consumed": self.consumed, "resident": self.resident,
                "evicted": self.evicted, "dropped": dropped}


_PLACES = LedgerSnapshot._fields[:-1]
_counts_of = itemgetter(*_PLACES)


class Ledger:
    """Ledger of one worker. It is thread-safe: each move is atomic, so every snapshot balances."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts: snapshot().imbalance == 0
        self._places = dict.fromkeys(_PLACES, 0)
        self._dropped: Counter[str] = Counter()
        self._latest: LedgerSnapshot | None = None  # snapshot of the current counts; None after a change

    def collect(self, num_steps: int) -> None:
        """Count newly collected steps as in flight."""
        with self._lock:
            self._latest = None
            self._places["collected"] += num_steps
            self._places["in_flight"] += num_steps

    def move(self, num_steps: int, source: str, target: str) -> None:
        """Move steps from the place `source` to the place `target`.

        The places are `in_flight`, `queued`, `sent`, `consumed_unique`, `resident` and `evicted`. Steps are `sent`
        while the gradient computed from them is on its way to the update worker; see `merge`.
        """
        if num_steps:
            with self._lock:
                self._latest = None
                self._places[source] -= num_steps
                self._places[target] += num_steps

    def drop(self, num_steps: int, source: str, reason: DropReason) -> None:
        """Move steps from the place `source` to `dropped`."""
        if num_steps:
            with self._lock:
                self._latest = None
                self._places[source] -= num_steps
                self._dropped[reason.value] += num_steps

    def drop_all(self, reason: DropReason) -> None:
        """Drop all steps in this ledger that are queued or in flight."""
        for place in ("in_flight", "queued"):
            self.drop(self._places[place], place, reason)

    def __getitem__(self, place: str) -> int:
        """Return the number of steps in a place, such as `queued`; see `move`."""
        return self._places[place]

    def total(self, *places: str) -> int:
        """Return the total number of steps in the given places."""
        with self._lock:
            return sum([self._places[place] for place in places])

    def consume(self, num_steps: int) -> None:
        """Add `num_steps` to `consumed`, which counts a step at every use; the steps do not change their place."""
        with self._lock:
            self._latest = None
            self._places["consumed"] += num_steps

    def restore(self, snapshot: LedgerSnapshot) -> None:
        """Replace all counts with the counts of a snapshot."""
        places = snapshot._asdict()
        with self._lock:
            self._latest = None
            self._dropped = Counter(places.pop("dropped"))
            self._places = places

    def snapshot(self, collected: int | None = None) -> LedgerSnapshot:
        """Return the current counts.

        Args:
            collected: Number of collected steps that the collection workers counted; None: the number that this
                ledger counted.
        """
        with self._lock:
            if self._latest is None:
                self._latest = LedgerSnapshot._make((*_counts_of(self._places), dict(self._dropped)))
            return self._latest if collected is None else self._latest._replace(collected=collected)


def merge(snapshots: Iterable[LedgerSnapshot], own: LedgerSnapshot) -> LedgerSnapshot:
    """Combine the workers' ledgers into the ledger of the whole tree.

    When a gradient worker sends a gradient, the worker's ledger adds to `sent` the steps that no earlier gradient used.
    When the gradient arrives, the update worker's ledger subtracts these steps from its own `sent`, which therefore
    becomes negative. The sum of `sent` over all ledgers is the number of steps whose gradients are on the way. The
    ledger of the tree counts these steps as in flight.

    Args:
        snapshots: The gradient workers' ledgers.
        own: The update worker's ledger.
    """
    parts = [own, *snapshots]
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, num_steps in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + num_steps
    return LedgerSnapshot(
        collected=sum([part.collected for part in parts]),
        in_flight=sum([part.in_flight + part.sent for part in parts]), queued=sum([part.queued for part in parts]),
        resident=sum([part.resident for part in parts]), evicted=sum([part.evicted for part in parts]),
        consumed_unique=own.consumed_unique, consumed=own.consumed, dropped=dropped)
