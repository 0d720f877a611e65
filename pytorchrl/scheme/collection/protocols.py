"""Protocols for strategies of collection and for destinations of rollouts."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Protocol

from pytorchrl.scheme.transport.messages import Rollout

Deliver = Callable[[list[Rollout]], object]


class CollectionStrategy(Protocol):
    """A way to collect rollouts for a gradient worker.

    Attributes:
        delivered_by_lost: Number of env steps that workers delivered before they were lost; their own counts are lost.
    """

    delivered_by_lost: int

    def step(self, deliver: Deliver) -> None:
        """Collect once, and pass the rollouts to `deliver`, booked as in flight in the ledger."""

    def num_live(self) -> int:
        """Return the number of workers that are not lost."""

    def num_in_flight(self) -> int:
        """Return the number of requests to remote workers whose rollouts have not arrived."""

    def take_send_s(self) -> float:
        """Return the transit time of requests and rollouts of synchronous rounds since the last call, in seconds."""

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight and make no new requests; workers still busy at the deadline are lost."""

    def finish(self, timeout_s: float) -> None:
        """Wait for the rollouts in flight, count their steps, and discard them."""


class RoundStrategy(CollectionStrategy, Protocol):
    """A strategy that collects in rounds, for which the learner waits."""

    def collect(self) -> list[Rollout]:
        """Return those rollouts of a round that have a valid step, booked as in flight in the ledger."""

    def request_ahead(self, num_steps: int) -> None:
        """Start enough rounds on the remote workers to collect at least `num_steps` steps (`Rollout.size`)."""


class Destination(Protocol):
    """The receiver of rollouts: a sample queue, or replay.

    The methods are called by the collector thread, or by the learner's thread while the collector thread is paused.
    """

    @property
    def queue(self) -> queue.Queue[Any]:  # each destination has its own type of entries
        """Queue from which a user may take entries, and to which a user may add entries."""

    @property
    def delays_requests(self) -> bool:
        """Whether rollouts are requested only while `may_request` returns True."""

    def put(self, rollouts: list[Rollout]) -> None:
        """Accept rollouts that are in flight in the ledger; block while there is no room, unless collection closes."""

    def may_request(self, num_in_flight: int) -> bool:
        """Return whether a rollout may be requested while others are in flight; used if `delays_requests`."""

    def poll(self) -> None:
        """Handle pending responses between two rollouts, without blocking."""

    def begin_drain(self) -> None:
        """Make room for rollouts, because the learner takes no more data; may be called repeatedly."""

    def put_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Accept rollouts that arrive during a drain, or discard them and leave their steps in flight in the ledger."""

    def end_drain(self, deadline: float) -> None:
        """Complete the drain, once no rollout is in flight: discard queued data, or wait for replay to store it."""
