"""Protocols of collection: how rollouts are collected, and where they go."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any, Protocol

from pytorchrl.scheme.transport.messages import Rollout

Deliver = Callable[[list[Rollout]], object]


class CollectionStrategy(Protocol):
    """One way to collect rollouts for a gradient worker.

    Attributes:
        delivered_by_lost: Env steps in the rollouts of workers that were lost later, whose own counts are lost.
    """

    delivered_by_lost: int

    def step(self, deliver: Deliver) -> None:
        """Collect once, and pass the rollouts to `deliver`. In the ledger, they are in flight."""

    def num_live(self) -> int:
        """Return the number of workers that are not lost."""

    def num_in_flight(self) -> int:
        """Return the number of rollouts that were requested from remote workers and have not arrived."""

    def take_send_s(self) -> float:
        """Return the seconds that requests and rollouts of synchronous rounds were in transit since the last call."""

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight without new requests; workers without any at the deadline are lost."""

    def finish(self, timeout_s: float) -> None:
        """Wait for the rollouts in flight and count their steps; nobody uses them."""


class RoundStrategy(CollectionStrategy, Protocol):
    """A strategy whose rounds the learner waits for."""

    def collect(self) -> list[Rollout]:
        """Return the rollouts of one round that have a valid step. In the ledger, they are in flight."""

    def request_ahead(self, num_steps: int) -> None:
        """Start enough rounds on the remote workers to collect at least `num_steps` steps, see `Rollout.size`."""


class Destination(Protocol):
    """Where rollouts go: a sample queue, or replay. The collector thread calls all methods, or it is paused."""

    @property
    def queue(self) -> queue.Queue[Any]:
        """A queue whose contents may be taken and added by hand."""

    @property
    def delays_requests(self) -> bool:
        """Whether a rollout is only requested once `may_request` allows it."""

    def put(self, rollouts: list[Rollout]) -> None:
        """Take rollouts that are in flight in the ledger; wait while there is no room, unless collection is closing."""

    def may_request(self, num_in_flight: int) -> bool:
        """Return whether one more rollout may be requested besides those in flight, where `delays_requests`."""

    def poll(self) -> None:
        """Do what is due between two rollouts, without waiting."""

    def begin_drain(self) -> None:
        """Make room for rollouts, because the learner takes none from now on. May be called again."""

    def put_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Take rollouts that arrive during a drain, or leave their steps in flight in the ledger."""

    def end_drain(self, deadline: float) -> None:
        """Discard what the learner has not taken, once no rollout is in flight."""
