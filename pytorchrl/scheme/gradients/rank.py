"""A gradient worker's place among those that average gradients among themselves."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytorchrl.runtime import Runtime
from pytorchrl.scheme.gradients.all_reduce import GradientGroup
from pytorchrl.scheme.gradients.worker_stats import Vectors
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.transport.messages import Moments


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and when ranks meet."""

    generation: int
    """1, 2, ...: how often they have met, this time included."""
    address: str
    port: int
    size: int
    """Number of ranks."""
    timeout_s: float
    """Without an answer for so many seconds an exchange breaks off."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gradient worker that may be a rank of the next group."""

    version: int
    """Number of updates that its parameters have seen."""
    incarnation: int
    ledger: LedgerSnapshot
    address: str
    """Where it could be met."""
    port: int


def propose_address() -> tuple[str, int]:
    """An address of this host and a TCP port that is free there now."""
    with socket.socket() as probe, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        probe.bind(("", 0))
        try:
            route.connect(("10.255.255.255", 1))  # sends nothing; tells which of our addresses others reach us by
            address = route.getsockname()[0]
        except OSError:  # no network at all: every rank is on this host
            address = "127.0.0.1"
        return address, probe.getsockname()[1]


class Rank:
    """The group that a gradient worker is in, if it is in one, and what it has to tell the others of its data.

    Groups are told apart by their generation: a signal to leave one that comes late, or before it is joined, is for no other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # another thread may say that it is to leave
        self._group: GradientGroup | None = None
        self._generation, self._left = 0, 0.0
        self._untold: list[dict[str, Moments]] = []

    @property
    def is_member(self) -> bool:
        """Whether it is in a group, which may be broken."""
        return self._group is not None

    def join(self, runtime: Runtime, meeting: Meeting, place: int) -> None:
        """Meet the others; raises `RankLostError` if not all come."""
        group = GradientGroup(runtime.join_ranks(
            meeting.address, meeting.port, place, meeting.size, meeting.timeout_s, meeting.generation))
        with self._lock:
            self._group, self._generation = group, meeting.generation
            is_over = self._generation <= self._left
        if is_over:
            group.close()

    def leave(self, generation: float = math.inf) -> None:
        """Leave the groups up to this generation, also one that is still to be joined; an exchange that goes on breaks off."""
        with self._lock:
            self._left = max(self._left, generation)
            group = self._group if self._generation <= self._left else None
        if group is not None:
            group.close()

    def mean(self, gradients: Vectors, weights: Sequence[int], sizes: Sequence[int], tells: bool) -> Vectors:
        """See `GradientGroup.mean`; if any rank `tells`, all call `told` next."""
        if self._group is None:
            raise RuntimeError("distribute_gradients=True needs join_group() first")
        return self._group.mean(gradients, weights, sizes, tells)

    def gather_all(self, moments: Any) -> list[Any]:
        """See `GradientGroup`."""
        assert self._group is not None
        return self._group.gather_all(moments)

    def has_to_tell(self, moments: Sequence[dict[str, Moments]]) -> bool:
        """Whether there is anything that others do not know, these moments of rollouts included."""
        return bool(self._untold or moments)

    def hold(self, moments: Sequence[dict[str, Moments]]) -> None:
        """Keep moments of rollouts until it is time to tell them."""
        self._untold += moments

    def forget(self) -> None:
        """Tell nobody what is kept: the data was given up."""
        self._untold = []

    def told(self, tells: bool) -> tuple[dict[str, Moments], ...]:
        """The moments that ranks tell each other after a mean, in rank order; this one its own only if it `tells`."""
        assert self._group is not None
        return self.tell_all(tells) if self._group.num_raised else ()

    def tell_all(self, tells: bool = True) -> tuple[dict[str, Moments], ...]:
        """The moments that all ranks have kept, in rank order; all call it at the same point."""
        assert self._group is not None
        own: list[dict[str, Moments]] = []
        if tells:  # once, even if the exchange breaks off: others may know by then
            own, self._untold = self._untold, []
        return tuple(part for parts in self._group.gather_objects(own) for part in parts)
